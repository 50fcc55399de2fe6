"""Importance of the parameters of a study, and its figures, which Optuna draws with plotly."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etrain_jupyter.config.source_map import did_you_mean
from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.plugins.search.folder import import_optuna

if TYPE_CHECKING:
    import optuna
    from plotly.graph_objects import Figure

MIN_TRIALS = 10
"""Minimum number of trials. With fewer, the result mostly depends on the random values."""
KINDS = {
    "curves": "plot_intermediate_values",
    "history": "plot_optimization_history",
    "parallel": "plot_parallel_coordinate",
    "importance": "plot_param_importances",
    "slice": "plot_slice",
    "contour": "plot_contour",
}
"""Kinds of figures, and the functions of ``optuna.visualization``."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Share of each parameter in the differences between the best and all compared trials."""

    shares: tuple[tuple[str, float], ...] = ()
    """Names and shares, which sum to 1, in descending order; empty if there is a reason."""
    num_trials: int = 0
    """Number of compared trials."""
    rung: int = 0
    """Samples at which the trials are compared; 0 for the end of the complete trials."""
    reason: str = ""
    """Why the importance is unknown; empty if it is known."""
    compared: optuna.Study | None = field(default=None, repr=False, compare=False)
    """The compared trials; None if there is a reason."""

    @property
    def basis(self) -> str:
        """The compared trials, as text."""
        if self.rung:
            return f"{self.num_trials} trials compared at {self.rung:,} samples"
        return f"{self.num_trials} complete trials"


def evaluate_importance(
    trials: Sequence[optuna.trial.FrozenTrial], *, mode: str, rungs: Sequence[int]
) -> Importance:
    """Return the importance of the parameters by Optuna's PED-ANOVA.

    It compares the complete trials. If a pruner has left too few of them, it compares the values
    that all trials had at the first rung, which are values after the same number of samples.

    Args:
        trials: The trials of the study.
        mode: ``max`` or ``min``.
        rungs: Samples of each rung; empty without a pruner.
    """
    package = import_optuna()
    names = {name for trial in trials for name in trial.params}
    if len(names) == 1:
        return Importance(reason="the space has only one parameter")
    values = {t.number: t.value for t in trials if t.state.name == "COMPLETE"}
    num_complete, rung = len(values), 0
    if num_complete < MIN_TRIALS and rungs:
        rung = rungs[0]
        values = {trial.number: _value_at(trial, rung) for trial in trials}
    study = copy_trials(trials, values, mode=mode)
    compared = study.get_trials(deepcopy=False, states=(package.trial.TrialState.COMPLETE,))
    count = len(compared)
    if count < MIN_TRIALS:
        kind = "trials at the first rung" if rung else "complete trials"
        return Importance(reason=f"it needs {MIN_TRIALS} {kind}, and there are {count}")
    if len({trial.value for trial in compared}) == 1:
        return Importance(reason=f"all {count} trials have the same value")
    evaluator = package.importance.PedAnovaImportanceEvaluator()
    found = package.importance.get_param_importances(study, evaluator=evaluator)
    shares = sorted(((name, float(share)) for name, share in found.items()), key=lambda p: -p[1])
    return Importance(shares=tuple(shares), num_trials=count, rung=rung, compared=study)


def copy_trials(
    trials: Sequence[optuna.trial.FrozenTrial], values: Mapping[int, float | None], *, mode: str
) -> optuna.Study:
    """Return an in-memory study with the same trials, which are complete with these values.

    Args:
        trials: The trials.
        values: Value by number; a trial without a finite value counts as failed.
        mode: ``max`` or ``min``.
    """
    package = import_optuna()
    direction = "maximize" if mode == "max" else "minimize"
    study: optuna.Study = package.create_study(direction=direction)
    for trial in trials:
        value = values.get(trial.number)
        is_known = value is not None and math.isfinite(value)
        study.add_trial(
            package.trial.create_trial(
                state=package.trial.TrialState["COMPLETE" if is_known else "FAIL"],
                value=value if is_known else None,
                params=trial.params,
                distributions=trial.distributions,
            )
        )
    return study


def _value_at(trial: optuna.trial.FrozenTrial, rung: int) -> float | None:
    """Return the value of the first evaluation at or after a rung."""
    samples = min((s for s in trial.intermediate_values if s >= rung), default=None)
    return None if samples is None else trial.intermediate_values[samples]


def describe_missing(importance: Importance, study_id: str) -> str:
    """Return the message for a study whose importance is unknown."""
    return (
        f"the importance of the parameters of study {study_id} is unknown: {importance.reason}. "
        "If the study has ended, study.resume(trials=10) continues it with more trials."
    )


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
        # Optuna draws only complete trials. Draw a pruned trial as well, with its newest value.
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
