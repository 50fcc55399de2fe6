"""What `%etrain pools` says of a cluster's load."""

from __future__ import annotations

from typing import Any

import pytest

from etrain_jupyter.pools.local.pool import load_in_words
from etrain_jupyter.wire.requests import ClusterFacts


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"workers": 1, "jobs": 1, "idle_s": 0.0}, "1 worker, 1 job"),
        ({"workers": 3, "jobs": 2, "idle_s": 0.0}, "3 workers, 2 jobs"),
        ({"workers": 2, "jobs": 0, "idle_s": 7.4}, "2 workers, no job, idle for 7 s"),
    ],
)
def test_only_a_cluster_without_jobs_is_idle(facts: dict[str, Any], words: str) -> None:
    assert load_in_words(ClusterFacts(cluster_id="c", pid=1, **facts)) == words
