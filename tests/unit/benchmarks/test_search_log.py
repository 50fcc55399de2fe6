"""Moves of workers and use of the pool, from the logs of a study's trials."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.models.search_log import moves_of, utilization_of
from etrain_jupyter.log import events as e
from tests.unit.log.spent import NOTHING_ELSE, PLAIN_STEP


def joined(at: float, worker: str) -> e.Event:
    return e.WorkerJoined(job_id="t", time=at, worker=worker)


def warmed(at: float, worker: str) -> e.Event:
    return e.WorkerWarmed(job_id="t", time=at, worker=worker, trainer_pid=1, warm_s=1.0)


def formed(at: float, generation: int, *workers: str) -> e.Event:
    return e.GenerationFormed(
        job_id="t", time=at, generation=generation, why="join", world_size=len(workers),
        ranks=list(workers), backend="gloo",
    )  # fmt: skip


def stepped(at: float, generation: int) -> e.Event:
    values: dict[str, Any] = {
        "step": 1, "epoch": 0, "first": 0, "samples": 1, "sample_checksum": 0, "loss": 1.0,
        "lr": 0.1, "world_size": 1, "samples_per_s": 1.0,
    }  # fmt: skip
    return e.StepCompleted(job_id="t", time=at, generation=generation, **values, **PLAIN_STEP)


def decided(at: float) -> e.Event:
    return e.LogLine(job_id="t", time=at, level="info", worker="", text="The study stops it: poor")


def ended(at: float, status: Any = "stopped") -> e.Event:
    return e.JobStatusChanged(job_id="t", time=at, status=status)


def test_move_ends_with_the_first_step_of_another_trial_on_the_freed_worker() -> None:
    pruned = [
        *(joined(0.0, "w1"), warmed(1.0, "w1"), formed(1.0, 1, "w1"), stepped(2.0, 1)),
        *(decided(10.0), ended(10.5)),
    ]
    other = [
        *(joined(0.0, "w2"), warmed(1.0, "w2"), formed(1.0, 1, "w2"), stepped(9.0, 1)),
        *(joined(10.75, "w1"), warmed(12.0, "w1"), stepped(12.1, 1)),  # without w1
        *(formed(12.25, 2, "w2", "w1"), stepped(12.5, 2), ended(20.0, "finished")),
    ]

    [move] = moves_of({3: pruned, 7: other})

    assert move.worker == "w1"
    assert move.parts_s == {
        "stop_s": 0.5, "grant_s": 0.25, "warm_s": 1.25, "form_s": 0.25, "step_s": 0.25,
    }  # fmt: skip
    assert move.total_s == 2.5


def test_worker_that_no_trial_needs_any_more_has_not_moved() -> None:
    pruned = [joined(0.0, "w1"), formed(1.0, 1, "w1"), stepped(2.0, 1), decided(3.0), ended(4.0)]
    never_stepped = [joined(5.0, "w1"), ended(6.0)]

    assert moves_of({0: pruned}) == []
    assert moves_of({0: pruned, 1: never_stepped}) == []


def test_utilization_counts_every_rank_from_the_first_step_to_the_last() -> None:
    def timed(at: float, rank: int, elapsed_s: float) -> e.Event:
        return e.RankTimed(
            job_id="t", time=at, worker=f"w{rank}", rank=rank, world_size=2, step=1, num_steps=1,
            samples=1, elapsed_s=elapsed_s, data_s=0.0, compute_s=elapsed_s, communication_s=0.0,
            optimizer_s=0.0, **NOTHING_ELSE,
        )  # fmt: skip

    one = [
        joined(0.0, "w1"),
        stepped(11.0, 1),
        stepped(14.0, 1),
        timed(14.0, 0, 2.0),
        timed(14.0, 1, 1.0),
    ]
    other = [joined(0.0, "w2"), stepped(12.0, 1), timed(20.0, 0, 1.5)]

    share, duration_s = utilization_of([one, other])

    assert duration_s == 3.0
    assert share == pytest.approx((2.0 + 1.0 + 1.5) / (2 * 3.0))
