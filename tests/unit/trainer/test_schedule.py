"""Work plans, and schedules of what repeats."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.config.schema import Interval
from etrain_jupyter.trainer.state.train_state import Every, Mark, WorkPlan

PLAN = WorkPlan(num_train=70, num_eval=0, global_batch_size=16, steps_per_epoch=5, total_steps=20)


def due(text: str) -> list[int]:
    every = Every(Interval.parse(text), PLAN, now=0.0)
    marks = [Mark(0, 0)]
    while marks[-1].position < PLAN.end:
        step, position = marks[-1]
        marks.append(Mark(step + 1, position + PLAN.span(position, 16).samples))
    steps = itertools.pairwise(marks)
    return [after.step for before, after in steps if every.is_due(before, after, now=1.0)]


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


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.floats(0.01, 3.0))
def test_epochs_are_counted_in_samples_at_any_batch_size(sizes, epochs):
    every = Every(Interval(value=epochs, unit="epochs"), PLAN, now=0.0)
    before, num_due = Mark(0, 0), 0
    for size in sizes:
        now = Mark(before.step + 1, before.position + size)
        num_due += every.is_passed(before, now)
        before = now
    # Once per multiple of the interval, but at most once per step.
    assert num_due <= min(len(sizes), math.floor(before.position / (epochs * 70) + 1e-9))


def test_step_covers_its_range_of_the_ledger():
    assert PLAN.span(64, 16) == (0, 64, 6)
    assert PLAN.span(70, 16) == (1, 0, 16)
    assert PLAN.span(70, 100) == (1, 0, 70)


def test_queries_of_a_schedule_have_no_effect():
    every = Every(Interval.parse("10 s"), PLAN, now=100.0)
    step = Mark(0, 0), Mark(1, 16)
    assert [every.is_due(*step, now=109.9) for _ in range(2)] == [False, False]
    assert [every.is_due(*step, now=110.0) for _ in range(2)] == [True, True]
    every.restart(110.0)
    assert [every.is_due(*step, now=119.0) for _ in range(2)] == [False, False]


def test_job_ends_with_its_last_sample_at_any_size_of_the_last_step():
    plan = dataclasses.replace(PLAN, total_steps=7)
    assert plan.end == 102
    assert plan.span(96, 64) == (1, 26, 6)
    assert [p for p in (69, 70, 96, 102) if plan.is_boundary(p)] == [70, 102]
