"""Importance of the parameters of a study, and its figures."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import optuna
import pytest

from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.plugins.search.figures import (
    KINDS,
    MIN_TRIALS,
    Importance,
    check_kind,
    describe_missing,
    draw,
    evaluate_importance,
)


def make_trials(count: int, *, pruned: Sequence[int] = (), **more: Any) -> list[Any]:
    """Return trials whose value depends on ``lr`` alone; pruned ones end after 100 samples."""
    space = {
        "lr": optuna.distributions.FloatDistribution(0.0, 1.0),
        "width": optuna.distributions.CategoricalDistribution([8, 16]),
    }
    trials = []
    for number in range(count):
        params = {"lr": (number * 0.618) % 1, "width": (8, 16)[number % 2]}
        value = 1 - (params["lr"] - 0.3) ** 2
        is_pruned = number in pruned
        trials.append(
            optuna.trial.create_trial(
                params=params,
                distributions=space,
                state=optuna.trial.TrialState["PRUNED" if is_pruned else "COMPLETE"],
                value=None if is_pruned else value,
                intermediate_values={104: value} | ({} if is_pruned else {400: value}),
                **more,
            )
        )
        trials[-1].number = number
    return trials


def test_parameter_that_decides_the_value_is_the_most_important_one() -> None:
    found = evaluate_importance(make_trials(40), mode="max", rungs=(100,))

    assert [name for name, _ in found.shares] == ["lr", "width"]
    assert math.isclose(sum(share for _, share in found.shares), 1.0)
    assert found.shares[0][1] > 0.8
    assert (found.num_trials, found.rung, found.reason) == (40, 0, "")
    assert found.basis == "40 complete trials"


def test_with_few_complete_trials_all_are_compared_at_the_first_rung() -> None:
    trials = make_trials(40, pruned=range(5, 40))

    found = evaluate_importance(trials, mode="max", rungs=(100, 300))

    assert (found.num_trials, found.rung) == (40, 100)
    assert found.shares[0][0] == "lr"
    assert found.basis == "40 trials compared at 100 samples"


def test_mode_decides_which_trials_are_good() -> None:
    trials = make_trials(40)
    for trial in trials:
        if trial.params["width"] == 16 and trial.params["lr"] > 0.6:
            trial.value -= 10 + trial.params["lr"]

    highest = evaluate_importance(trials, mode="max", rungs=())
    lowest = evaluate_importance(trials, mode="min", rungs=())

    assert dict(highest.shares)["width"] < 0.05
    assert dict(lowest.shares)["width"] > 0.05


@pytest.mark.parametrize(
    ("trials", "rungs", "reason"),
    [
        ([], (), "it needs 10 complete trials, and there are 0"),
        (make_trials(MIN_TRIALS - 1), (), "it needs 10 complete trials, and there are 9"),
        (
            make_trials(20, pruned=range(20)),
            (),
            "it needs 10 complete trials, and there are 0",
        ),
        (
            make_trials(9, pruned=range(9)),
            (100,),
            "it needs 10 trials at the first rung, and there are 9",
        ),
        (
            make_trials(20, pruned=range(20)),
            (200,),
            "it needs 10 trials at the first rung, and there are 0",
        ),
    ],
)
def test_too_few_trials_give_a_reason(
    trials: list[Any], rungs: tuple[int, ...], reason: str
) -> None:
    found = evaluate_importance(trials, mode="max", rungs=rungs)

    assert (found.shares, found.reason) == ((), reason)


def test_equal_values_and_a_single_parameter_give_a_reason() -> None:
    equal = make_trials(20)
    for trial in equal:
        trial.value = 0.5
    single = make_trials(20)
    for trial in single:
        trial.params = {"lr": trial.params["lr"]}

    found = [evaluate_importance(trials, mode="max", rungs=()) for trials in (equal, single)]

    assert [one.reason for one in found] == [
        "all 20 trials have the same value",
        "the space has only one parameter",
    ]


def test_message_has_the_reason_and_a_remedy() -> None:
    message = describe_missing(Importance(reason="it needs 10"), "net-0a1b2c3d")

    assert "it needs 10" in message
    assert "study.resume(trials=10)" in message


# --- figures ---


def drawn(kind: str, trials: list[Any]) -> Any:
    study = optuna.create_study(direction="maximize")
    study.add_trials(trials)
    importance = evaluate_importance(trials, mode="max", rungs=())
    return draw(kind, study, importance, metric="accuracy", mode="max")


@pytest.mark.parametrize("kind", KINDS)
def test_figure_of_each_kind_has_data(kind: str) -> None:
    figure = drawn(kind, make_trials(20, pruned=(3, 7)))

    assert figure.data
    assert "accuracy" in figure.to_json()


def test_pruned_trials_are_drawn_with_their_newest_value() -> None:
    some, all_complete = (
        drawn("parallel", make_trials(20, pruned=pruned)) for pruned in ((3, 7), ())
    )

    assert len(some.data) == len(all_complete.data)


def test_study_without_values_has_no_figure() -> None:
    trials = make_trials(2, pruned=(0, 1))
    for trial in trials:
        trial.intermediate_values = {}
    study = optuna.create_study()
    study.add_trials(trials)

    with pytest.raises(EtrainError, match="has a value yet"):
        draw("history", study, Importance(reason="none"), metric="loss", mode="min")


def test_unknown_figure_gets_the_nearest_kind() -> None:
    with pytest.raises(ConfigError, match="not 'paralel'") as info:
        check_kind("paralel")

    assert "parallel" in str(info.value.hint)


def test_missing_plotly_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="plotly, which is not installed") as info:
        check_kind("slice")

    assert "etrain-jupyter[search]" in str(info.value.hint)
