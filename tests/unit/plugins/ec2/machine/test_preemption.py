"""The supervisor's watch polls the metadata service on an EC2 instance, and nowhere else."""

from __future__ import annotations

import asyncio
import time

import pytest

from etrain_jupyter.plugins.ec2.simulator.imds import ImdsServer
from etrain_jupyter.worker.preemption_watch import PreemptionWatch


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch):
    """Wherever the tests run."""
    monkeypatch.setenv("ETRAIN_NOTICES", "off")
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_machine_that_is_not_an_ec2_instance_does_not_poll():
    notices = PreemptionWatch(lambda message: None)
    notices.start()
    assert notices._watches == []
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
        [watch] = notices._watches
        await notices.stop()
        assert not watch._thread.is_alive()
