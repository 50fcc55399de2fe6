"""Figures of a study, which ``optuna.visualization`` draws with plotly."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from etrain_jupyter.config.source_map import did_you_mean
from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.notebook.study.importance import Importance, copy_trials
from etrain_jupyter.storage.study_folder import import_optuna

if TYPE_CHECKING:
    import optuna
    from plotly.graph_objects import Figure

KINDS = {
    "curves": "plot_intermediate_values",
    "history": "plot_optimization_history",
    "parallel": "plot_parallel_coordinate",
    "importance": "plot_param_importances",
    "slice": "plot_slice",
    "contour": "plot_contour",
}
"""Kinds of figures, and the functions of ``optuna.visualization``."""


def check_kind(kind: str) -> None:
    """Check that a figure can be drawn.

    Raises:
        ConfigError: If its kind is unknown, or if plotly is not installed.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"a study has the figures {', '.join(KINDS)}, not {kind!r}",
            hint=did_you_mean(kind, KINDS) or "write study.plot('parallel')",
        )
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError(
            "study.plot() needs the package plotly, which is not installed",
            hint="pip install 'etrain-jupyter[search]'; study.trials has every value",
        )


def draw(
    kind: str, study: optuna.Study, importance: Importance, *, metric: str, mode: str
) -> Figure:
    """Return a figure of a study.

    Args:
        kind: One of ``KINDS``.
        study: The study in Optuna.
        importance: The importance of its parameters.
        metric: Name of the metric.
        mode: ``max`` or ``min``.
    """
    package = import_optuna()
    function = getattr(package.visualization, KINDS[kind])
    figure: Figure
    if kind == "curves":
        figure = function(study)
        return figure.update_layout(xaxis_title="samples", yaxis_title=metric)
    more: dict[str, Any] = {"target_name": metric}
    if kind == "importance":
        shown = importance.compared
        more["evaluator"] = package.importance.PedAnovaImportanceEvaluator()
    else:
        # Optuna draws complete trials only. A pruned trial shows as much, by its newest value.
        trials = study.get_trials(deepcopy=False)
        values = {t.number: v for t in trials if (v := _newest_value(t)) is not None}
        shown = copy_trials(trials, values, mode=mode)
    if shown is None or not shown.best_trials:
        raise EtrainError(
            f"no trial of study {study.study_name} has a value yet. Nothing was drawn. "
            "study.wait() waits for its end."
        )
    figure = function(shown, **more)
    return figure


def _newest_value(trial: optuna.trial.FrozenTrial) -> float | None:
    values = trial.intermediate_values
    return values[max(values)] if values else None
