"""A search on an external Dask cluster, whose scheduler is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from etrain_jupyter.plugins.search.commands import plan_search
from etrain_jupyter.plugins.search.open_studies import attach_study, submit_study
from etrain_jupyter.pools.address.pool import AddressPool
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long
from tests.integration.dask_cluster import DaskCluster
from tests.integration.slow_jobs import PATIENCE_S, until
from tests.integration.test_address_pool import cluster, forgotten_sockets, pytestmark, runs
from tests.integration.test_search import BODY, NAMES

__all__ = ["cluster", "forgotten_sockets", "pytestmark", "runs"]


@pytest.mark.slow
@long
def test_study_of_a_killed_scheduler_is_lost_and_another_scheduler_continues_it(
    cluster: DaskCluster, runs: Path
) -> None:
    for _ in range(2):
        cluster.start_worker()
    flags = {"name": "net", "pool": cluster.address}
    study = submit_study(plan_search(BODY, NAMES, flags, "%%etrain search"))
    until(lambda: any(trial.curve for trial in study.view().trials), "an evaluation")
    assert study.status == "running"

    cluster.kill("scheduler")
    assert study.status == attach_study("net").status == "lost"
    cluster.end_workers()
    cluster.start_scheduler()
    for _ in range(2):
        cluster.start_worker()
    study.resume()

    assert study.wait(timeout=PATIENCE_S) == "finished"
    trials = study.view().trials
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert {trial.state for trial in trials} <= {"COMPLETE", "PRUNED"}
    for trial in trials:
        assert_invariants(study.job(trial.number).events())
    assert AddressPool(cluster.address).down(timeout_s=60.0) == Leftovers()
