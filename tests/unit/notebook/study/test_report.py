from __future__ import annotations

import math
from typing import Any

from etrain_jupyter.notebook.study.importance import Importance
from etrain_jupyter.notebook.study.report import render_html
from etrain_jupyter.notebook.study.screen import MAX_TRIALS, study_row
from etrain_jupyter.notebook.study.view import StudyView, TrialRow


def trial(number: int, value: float, *, state: str = "COMPLETE", **params: Any) -> TrialRow:
    return TrialRow(
        number=number,
        state=state,
        params={"width": 16, "depth": 2, "lr": 1e-2} | params,
        value=value,
        samples=100,
        reason="",
        job_id=f"net-0a1b2c3d-{number:03d}",
        curve=((100, value),),
    )


def view_of(*trials: TrialRow) -> StudyView:
    return StudyView(
        name="net",
        study_id="net-0a1b2c3d",
        status="running",
        reason="",
        num_trials=len(trials),
        num_samples=100,
        trials=trials,
        metric="accuracy",
        mode="max",
    )


# --- importance ---


def test_importance_is_text_and_names_are_escaped() -> None:
    importance = Importance(shares=(("lr", 0.75), ("<b>", 0.25)), num_trials=12, rung=1024)

    html = render_html(view_of(trial(0, 0.5), trial(1, 0.6)), importance)

    assert "parameters: lr 75%, &lt;b&gt; 25% (from 12 trials compared at 1,024 samples)" in html


def test_display_says_why_the_importance_is_unknown() -> None:
    reason = "it needs 10 complete trials, and there are 2"

    html = render_html(view_of(trial(0, 0.5), trial(1, 0.6)), Importance(reason=reason))

    assert f"importance of the parameters: unknown, {reason}" in html
    assert html.count("<table>") == 1


# --- the side panel ---


def test_row_of_the_panel_has_the_best_trials_first() -> None:
    trials = (trial(0, 0.5), trial(1, math.nan, state="RUNNING"), trial(2, 0.9, state="PRUNED"))

    row = study_row(view_of(*trials), created=5.0)

    assert (row["study_id"], row["best"], row["num_begun"], row["created"]) == (
        *("net-0a1b2c3d", 0.5),
        *(3, 5.0),
    )
    assert row["trials"][0]["params"] == "width=16, depth=2, lr=0.01"
    assert [(t["number"], t["state"], t["value"]) for t in row["trials"]] == [
        (0, "complete", 0.5),
        (1, "running", None),
        (2, "pruned", 0.9),
    ]


def test_row_of_the_panel_is_limited() -> None:
    row = study_row(view_of(*(trial(i, i / 1000) for i in range(300))), created=0.0)

    assert len(row["trials"]) == MAX_TRIALS
    assert (row["num_begun"], row["trials"][0]["number"]) == (300, 299)
