"""Which evaluation is the best, and when it pays no more to go on."""

from __future__ import annotations

import math

import pytest

from etrain_jupyter.rules.evaluations import (
    KEEP_BEST,
    EvaluationRecord,
    Trend,
    add_evaluation,
    describe_early_stop,
    is_better,
)


@pytest.mark.parametrize(
    ("value", "than", "mode", "min_delta", "expected"),
    [
        (0.4, 0.5, "min", 0.0, True),
        (0.4, 0.5, "max", 0.0, False),
        (0.5, 0.5, "min", 0.0, False),
        (0.5, 0.5, "max", 0.0, False),
        (0.75, 0.5, "max", 0.25, False),
        (0.76, 0.5, "max", 0.25, True),
        (math.nan, None, "max", 0.0, False),
        (math.inf, 0.5, "max", 0.0, False),
        (-math.inf, 0.5, "min", 0.0, False),
        (9.0, None, "min", 5.0, True),
    ],
)
def test_improvement_must_exceed_min_delta_in_the_right_direction(
    value, than, mode, min_delta, expected
):
    assert is_better(value, than, mode=mode, min_delta=min_delta) is expected


def ranked(values, mode="max"):
    best: tuple[EvaluationRecord, ...] = ()
    for step, value in enumerate(values, start=1):
        best = add_evaluation(best, EvaluationRecord(step, value), mode=mode)
    return [known.step for known in best]


def test_best_evaluations_come_first_and_ties_are_ordered_by_step():
    assert ranked([0.5, 0.9, 0.9, 0.7]) == [2, 3, 4, 1]
    assert ranked([0.5, 0.9, 0.9, 0.7], mode="min") == [1, 4, 2, 3]


def test_non_finite_values_are_never_among_the_best():
    assert ranked([math.nan, 0.1, math.inf, -math.inf]) == [2]


def test_latest_evaluation_of_a_step_counts():
    best = add_evaluation(
        (EvaluationRecord(5, 0.9), EvaluationRecord(3, 0.8)), EvaluationRecord(5, 0.1), mode="max"
    )
    assert best == (EvaluationRecord(3, 0.8), EvaluationRecord(5, 0.1))
    assert add_evaluation(best, EvaluationRecord(3, math.nan), mode="max") == (
        EvaluationRecord(5, 0.1),
    )


def test_number_of_kept_evaluations_is_limited():
    steps = ranked(range(100))
    assert (len(steps), steps[0]) == (KEEP_BEST, 100)


def trend_of(values, *, min_delta=0.0):
    trend = Trend()
    for step, value in enumerate(values, start=1):
        trend = trend.after(EvaluationRecord(step, value), mode="max", min_delta=min_delta)
    return trend


def test_trend_counts_the_evaluations_since_the_last_improvement():
    assert trend_of([0.5, 0.9, 0.9, 0.7]) == Trend(best=0.9, best_step=2, step=4, num_stale=2)
    assert trend_of([0.5, 0.9, 0.8, 0.91]).num_stale == 0


def test_small_improvements_in_a_row_count_once_they_have_added_up():
    assert trend_of([0.5, 0.58, 0.66], min_delta=0.1) == Trend(best=0.66, best_step=3, step=3)
    assert trend_of([0.5, 0.58, 0.59], min_delta=0.1).num_stale == 2


def test_nan_evaluation_is_not_an_improvement():
    assert trend_of([math.nan, math.nan]).num_stale == 2
    assert describe_early_stop(trend_of([math.nan]), metric="f1") == (
        "early stopping: f1 was not finite in 1 evaluation"
    )
