"""Pools by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools import (
    KINDS,
    Leftovers,
    SchedulerAddress,
    clusters,
    get_pool,
    own_clusters,
)
from etrain_jupyter.pools.external.pool import AddressPool
from etrain_jupyter.pools.local.pool import LocalPool


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path))
    return tmp_path


def test_local_is_a_pool() -> None:
    assert isinstance(get_pool("local"), LocalPool)
    assert "local" in KINDS


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


@pytest.fixture
def is_installed(monkeypatch: pytest.MonkeyPatch) -> list[bool | PoolError]:
    """Let a Dask scheduler have our part, not have it, or not answer."""
    state: list[bool | PoolError] = [True]

    def look(self: AddressPool) -> bool:
        if isinstance(state[0], PoolError):
            raise state[0]
        return state[0]

    monkeypatch.setattr(AddressPool, "is_installed", look)
    monkeypatch.setattr(AddressPool, "down", lambda self, *, timeout_s: Leftovers())
    own_clusters.note_scheduler(DASK)
    return state


def test_down_removes_our_part_from_a_dask_scheduler(
    is_installed: list[bool | PoolError],
) -> None:
    assert clusters.down() == "etrain on tcp://10.0.3.7:8786 has ended"
    assert clusters.down() == "No cluster is up.", "the scheduler is forgotten"


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
