from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.notebook.study.figure import KINDS, check_kind, draw
from etrain_jupyter.notebook.study.importance import Importance, evaluate_importance
from tests.unit.notebook.study.test_importance import make_trials

optuna = pytest.importorskip("optuna")
pytest.importorskip("plotly")


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
