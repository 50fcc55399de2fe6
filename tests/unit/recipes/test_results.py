from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.results import results_table


def job(name: str, workers: list[int], compute_s: float, usd: float | None = None) -> Any:
    """Return a job with steps of 8 samples per worker, 1 s of loading, and an evaluation of 5 s."""
    n = len(workers)
    history = {
        "step": list(range(1, n + 1)),
        "samples": [8 * count for count in workers],
        "world_size": workers,
        "data_s": [1.0] * n,
        "compute_s": [compute_s] * n,
        "communication_s": [0.5] * n,
        "optimizer_s": [0.5] * n,
        "time": [100.0 + step * (compute_s + 2.0) + (5.0 if step else 0.0) for step in range(n)],
        "eval_f1": [70.0, 72.0, *[math.nan] * (n - 2)],
    }
    cost = SimpleNamespace(is_known=usd is not None, spent_usd=usd or 0.0)
    return SimpleNamespace(name=name, cost=lambda: cost, history=lambda: history)


def test_throughput_excludes_loading_and_evaluation() -> None:
    [row] = results_table([job("one", [1, 1, 1], 3.0, usd=2.5)])

    assert row["samples_per_s"] == 8 / 4
    assert row["samples_per_s_overall"] == 16 / 15
    assert row["hours"] == 15 / 3600
    assert (row["f1"], row["usd"], row["workers"], row["efficiency"]) == (72.0, 2.5, 1.0, 1.0)
    assert math.isnan(row["exact"])


def test_efficiency_is_relative_to_the_job_with_the_fewest_workers() -> None:
    rows = results_table([job("four", [4] * 3, 4.0), job("one", [1] * 3, 3.0)])

    assert [row["job"] for row in rows] == ["four", "one"]
    assert rows[0]["efficiency"] == pytest.approx((32 / 5 / 4) / (8 / 4))
    assert rows[1]["efficiency"] == 1.0
    assert math.isnan(rows[0]["usd"])


def test_changing_workers_count_by_their_time() -> None:
    [row] = results_table([job("elastic", [1, 1, 1, 3], 3.0)])

    assert row["workers"] == 1.5
    assert row["samples_per_s"] == (24 + 24) / 16


def test_job_without_steps_is_refused() -> None:
    with pytest.raises(RecipeError, match="job empty has 1 steps"):
        results_table([job("empty", [1], 3.0)])
    assert results_table([]) == []
