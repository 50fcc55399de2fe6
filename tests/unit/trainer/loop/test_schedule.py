"""When what repeats is due."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.config.schema import Interval
from etrain_jupyter.trainer.loop.schedule import CheckpointPace, Every, Mark, WorkPlan
from etrain_jupyter.wire.messages import PaceUpdate

PLAN = WorkPlan(num_train=70, num_eval=0, global_batch_size=16, steps_per_epoch=5, total_steps=20)


def due(text: str) -> list[int]:
    every = Every(Interval.parse(text), PLAN)
    marks = [Mark(0, 0)]
    while marks[-1].position < PLAN.end:
        step, position = marks[-1]
        marks.append(Mark(step + 1, position + PLAN.span(position, 16).samples))
    return [now.step for before, now in itertools.pairwise(marks) if every.is_due(before, now)]


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
def test_epochs_are_counted_in_samples_whatever_the_batches(sizes, epochs):
    every = Every(Interval(value=epochs, unit="epochs"), PLAN)
    before, num_due = Mark(0, 0), 0
    for size in sizes:
        now = Mark(before.step + 1, before.position + size)
        num_due += every.is_passed(before, now)
        before = now
    # At most once a step, else once for each of its places.
    assert num_due <= min(len(sizes), math.floor(before.position / (epochs * 70) + 1e-9))


def test_step_is_its_range_in_the_ledger():
    assert PLAN.span(64, 16) == (0, 64, 6)
    assert PLAN.span(70, 16) == (1, 0, 16)
    assert PLAN.span(70, 100) == (1, 0, 70)


def test_job_ends_with_its_last_sample_however_large_the_last_step_could_be():
    plan = dataclasses.replace(PLAN, total_steps=7)
    assert plan.end == 102
    assert plan.span(96, 64) == (1, 26, 6)
    assert [p for p in (69, 70, 96, 102) if plan.is_boundary(p)] == [70, 102]


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("etrain_jupyter.trainer.loop.schedule.time", self)

    def monotonic(self) -> float:
        return self.now


def test_first_checkpoint_of_a_job_is_due_soon_because_it_tells_what_one_costs(monkeypatch):
    clock = Clock(monkeypatch)
    pace = CheckpointPace()
    clock.now += 9.9
    assert not pace.is_due()
    clock.now += 0.1
    assert pace.is_due()


def test_new_rank_0_saves_when_the_newest_checkpoint_is_old_whoever_wrote_it(monkeypatch):
    clock = Clock(monkeypatch)
    pace = CheckpointPace()
    clock.now += 500  # it has been another rank so far
    pace.adopt(PaceUpdate(interval_s=100.0, age_s=40.0))
    assert not pace.is_due()
    clock.now += 60
    assert pace.is_due()


def test_other_interval_counts_from_the_same_checkpoint(monkeypatch):
    clock = Clock(monkeypatch)
    pace = CheckpointPace()
    pace.adopt(PaceUpdate(interval_s=100.0, age_s=0.0))
    clock.now += 50
    pace.adopt(PaceUpdate(interval_s=50.0))
    assert pace.is_due()
    pace.restart()
    assert not pace.is_due()


def test_failed_checkpoint_is_tried_again_before_a_long_interval_is_over(monkeypatch):
    clock = Clock(monkeypatch)
    pace = CheckpointPace()
    pace.adopt(PaceUpdate(interval_s=600.0, age_s=0.0))
    pace.hurry()
    clock.now += 29
    assert not pace.is_due()
    clock.now += 1
    assert pace.is_due()


def test_failed_checkpoint_is_not_tried_more_often_than_the_interval_says(monkeypatch):
    clock = Clock(monkeypatch)
    pace = CheckpointPace()
    pace.hurry()
    clock.now += 9
    assert not pace.is_due()
