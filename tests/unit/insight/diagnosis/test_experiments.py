"""Judging a suspect by the times of an experiment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from etrain_jupyter.insight.diagnosis.experiments import VARIANTS, judge_experiment
from etrain_jupyter.insight.diagnosis.step_parts import Cause, StepParts
from etrain_jupyter.log.events import ExperimentCompleted
from etrain_jupyter.trainer.loop.trial_steps import COSTS

W0 = StepParts(
    worker="w0",
    data_s=0.02,
    passes_s=0.06,
    metrics_s=0.0,
    communication_s=0.02,
    wait_s=0.01,
    optimizer_s=0.0,
    rest_s=0.0,
)
SLOW = replace(W0, worker="w1", passes_s=0.16)


def result(
    cause: Cause, rounds: list[tuple[float, ...]], *, data_s: float = 0.0, **more: Any
) -> ExperimentCompleted:
    """Return a result; each round has the step of the job and then the variants of the cause."""
    return ExperimentCompleted(
        job_id="j",
        seq=1,
        time=0.0,
        generation=1,
        request="r",
        cause=cause,
        step=9,
        world_size=2,
        variants=list(VARIANTS[cause]),
        times_s=[one for row in rounds for one in row],
        data_s=data_s,
        num_steps=4,
        stall_s=1.5,
        **more,
    )


@pytest.mark.parametrize(
    ("cause", "row", "share", "gain"),
    [
        ("input", (0.1, 0.04), 0.6, None),
        # The exchange takes 0.05 of 0.1; four passes with one exchange take 0.25 instead of 0.4.
        ("communication", (0.1, 0.1, 0.05, 0.25, 0.2), 0.5, 0.6),
        ("optimizer", (0.1, 0.1, 0.06, 0.28, 0.1, 0.4), 0.4, 0.4 / 0.28 - 1),
        # 0.04 more for three more batches: 0.1 - 0.04 / 3 does not depend on their size.
        ("overhead", (0.1, 0.1, 0.14), 0.1 - 0.04 / 3, 0.4 / 0.14 - 1),
        ("metrics", (0.1, 0.09, 0.06), 0.3, None),
    ],
)
def test_cause_is_confirmed_with_its_share_and_the_gain_of_the_tried_remedy(
    cause: Cause, row: tuple[float, ...], share: float, gain: float | None
) -> None:
    tested = judge_experiment(result(cause, [row] * 4), cause, [W0])
    assert tested.outcome == "confirmed"
    assert tested.share == pytest.approx(share * 10 if cause == "overhead" else share)
    assert tested.gain == (None if gain is None else pytest.approx(gain))


def test_straggler_is_confirmed_by_the_time_of_the_other_workers() -> None:
    # The other worker takes 0.06 for both shares, and waits 0.02 for its samples.
    event = result("straggler", [(0.2, 0.2, 0.06)] * 3)
    tested = judge_experiment(event, "straggler", [W0, SLOW])
    assert tested.share == pytest.approx(0.6)
    # Training without it is the remedy, and has been tried.
    assert tested.gain == pytest.approx(1.5)


def test_passes_that_take_as_long_for_four_times_the_samples_are_fixed() -> None:
    event = result("communication", [(0.1, 0.1, 0.05, 0.25, 0.08)] * 3)
    assert judge_experiment(event, "communication", [W0]).fixed_s == pytest.approx(0.04)


def test_waiting_for_samples_is_not_removed_by_a_larger_batch() -> None:
    event = result("communication", [(0.1, 0.08, 0.04, 0.2, 0.16)] * 3, data_s=0.02)
    tested = judge_experiment(event, "communication", [W0])
    assert tested.gain == pytest.approx(0.4 / 0.28 - 1)


def test_cause_that_the_trial_steps_do_not_show_is_refuted() -> None:
    tested = judge_experiment(result("input", [(0.1, 0.095), (0.1, 0.099)] * 2), "input", [W0])
    assert tested.outcome == "refuted"


def test_rounds_that_differ_decide_nothing() -> None:
    tested = judge_experiment(result("input", [(0.1, 0.01), (0.1, 0.12)] * 2), "input", [W0])
    assert tested.outcome == "undecided"


def test_too_few_rounds_are_no_result_and_keep_the_reason() -> None:
    event = result("input", [(0.1, 0.01)] * 2, reason="the workers are about to change")
    tested = judge_experiment(event, "input", [W0])
    assert (tested.outcome, tested.reason) == ("abandoned", "the workers are about to change")


def test_variant_that_could_not_be_tried_is_left_out() -> None:
    event = result("communication", [(0.1, 0.1, 0.05, 0.25, 0.0)] * 3)
    tested = judge_experiment(event, "communication", [W0])
    assert (tested.outcome, tested.fixed_s) == ("confirmed", None)


def test_experiment_without_its_main_variant_is_no_result() -> None:
    tested = judge_experiment(result("overhead", [(0.1, 0.1, 0.0)] * 3), "overhead", [W0])
    assert tested.outcome == "abandoned"
    assert "its trial steps (large) failed" in tested.reason


def test_evaluations_between_the_steps_remain() -> None:
    one = replace(W0, evaluation_s=0.1)
    tested = judge_experiment(result("input", [(0.1, 0.04)] * 3), "input", [one])
    assert tested.share == pytest.approx(0.3)


def test_all_variants_exist_in_the_trainer() -> None:
    assert {name for names in VARIANTS.values() for name in names} == set(COSTS)
