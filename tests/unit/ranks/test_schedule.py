"""When what repeats is due."""

from __future__ import annotations

import pytest

from etrain_jupyter.config.schema import Interval
from etrain_jupyter.ranks.schedule import Every, WorkPlan

PLAN = WorkPlan(num_train=70, num_eval=0, global_batch_size=16, steps_per_epoch=5, total_steps=20)


def due(text: str) -> list[int]:
    every = Every(Interval.parse(text), PLAN)
    return [step for step in range(1, PLAN.total_steps + 1) if every.is_due(step)]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("7 steps", [7, 14]),
        ("1 epoch", [5, 10, 15, 20]),
        ("0.5 epochs", [3, 5, 8, 10, 13, 15, 18, 20]),
        ("1 h", []),
    ],
)
def test_interval_is_due_at_the_first_boundary_that_reaches_it(text, steps):
    assert due(text) == steps


def test_counting_by_steps_is_the_same_wherever_a_rank_begins():
    every = Every(Interval.parse("7 steps"), PLAN)
    assert [every.times_until(step) for step in (0, 6, 7, 13, 14)] == [0, 0, 1, 1, 2]


def test_step_of_the_plan_is_its_range_in_the_ledger():
    assert PLAN.span(4) == (0, 64, 6)
    assert PLAN.span(5) == (1, 0, 16)
