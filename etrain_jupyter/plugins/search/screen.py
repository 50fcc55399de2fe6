"""Display a study below its cell and in the side panel, and update both while it runs."""

from __future__ import annotations

import math
import secrets
import threading
from typing import Any

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.notebook.dashboard import browser
from etrain_jupyter.notebook.dashboard.link import link
from etrain_jupyter.plugins.search.report import (
    StudyView,
    describe_params,
    render_html,
    render_text,
    sort_trials,
    word_of,
)
from etrain_jupyter.plugins.search.study import Study

UPDATE_S = 1.0
"""Interval in seconds between two updates."""
MAX_TRIALS = 100
"""Maximum number of trials in a row; the best ones are sent."""


def show_study(study: Study) -> None:
    """Display a study below the cell, and list it in JupyterLab's side panel.

    In a notebook, a thread updates both until the study ends.
    """
    if not browser.has_front_end():
        print(render_text(study.view()))
        return
    view = study.view()
    display_id = f"etrain-study-{secrets.token_hex(4)}"
    browser.publish(_bundle(study, view), display_id, update=False)
    _list(study, view, display_id)


def list_study(study: Study) -> None:
    """List a study in JupyterLab's side panel, without a display below the cell."""
    if browser.has_front_end():
        _list(study, study.view(), "")


def _list(study: Study, view: StudyView, display_id: str) -> None:
    link().panel.put_study(study.id, study_row(view, created=study.record.created))
    if view.status == "running":
        # A daemon thread, because the kernel need not wait for the end of the study.
        threading.Thread(
            target=_follow, args=(study, view, display_id), name="etrain-study", daemon=True
        ).start()


def _follow(study: Study, shown: StudyView, display_id: str) -> None:
    pause = threading.Event()
    while shown.status == "running":
        pause.wait(UPDATE_S)
        try:
            view = study.view()
            if view != shown:
                link().panel.put_study(study.id, study_row(view, created=study.record.created))
                if display_id:
                    browser.publish(_bundle(study, view), display_id, update=True)
        except (EtrainError, OSError):
            continue  # the journal is being written, or the folder is briefly unreachable
        shown = view


def _bundle(study: Study, view: StudyView) -> dict[str, str]:
    html = render_html(view, study.evaluate_importance())
    return {"text/plain": render_text(view), "text/html": html}


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
