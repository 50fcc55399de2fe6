"""Step records go into the log once each."""

from __future__ import annotations

from etrain_jupyter.head.jobs.reports import StepClock


def record(step: int) -> dict:
    return {"step": step, "samples": 32, "samples_per_s": 320.0}


def test_records_resent_by_the_next_rank_0_are_accepted_once():
    clock = StepClock()
    assert [r["step"] for r in clock.take([record(1), record(2)], after=0)] == [1, 2]
    assert [r["step"] for r in clock.take([record(1), record(2), record(3)], after=2)] == [3]
    assert clock.step_s == 0.1


def test_record_after_a_gap_is_accepted():
    clock = StepClock()
    assert [r["step"] for r in clock.take([record(2), record(3)], after=0)] == [2, 3]
