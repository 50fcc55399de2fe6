"""The audit of jobs whose steps grow and shrink with their workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.log.events import (
    Event,
    GenerationFormed,
    JobPlanned,
    JobStatusChanged,
    JobSubmitted,
    StepCompleted,
)
from etrain_jupyter.notebook.audit import audit_log
from etrain_jupyter.rules.samples.ledger import checksum_of, epoch_order
from tests.unit.log.spent import made

NUM_SAMPLES, EACH, EPOCHS = 50, 8, 2
COMMON: dict[str, Any] = {"job_id": "j", "time": 1.0}
PLAN = made(
    JobPlanned,
    **COMMON,
    **{"num_train_samples": NUM_SAMPLES, "total_samples": EPOCHS * NUM_SAMPLES},
    **{"steps_per_epoch": 7, "total_steps": 14},
    **{"global_batch_size": EACH, "per_worker_batch_size": EACH},
)


def log_of(world_sizes: list[int]) -> list[Event]:
    """A job whose generations make a step each; the last one makes all that are left."""
    events: list[Event] = [JobSubmitted(**COMMON, name="j", min_workers=1, max_workers=8), PLAN]
    position, step = 0, 0
    while position < PLAN.total_samples:
        world_size = world_sizes[min(step, len(world_sizes) - 1)]
        if step < len(world_sizes):
            formed = {"generation": step + 1, "step": step, "trainer_pids": [1] * 8}
            names = [f"w{rank}" for rank in range(world_size)]
            events.append(made(GenerationFormed, **COMMON, **formed, ranks=names))
        epoch, first = divmod(position, NUM_SAMPLES)
        count = min(EACH * world_size, NUM_SAMPLES - first)
        order = epoch_order(seed=0, epoch=epoch, num_samples=NUM_SAMPLES)
        step, position = step + 1, position + count
        events.append(
            made(
                StepCompleted,
                **COMMON,
                **{"generation": min(step, len(world_sizes)), "step": step, "epoch": epoch},
                **{"first": first, "samples": count, "world_size": world_size},
                sample_checksum=checksum_of(order[first : first + count]),
            )
        )
    events.append(JobStatusChanged(**COMMON, status="finished"))
    return events


def numbered(events: list[Event]) -> list[Event]:
    return [event.with_seq(seq) for seq, event in enumerate(events, start=1)]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=10))
def test_every_history_of_world_sizes_passes(world_sizes):
    report = audit_log(numbered(log_of(world_sizes)))
    assert report.ok, str(report)
    assert all(row.seen_once == NUM_SAMPLES for row in report.epochs)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"samples": 7}, "step 2 trained 7 samples, expected 16"),
        ({"first": 0}, "step 2 began at sample 0 of epoch 0, expected 8 of epoch 0"),
        ({"sample_checksum": 1}, "step 2"),
        ({"world_size": 3}, "step 2 trained 16 samples, expected 24"),
    ],
)
def test_wrong_step_is_found(change, problem):
    events = log_of([1, 2, 4])
    events = [
        replace(e, **change) if isinstance(e, StepCompleted) and e.step == 2 else e for e in events
    ]
    report = audit_log(numbered(events))
    assert any(problem in text for text in report.problems), str(report)


def test_job_that_finishes_early_is_found():
    events = log_of([1, 2, 4])
    last = max(e.step for e in events if isinstance(e, StepCompleted))
    events = [e for e in events if not (isinstance(e, StepCompleted) and e.step == last)]
    report = audit_log(numbered(events))
    assert any("finished after" in text for text in report.problems), str(report)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=10))
def test_total_steps_are_predicted_exactly_after_the_last_change(world_sizes):
    steps = [e for e in log_of(world_sizes) if isinstance(e, StepCompleted)]
    for step in steps[len(world_sizes) - 1 :]:
        assert PLAN.total_steps_after(step) == len(steps)
