"""A supervisor reports notices of plug-ins and of a signal to every coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from etrain_jupyter import plugin
from etrain_jupyter.worker import preemption_watch as module
from etrain_jupyter.worker.preemption_watch import PreemptionWatch, seconds_from_environment


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch):
    """Wherever the tests run."""
    monkeypatch.setenv("ETRAIN_NOTICES", "off")
    monkeypatch.delenv("ETRAIN_NOTICE_S", raising=False)


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


class StandInWatch:
    """A watch of a plug-in that reports notices when the test says so."""

    def __init__(self, report):
        self.report = report
        self.is_stopped = False

    def stop(self):
        self.is_stopped = True


async def test_notices_of_plug_ins_are_reported_to_each_coordinator(monkeypatch):
    watches = []

    def start(report):
        watches.append(StandInWatch(report))
        return watches[0]

    plugins = {
        "cloud": plugin.Plugin(notices="cloud:start"),
        "elsewhere": plugin.Plugin(notices="elsewhere:start"),
        "without": plugin.Plugin(),
    }
    starts = {"cloud:start": start, "elsewhere:start": lambda report: None}
    monkeypatch.setattr(plugin, "installed", lambda: plugins)
    monkeypatch.setattr(plugin, "load", starts.__getitem__)
    told = []
    notices = PreemptionWatch(told.append)
    notices.start()
    [watch] = watches
    thread = threading.Thread(target=watch.report, args=[module.Notice(kind="rebalance")])
    thread.start()
    await until(lambda: told)
    thread.join()
    notices.send_again()
    assert [message.notice for message in told] == ["rebalance", "rebalance"]
    await notices.stop()
    assert watch.is_stopped


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
