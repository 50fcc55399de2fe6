from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import Event, JobStatusChanged, JobSubmitted
from etrain_jupyter.notebook.commands import other_jobs
from etrain_jupyter.notebook.job import run_store
from etrain_jupyter.notebook.job.cluster_location import ClusterLocation
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.process.cluster_dir import LOAD_FILE, ClusterDir, Load, write_load
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.state_root import open_state_root


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")


def make_job(store: RunStore, name: str, *, status: str, cluster: ClusterDir | None = None) -> str:
    known = cluster.record() if cluster else None
    address = cluster.address(known).to_dict() if cluster and known else {}
    record = store.create({"name": name, "created": 1.0, "cluster": address})
    common: dict[str, Any] = {"job_id": record.job_id, "time": 1.0}
    log = EventLog(record.log_path, fsync_every_s=None)
    events: list[Event] = [
        JobSubmitted(**common, name=name, min_workers=1, max_workers=2),
        JobStatusChanged(**common, status=status),
    ]
    log.append(events)
    log.close()
    return record.job_id


def test_running_jobs_that_are_not_followed_are_offered(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_store, "find_cluster", lambda cluster, host: ClusterLocation())
    running = make_job(store, "running", status="running")
    followed = make_job(store, "followed", status="running")
    make_job(store, "over", status="finished")

    assert other_jobs.find_others(store, {followed}) == [
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
    ended = ClusterLocation(has_ended=True)
    monkeypatch.setattr(run_store, "find_cluster", lambda cluster, host: ended)
    make_job(store, "orphan", status="running")

    assert other_jobs.find_others(store, ()) == []


class Bucket(RunStore):
    """A run store whose address is not its folder."""

    def __str__(self) -> str:
        return "s3://bucket/runs"


def test_bucket_is_scanned_only_on_request_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_jobs, "find_pools", list)
    bucket = Bucket(tmp_path / "copies")

    assert other_jobs.find_other_jobs(bucket, (), is_asked=False).others is None
    assert other_jobs.find_other_jobs(bucket, (), is_asked=True).others == ()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterDir:
    """A cluster that this process keeps."""
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    cluster = ClusterDir.create(open_state_root(), ClusterSettings(idle_s=900.0))
    cluster.publish("tls://127.0.0.1:1")
    return cluster


def test_idle_cluster_has_its_idle_time_and_its_remaining_time(cluster: ClusterDir) -> None:
    write_load(cluster, Load(workers=2, idle_since=time.time() - 400.0))

    [pool] = other_jobs.find_pools()

    assert (pool["cluster_id"], pool["workers"]) == (cluster.cluster_id, 2)
    assert pool["idle_s"] >= 400.0
    assert pool["idle_s"] + pool["ends_in_s"] == pytest.approx(900.0)


def test_a_cluster_with_a_job_is_not_idle(cluster: ClusterDir) -> None:
    write_load(cluster, Load(workers=2, idle_since=None))

    assert [pool["idle_s"] for pool in other_jobs.find_pools()] == [0.0]


def test_cluster_without_an_idle_limit_has_no_remaining_time(
    cluster: ClusterDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterDir, "settings", lambda _: ClusterSettings(idle_s=float("inf")))
    write_load(cluster, Load(workers=0, idle_since=1.0))

    [pool] = other_jobs.find_pools()

    assert pool["ends_in_s"] is None


@pytest.mark.parametrize("text", [None, "", "[]", '{"workers": 1}', "{"])
def test_a_cluster_whose_load_is_not_known_is_left_out(
    cluster: ClusterDir, text: str | None
) -> None:
    if text is not None:
        (cluster.path / LOAD_FILE).write_text(text)

    assert other_jobs.find_pools() == []


def test_a_cluster_that_has_ended_is_left_out(cluster: ClusterDir) -> None:
    write_load(cluster, Load(workers=2, idle_since=None))
    cluster.retract()

    assert other_jobs.find_pools() == []


def test_scan_imports_no_dask(cluster: ClusterDir, store: RunStore) -> None:
    # On a thread it would break the import of a cell that needs it at the same moment.
    make_job(store, "running", status="running", cluster=cluster)
    write_load(cluster, Load(workers=2, idle_since=None))
    code = (
        "import sys; from etrain_jupyter.notebook.job.runs import open_runs\n"
        "from etrain_jupyter.notebook.commands.other_jobs import find_other_jobs\n"
        "around = find_other_jobs(open_runs(), (), is_asked=True)\n"
        "print(len(around.others), len(around.pools))\n"
        "print([name for name in ('dask', 'distributed', 'torch') if name in sys.modules])"
    )
    environment = {**os.environ, "ETRAIN_RUNS": str(store.root)}

    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    assert run.stdout.split("\n")[:2] == ["1 1", "[]"]
