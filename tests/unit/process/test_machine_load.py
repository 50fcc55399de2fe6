"""The load of a cluster in ``%etrain pools``."""

from __future__ import annotations

from typing import Any

import pytest

from etrain_jupyter.pools.local.pool import describe_load
from etrain_jupyter.wire.requests import ClusterFacts


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"workers": 1, "jobs": 1, "idle_s": 0.0}, "1 worker, 1 job"),
        ({"workers": 3, "jobs": 2, "idle_s": 0.0}, "3 workers, 2 jobs"),
        ({"workers": 2, "jobs": 0, "idle_s": 7.4}, "2 workers, no job, idle for 7 s"),
    ],
)
def test_only_a_cluster_without_jobs_is_idle(facts: dict[str, Any], expected: str) -> None:
    assert describe_load(ClusterFacts(cluster_id="c", pid=1, **facts)) == expected
