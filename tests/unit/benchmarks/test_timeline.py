"""Test the recoveries and stalls that are derived from a job's events."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common.timeline import PHASES, recovery, stalls
from etrain_jupyter.log.events import (
    Event,
    GenerationFormed,
    GenerationReady,
    StepCompleted,
    WorkerLost,
)
from tests.unit.log.spent import PLAIN_STEP


def step(number: int, at: float, generation: int) -> StepCompleted:
    values: dict[str, Any] = dict(epoch=0, first=0, samples=1, sample_checksum=0, loss=0.0, lr=0.1)
    return StepCompleted(
        job_id="j",
        time=at,
        generation=generation,
        step=number,
        world_size=2,
        samples_per_s=1.0,
        **values,
        **PLAIN_STEP,
    )


def formed(generation: int, at: float, why: str, world_size: int) -> GenerationFormed:
    return GenerationFormed(
        job_id="j",
        time=at,
        generation=generation,
        why=why,
        world_size=world_size,
        ranks=[],
        backend="gloo",
    )


def ready(generation: int, at: float, connect_s: float, sync_s: float) -> GenerationReady:
    return GenerationReady(
        job_id="j",
        time=at,
        generation=generation,
        world_size=2,
        connect_s=connect_s,
        sync_s=sync_s,
        wrap_s=0.0,
    )


def lost(at: float) -> WorkerLost:
    return WorkerLost(job_id="j", time=at, worker="w", cause="killed")


def test_phases_of_a_recovery_add_up_to_its_duration() -> None:
    events: list[Event] = [
        step(1, 9.0, 1),
        lost(10.1),
        step(2, 10.15, 1),  # was being committed at the time of the kill
        formed(2, 10.3, "lost", 2),
        ready(2, 10.5, connect_s=0.125, sync_s=0.0625),
        step(3, 11.0, 2),
    ]

    kill = recovery(events, generation=1, killed_at=10.0, step_s=0.25)

    assert kill["total_s"] == pytest.approx(1.0)
    assert kill["beyond_step_s"] == pytest.approx(0.75)
    assert sum(kill[phase] for phase in PHASES) == pytest.approx(kill["total_s"])
    assert kill["form_s"] == 0.125
    assert kill["first_step_s"] == pytest.approx(11.0 - 10.3 - 0.1875)


def test_generation_that_failed_to_form_is_skipped() -> None:
    events: list[Event] = [
        lost(10.1),
        formed(2, 10.2, "lost", 3),
        lost(10.3),
        formed(3, 10.5, "lost", 2),
        ready(3, 10.6, connect_s=0.1, sync_s=0.0),
        step(4, 11.0, 3),
    ]

    kill = recovery(events, generation=1, killed_at=10.0, step_s=0.0)

    assert kill["abort_s"] == pytest.approx(0.4)
    assert kill["first_step_s"] == pytest.approx(0.4)


def generation(number: int, why: str, world_size: int, begin: float) -> list[Event]:
    """Return a generation of five steps, one per second."""
    steps = [step(number * 10 + i, begin + i, number) for i in range(5)]
    return [formed(number, begin - 0.5, why, world_size), *steps]


def test_stall_is_the_time_without_a_commit_minus_one_step() -> None:
    events = [*generation(1, "start", 2, 1.0), *generation(2, "leave", 1, 6.25)]

    (stall,) = stalls(events, least_steps=5)

    assert (stall.why, stall.before, stall.after) == ("leave", 2, 1)
    assert stall.beyond_step_s == pytest.approx(0.25)


def test_changes_before_the_first_counted_generation_are_ignored() -> None:
    events = [
        *generation(1, "start", 1, 1.0),
        *generation(2, "join", 2, 10.0),
        *generation(3, "join", 3, 20.0),
    ]

    assert [stall.after for stall in stalls(events, least_steps=5, first=2)] == [3]


def test_generation_with_too_few_steps_gives_no_stall() -> None:
    events = [formed(1, 0.0, "start", 1), step(1, 1.0, 1), *generation(2, "join", 2, 3.0)]

    assert stalls(events, least_steps=2) == []
