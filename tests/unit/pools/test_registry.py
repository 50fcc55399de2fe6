"""Pools by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools import (
    Leftovers,
    SchedulerAddress,
    clusters,
    detached,
    get_pool,
    own_clusters,
)
from etrain_jupyter.pools.address.pool import AddressPool
from etrain_jupyter.pools.local import LocalPool
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.start_lock import start_lock
from etrain_jupyter.process.state_root import local_prefix
from etrain_jupyter.wire.requests import (
    ClusterFacts,
    DescribeCluster,
    JobList,
    ListJobs,
    Request,
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path))
    return tmp_path


def test_local_is_a_pool() -> None:
    assert isinstance(get_pool("local"), LocalPool)


def test_error_for_an_unknown_pool_suggests_the_nearest_name() -> None:
    with pytest.raises(
        PoolError, match=r"no pool 'lokal'\. Known pools: local.*Did you mean 'local'"
    ):
        get_pool("lokal")


def test_without_clusters_nothing_is_listed_or_stopped(state: Path) -> None:
    assert "local: processes on this machine\n  no cluster is up" in clusters.describe_pools()
    assert clusters.down() == "No cluster is up."
    with pytest.raises(PoolError, match="no cluster 'local-1-2' is up"):
        clusters.down("local-1-2")


DASK = SchedulerAddress(address="tcp://10.0.3.7:8786", cluster_id="Scheduler-1")


IDLE = ClusterFacts(cluster_id="c", pid=1, idle_s=7.0)
BUSY = ClusterFacts(cluster_id="c", pid=1, jobs=1)
JOBS = JobList(
    jobs=(
        {"job_id": "bbb-1", "status": "running", "step": 1584, "total_steps": 5000},
        {"job_id": "aaa-1", "status": "finished", "step": 10, "total_steps": 10},
    )
)
HOW = "To save and end it: %etrain down {}. To end all clusters: %etrain down --all"


@pytest.fixture
def answers() -> dict[type[Request[Any]], Any]:
    """Replies of all schedulers."""
    return {DescribeCluster: IDLE, ListJobs: JOBS}


@pytest.fixture
def is_installed(
    monkeypatch: pytest.MonkeyPatch, answers: dict[type[Request[Any]], Any]
) -> list[bool | PoolError]:
    """Let a Dask scheduler have our part, not have it, or not answer."""
    state: list[bool | PoolError] = [True]

    def look(self: AddressPool) -> bool:
        if isinstance(state[0], PoolError):
            raise state[0]
        return state[0]

    monkeypatch.setattr(AddressPool, "is_installed", look)
    monkeypatch.setattr(AddressPool, "down", lambda self, *, timeout_s=0.0: Leftovers())
    monkeypatch.setattr(clusters, "ask", lambda address, request: answers[type(request)])
    own_clusters.note_scheduler(DASK)
    return state


def test_down_removes_our_part_from_a_dask_scheduler(
    is_installed: list[bool | PoolError],
) -> None:
    assert clusters.down() == "etrain on tcp://10.0.3.7:8786 has ended"
    assert clusters.down() == "No cluster is up.", "the scheduler is forgotten"


def test_down_without_a_name_keeps_a_dask_scheduler_with_jobs(
    is_installed: list[bool | PoolError], answers: dict[type[Request[Any]], Any]
) -> None:
    answers[DescribeCluster] = BUSY

    lines = clusters.down().splitlines()

    assert lines[0] == "tcp://10.0.3.7:8786 was not changed: it has running jobs."
    assert lines[1:] == ["  bbb-1: running, step 1,584 of 5000", HOW.format(DASK.address)]
    assert clusters.down(all_clusters=True) == "etrain on tcp://10.0.3.7:8786 has ended"


@pytest.fixture
def local(
    monkeypatch: pytest.MonkeyPatch, answers: dict[type[Request[Any]], Any]
) -> Callable[[str], None]:
    """Return a function that creates the folder of a running local cluster."""
    monkeypatch.setattr(clusters, "ask", lambda address, request: answers[type(request)])
    monkeypatch.setattr(LocalPool, "down", lambda self, *, timeout_s: Leftovers())

    def create(cluster_id: str) -> None:
        cluster = ClusterDir.make(Path(os.environ["ETRAIN_STATE"]) / cluster_id, ClusterSettings())
        cluster.publish("tls://127.0.0.1:1")

    return create


def test_down_without_a_name_keeps_a_cluster_with_running_jobs(
    local: Callable[[str], None], answers: dict[type[Request[Any]], Any]
) -> None:
    name = f"{local_prefix()}-1"
    local(name)
    answers[DescribeCluster] = BUSY

    kept = clusters.down()

    assert kept.splitlines() == [
        f"{name} was kept: it has running jobs.",
        "  bbb-1: running, step 1,584 of 5000",
        HOW.format(name),
    ]
    assert clusters.down(name) == f"{name} has ended"
    assert clusters.down(all_clusters=True) == f"{name} has ended"


def test_down_without_a_name_ends_idle_clusters_of_this_python_environment_only(
    local: Callable[[str], None],
) -> None:
    name = f"{local_prefix()}-1"
    local(name)
    local("local-f00-1")

    assert clusters.down().splitlines() == [
        f"{name} has ended",
        "local-f00-1 was kept: it belongs to another Python environment. "
        + HOW.format("local-f00-1"),
    ]


def test_down_without_a_name_keeps_a_cluster_that_is_starting(state: Path) -> None:
    cluster = ClusterDir.create(state, ClusterSettings())

    with start_lock(state, cluster.lock_key, timeout_s=0.0):
        kept = clusters.down()

    assert kept.startswith(f"{cluster.cluster_id} was kept: it is starting or shutting down. ")
    assert clusters.down() == f"{cluster.cluster_id} has ended", "dead: the lock is free"


def test_down_does_not_mention_a_dask_scheduler_without_our_part(
    is_installed: list[bool | PoolError],
) -> None:
    is_installed[0] = False

    assert clusters.down() == "No cluster is up."
    assert own_clusters.noted_schedulers() == []


def test_down_names_a_dask_scheduler_that_it_cannot_reach(
    is_installed: list[bool | PoolError],
) -> None:
    is_installed[0] = PoolError("10.0.3.7 cannot be reached")

    expected = "tcp://10.0.3.7:8786 was not changed: 10.0.3.7 cannot be reached"
    assert clusters.down() == expected
    assert own_clusters.noted_schedulers() == [DASK]


def test_kernel_with_other_credentials_gets_its_own_local_cluster(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(detached, "ask", lambda *_, **__: None)
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    cluster = ClusterDir.create(state, LocalPool().settings())
    cluster.publish("tls://127.0.0.1:1")
    found = cluster.address(cluster.record())

    monkeypatch.setenv("PATH", "/bin:/bin:/usr/bin")  # the same folders in the same order
    assert LocalPool().up() == found
    monkeypatch.setenv("AWS_PROFILE", "other")
    monkeypatch.setenv("PATH", "/usr/bin")
    assert LocalPool()._find() is None
    assert LocalPool(cluster_id=cluster.cluster_id).up() == found

    monkeypatch.setattr("etrain_jupyter.pools.local.remove_stale", lambda root: None)
    LocalPool().prepare_start(state)
    assert capsys.readouterr().out == (
        f"etrain: starting another local cluster, because {cluster.cluster_id} was started with "
        "other values of AWS_PROFILE, PATH.\n"
    )


@pytest.mark.plugins
def test_pool_is_stopped_by_its_name() -> None:
    assert clusters.down("local") == "local has ended"


def test_error_without_a_cluster_explains_how_to_start_one() -> None:
    with pytest.raises(PoolError, match="no local cluster is up"):
        get_pool("local").nodes()


def test_address_round_trips_through_json() -> None:
    address = SchedulerAddress(
        address="tls://h:1", cluster_id="c", state_dir="/s", tls_dir="/s/tls"
    )

    assert SchedulerAddress.from_dict(address.to_dict() | {"later": "1"}) == address


def test_address_without_certificates_needs_no_arguments() -> None:
    assert SchedulerAddress(address="tcp://h:1", cluster_id="c").connection_args() == {}


def test_importing_pools_loads_nothing_heavy() -> None:
    code = (
        "import sys, etrain_jupyter.pools;"
        "print({'torch', 'distributed', 'dask', 'cryptography', 'IPython'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout == "set()\n"
