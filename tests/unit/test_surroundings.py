from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter import surroundings
from etrain_jupyter.errors import PoolError
from etrain_jupyter.events.log import EventLog
from etrain_jupyter.events.types import Event, JobStatusChanged, JobSubmitted
from etrain_jupyter.job import run_store
from etrain_jupyter.job.run_store import RunStore
from etrain_jupyter.pools.base import SchedulerAddress
from etrain_jupyter.pools.state_dir import ClusterDir, LocalSettings, open_state_root


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")


def make_job(store: RunStore, name: str, *, status: str) -> str:
    record = store.create({"name": name, "created": 1.0})
    common: dict[str, Any] = {"job_id": record.job_id, "time": 1.0}
    log = EventLog(record.log_path, fsync_every_s=None)
    events: list[Event] = [
        JobSubmitted(**common, name=name, min_workers=1, max_workers=2),
        JobStatusChanged(**common, status=status),
    ]
    log.append(events)
    log.close()
    return record.job_id


def test_jobs_that_run_and_are_not_followed_are_offered(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_store, "link_to", lambda cluster: object())
    running = make_job(store, "running", status="running")
    followed = make_job(store, "followed", status="running")
    make_job(store, "over", status="finished")

    assert surroundings.find_others(store, {followed}) == [
        {
            "job_id": running,
            "name": "running",
            "status": "running",
            "step": 0,
            "total_steps": 0,
            "world_size": 0,
        }
    ]


def test_a_job_whose_cluster_has_ended_is_not_offered(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_store, "link_to", lambda cluster: None)
    make_job(store, "orphan", status="running")

    assert surroundings.find_others(store, ()) == []


class Bucket(RunStore):
    """A run store whose address is not its folder."""

    def __str__(self) -> str:
        return "s3://bucket/runs"


def test_a_bucket_is_looked_into_only_if_a_person_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "find_pools", list)
    bucket = Bucket(tmp_path / "copies")

    assert surroundings.look_around(bucket, (), is_asked=False).others is None
    assert surroundings.look_around(bucket, (), is_asked=True).others == ()


@pytest.mark.parametrize(("idle_limit_s", "left_s"), [(900.0, 500.0), (float("inf"), None)])
def test_a_cluster_that_is_up_tells_its_load_and_when_it_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    idle_limit_s: float,
    left_s: float | None,
) -> None:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path))
    cluster = ClusterDir.create(open_state_root(), LocalSettings(idle_s=idle_limit_s))
    address = SchedulerAddress(
        address="tls://127.0.0.1:1", cluster_id="local-1", state_dir=str(cluster.path)
    )
    asked: list[str] = []

    def ask(address: SchedulerAddress, op: str, *, timeout_s: float) -> dict[str, Any]:
        asked.append(op)
        return {"workers": 2, "jobs": 0, "idle_s": 400.0}

    monkeypatch.setattr(surroundings, "find_clusters", lambda: [address])
    monkeypatch.setattr(surroundings, "ask", ask)

    [pool] = surroundings.find_pools()

    assert (pool["workers"], pool["jobs"], pool["idle_s"]) == (2, 0, 400.0)
    assert pool["ends_in_s"] == left_s
    assert asked == ["etrain_describe"], "etrain_pool_touch would keep it from ending"


def test_a_cluster_that_does_not_answer_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_args: Any, **_kwargs: Any) -> dict[str, Any]:
        raise PoolError("no answer")

    address = SchedulerAddress(
        address="tls://127.0.0.1:1", cluster_id="local-1", state_dir=str(tmp_path)
    )
    monkeypatch.setattr(surroundings, "find_clusters", lambda: [address])
    monkeypatch.setattr(surroundings, "ask", ask)

    assert surroundings.find_pools() == []
