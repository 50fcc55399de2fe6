"""A supervisor hears of its machine's end from EC2 and by signal, and tells every coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from etrain_jupyter.plugins.ec2.simulator.imds import ImdsServer
from etrain_jupyter.worker import preemption_watch as module
from etrain_jupyter.worker.preemption_watch import PreemptionWatch, seconds_from_environment


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch):
    """Wherever the tests run."""
    monkeypatch.setenv("ETRAIN_NOTICES", "off")
    for name in ("ETRAIN_NOTICE_S", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_signal_of_the_batch_system_is_an_interruption(monkeypatch):
    monkeypatch.setenv("ETRAIN_NOTICE_S", "90")
    told = []
    notices = PreemptionWatch(told.append)
    notices.start()
    notices.start()  # with each scheduler that it connects to
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: told)
    [message] = told
    assert message.notice == "interruption"
    assert message.left_s == pytest.approx(90, abs=5)
    await notices.stop()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


async def test_machine_that_is_not_an_ec2_instance_does_not_poll():
    notices = PreemptionWatch(lambda message: None)
    notices.start()
    assert notices._watch is None
    await notices.stop()


async def test_ec2_notices_are_reported_to_each_coordinator(monkeypatch):
    with ImdsServer() as server:
        monkeypatch.delenv("ETRAIN_NOTICES")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
        monkeypatch.setenv("ETRAIN_NOTICE_POLL_S", "0.01")
        told = []
        notices = PreemptionWatch(told.append)
        notices.start()
        server.recommend_rebalance()
        await until(lambda: told)
        server.interrupt(time.time() + 100)
        await until(lambda: len(told) == 2)
        assert [message.notice for message in told] == ["rebalance", "interruption"]
        notices.send_again()
        assert [message.notice for message in told[2:]] == ["rebalance", "interruption"]
        assert told[3].left_s <= told[1].left_s
        watch = notices._watch
        await notices.stop()
        assert not watch._thread.is_alive()


async def test_no_signal_handler_is_installed_outside_of_the_main_thread(caplog):
    async def serve() -> None:
        notices = PreemptionWatch(lambda message: None)
        notices.start()
        await notices.stop()

    before = signal.getsignal(signal.SIGUSR1)
    await asyncio.to_thread(lambda: asyncio.run(serve()))
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("text", ["soon", "0", "-3", ""])
def test_invalid_number_is_logged_and_replaced_by_the_default(text, monkeypatch, caplog):
    monkeypatch.setenv("ETRAIN_NOTICE_S", text)
    assert seconds_from_environment("ETRAIN_NOTICE_S", module.SIGNALLED_S) == 120.0
    assert f"ETRAIN_NOTICE_S={text!r} is not a positive number of seconds" in caplog.text
