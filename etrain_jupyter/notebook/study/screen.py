"""Display a study below its cell, and update the display while the study runs."""

from __future__ import annotations

import secrets
import threading

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.notebook.dashboard import browser
from etrain_jupyter.notebook.study.report import render_html, render_text
from etrain_jupyter.notebook.study.study import Study
from etrain_jupyter.notebook.study.view import StudyView

UPDATE_S = 1.0
"""Interval in seconds between two updates."""


def show_study(study: Study) -> None:
    """Display a study; in a notebook, a thread updates the display until the study ends."""
    view = study.view()
    if not browser.has_front_end():
        print(render_text(view))
        return
    display_id = f"etrain-study-{secrets.token_hex(4)}"
    browser.publish(_bundle(view), display_id, update=False)
    if view.status == "running":
        # A daemon: the study does not need the kernel, so the kernel need not wait for its end.
        threading.Thread(
            target=_follow, args=(study, view, display_id), name="etrain-study", daemon=True
        ).start()


def _follow(study: Study, shown: StudyView, display_id: str) -> None:
    pause = threading.Event()
    while shown.status == "running":
        pause.wait(UPDATE_S)
        try:
            view = study.view()
        except (EtrainError, OSError):
            continue  # the journal is being written, or the folder is briefly unreachable
        if view != shown:
            browser.publish(_bundle(view), display_id, update=True)
        shown = view


def _bundle(view: StudyView) -> dict[str, str]:
    return {"text/plain": render_text(view), "text/html": render_html(view)}
