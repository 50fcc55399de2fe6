"""A service of a plug-in runs next to the jobs, and may limit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter import plugin
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.head.coordinator.services import Handler, ServiceHost
from etrain_jupyter.log.events import Event, StepCompleted
from etrain_jupyter.rules.sizing.allocation import Claim
from etrain_jupyter.wire import requests as q
from tests.unit.head.coordinator.rig import Rig


class Service:
    """Gives each job one worker, and records its calls."""

    def __init__(self, host: ServiceHost) -> None:
        self.host = host
        self.is_active = True
        self.calls: list[Any] = []

    def handlers(self) -> dict[type[q.Request[Any]], Handler]:
        return {q.TouchCluster: self._touch, q.ListJobs: self._touch}

    async def _touch(self, request: q.TouchCluster) -> q.ClusterIdentity:
        await self.host.check_submission(Path("j"))
        return q.ClusterIdentity(cluster_id="c", pid=1)

    def replay(self, folder: Path) -> None:
        self.calls.append(folder)

    def start(self) -> None:
        self.calls.append("start")

    def take_events(self, job_id: str, new: Sequence[Event]) -> None:
        self.calls += [(job_id, event.step) for event in new if isinstance(event, StepCompleted)]

    def limit_claims(self, claims: Sequence[Claim], workers: Sequence[str]) -> Sequence[Claim]:
        return [replace(claim, max_workers=1) for claim in claims]

    def stop_all(self, reason: str) -> None:
        self.calls.append(reason)

    async def close(self) -> None:
        self.calls.append("close")


async def test_service_is_called_with_the_events_of_all_jobs_until_the_scheduler_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed", lambda: {"acme": plugin.Plugin(service="a:Service")})
    monkeypatch.setattr(plugin, "load", lambda reference: Service)
    rig = Rig(tmp_path, monkeypatch)
    [guarded] = rig.coordinator._services
    service = guarded.service
    assert isinstance(service, Service)
    handlers = rig.coordinator._handlers()
    touch = handlers[q.TouchCluster]

    rig.coordinator.replay(tmp_path, died_at=0.0)
    rig.hello("w1", "w2")
    await rig.submit()
    rig.warm("w1")
    rig.commit("w1", 1)
    rig.tick()
    assert (await touch(q.TouchCluster())).pid == 1
    assert isinstance(await handlers[q.ListJobs](q.ListJobs()), q.JobList), "ours is not replaced"
    assert rig.job.state.assigned == ("w1",)
    assert rig.coordinator.idle_s() == 0.0
    rig.coordinator.halt("the budget is used up")
    with pytest.raises(RequestError, match="the budget is used up"):
        await touch(q.TouchCluster())
    await rig.coordinator.close()

    assert service.calls == [tmp_path, ("j", 1), "start", "the budget is used up", "close"]


def test_jobs_do_not_need_a_service_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = plugin.Plugin(service="no.such.module:Service")
    monkeypatch.setattr(plugin, "installed", lambda: {"acme": broken})

    assert Rig(tmp_path, monkeypatch).coordinator._services == []
    assert "'acme'" in caplog.text


class Broken(Service):
    """Fails in every call."""

    @property
    def is_active(self) -> bool:
        raise ValueError("is_active")

    @is_active.setter
    def is_active(self, value: bool) -> None:
        pass

    def handlers(self) -> dict[type[q.Request[Any]], Handler]:
        raise ValueError("handlers")

    replay = start = take_events = limit_claims = stop_all = handlers  # type: ignore[assignment]


async def test_jobs_train_although_a_service_fails_in_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "installed", lambda: {"acme": plugin.Plugin(service="a:Broken")})
    monkeypatch.setattr(plugin, "load", lambda reference: Broken)
    rig = Rig(tmp_path, monkeypatch)

    rig.coordinator.replay(tmp_path, died_at=0.0)
    await rig.start("w1", "w2")
    rig.commit("w1", 1)
    rig.tick()
    rig.tick()
    assert rig.job.record.step == 1
    assert rig.job.state.assigned == ("w1", "w2")
    rig.coordinator.halt("the budget is used up")
    await rig.coordinator.close()

    failed = [record.args[1] for record in caplog.records if "failed in" in record.message]
    assert sorted(failed) == sorted(set(failed)), "each failure is logged once"
    assert {"replay", "start", "limit_claims", "stop_all"} <= set(failed)
