"""Tables of results, as in papers on distributed training, from the jobs' logs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.insight.measures import busy_durations, mean_workers
from etrain_jupyter.insight.runs import Job


class PricedJob(Job, Protocol):
    """The part of a ``TrainingJob`` that the table reads."""

    def cost(self) -> Any:
        """Return the cost so far: ``is_known``, and ``spent_usd`` in US dollars."""


def results_table(
    jobs: Iterable[PricedJob], *, scores: Sequence[str] = ("eval_exact", "eval_f1")
) -> list[dict[str, Any]]:
    """Compare jobs: one row per job, for ``pandas.DataFrame``.

    ``etrain_jupyter.compare`` has more columns, checks that the jobs are comparable, and draws
    curves.

    Args:
        jobs: Jobs, running or ended.
        scores: Columns of ``job.history()`` whose best (largest) value is in the table.

    Returns:
        Rows with

        - ``job``: its name;
        - ``workers``: the mean number of workers, weighted by the time of the steps;
        - ``samples_per_s``: samples divided by the time in steps, which excludes loading,
          evaluation, saving and recovery;
        - ``samples_per_s_overall``: samples divided by the time from the first step to the last;
        - the best value of each score, NaN if there is none;
        - ``hours``: time from the first step to the last;
        - ``usd``: cost, NaN if the pool has no prices;
        - ``efficiency``: ``samples_per_s`` per worker, relative to the job with the fewest workers.

    Raises:
        RecipeError: If a job has fewer than two steps.
    """
    rows = [_row_of(job, scores) for job in jobs]
    smallest = min(rows, key=lambda row: float(row["workers"]), default=None)
    for row in rows:
        assert smallest is not None
        row["efficiency"] = _per_worker(row) / _per_worker(smallest)
    return rows


def _row_of(job: PricedJob, scores: Sequence[str]) -> dict[str, Any]:
    history = job.history()
    num_steps = len(history["step"])
    if num_steps < 2:
        raise RecipeError(
            f"job {job.name} has {num_steps} steps, and a rate needs at least 2. Wait until it has "
            "trained, or leave it out."
        )
    busy = busy_durations(history)
    total_busy = float(busy.sum())
    # A step is recorded with the time of its end, so the first step only begins the interval.
    elapsed = history["time"][-1] - history["time"][0]
    cost = job.cost()
    return {
        "job": job.name,
        "workers": mean_workers(history, busy),
        "samples_per_s": sum(history["samples"]) / total_busy,
        "samples_per_s_overall": sum(history["samples"][1:]) / elapsed,
        **{name.removeprefix("eval_"): _best(history.get(name, ())) for name in scores},
        "hours": elapsed / 3600,
        "usd": cost.spent_usd if cost.is_known else math.nan,
    }


def _best(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _per_worker(row: Mapping[str, Any]) -> float:
    return float(row["samples_per_s"] / row["workers"])
