"""A study as one row of the side panel, with the jobs of its trials."""

from __future__ import annotations

import math
from typing import Any

from etrain_jupyter.notebook.study.report import describe_params, sort_trials, word_of
from etrain_jupyter.notebook.study.view import StudyView

MAX_TRIALS = 100
"""Maximum number of trials in a row; the best ones are sent."""


def study_row(view: StudyView, *, created: float) -> dict[str, Any]:
    """Return the row: the status, the best value, and the trials as in the table, best first.

    Args:
        view: The study.
        created: When it was created, in seconds since the epoch.
    """
    trials = [
        {
            "job_id": trial.job_id,
            "number": trial.number,
            "state": word_of(view, trial.state),
            "value": _finite(trial.value),
            "params": describe_params(trial),
        }
        for trial in sort_trials(view)
        if trial.job_id
    ]
    return {
        "study_id": view.study_id,
        "name": view.name,
        "status": view.status,
        "reason": view.reason,
        "metric": view.metric,
        "best": None if view.best is None else _finite(view.best.value),
        "num_trials": view.num_trials,
        "num_begun": len(view.trials),
        "created": created,
        "trials": trials[:MAX_TRIALS],
    }


def _finite(value: float) -> float | None:
    # JSON has no NaN and no infinity.
    return value if math.isfinite(value) else None
