"""Importance of the parameters of a study, as Optuna evaluates it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etrain_jupyter.storage.study_folder import import_optuna

if TYPE_CHECKING:
    import optuna

MIN_TRIALS = 10
"""Minimum number of trials. With fewer, the result mostly depends on the random values."""


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
    compared = [
        package.trial.create_trial(params=t.params, distributions=t.distributions, value=value)
        for t in trials
        if (value := values.get(t.number)) is not None and math.isfinite(value)
    ]
    count = len(compared)
    if count < MIN_TRIALS:
        kind = "trials at the first rung" if rung else "complete trials"
        return Importance(reason=f"it needs {MIN_TRIALS} {kind}, and there are {count}")
    if len({trial.value for trial in compared}) == 1:
        return Importance(reason=f"all {count} trials have the same value")
    study = package.create_study(direction="maximize" if mode == "max" else "minimize")
    study.add_trials(compared)
    evaluator = package.importance.PedAnovaImportanceEvaluator()
    found = package.importance.get_param_importances(study, evaluator=evaluator)
    shares = sorted(((name, float(share)) for name, share in found.items()), key=lambda p: -p[1])
    return Importance(shares=tuple(shares), num_trials=count, rung=rung)


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
