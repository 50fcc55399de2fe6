from __future__ import annotations

import base64
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.config.search_schema import Parameter
from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.notebook.study.charts_html import colour_of, render_importance, render_parallel
from etrain_jupyter.notebook.study.figure import check_kind, plot_importance, plot_parallel
from etrain_jupyter.notebook.study.importance import Importance
from etrain_jupyter.notebook.study.panel_row import MAX_TRIALS, study_row
from etrain_jupyter.notebook.study.parallel import lay_out_trials
from etrain_jupyter.notebook.study.report import render_html
from etrain_jupyter.notebook.study.view import StudyView, TrialRow

SPACE = {
    "width": Parameter(choice=[8, 16, 32]),
    "depth": Parameter(int_range=[1, 5]),
    "lr": Parameter(low=1e-4, high=1.0, log=True),
}


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


def view_of(*trials: TrialRow, mode: str = "max", **more: Any) -> StudyView:
    given = {"metric": "accuracy", "mode": mode, "space": SPACE} | more
    return StudyView(
        name="net",
        study_id="net-0a1b2c3d",
        status="running",
        reason="",
        num_trials=len(trials),
        num_samples=100,
        trials=trials,
        **given,
    )


def image_in(html: str) -> tuple[str, ElementTree.Element]:
    """Return the text alternative and the SVG of the only image."""
    [(alt, data)] = re.findall(r'<img alt="([^"]*)" [^>]*base64,([^"]*)"', html)
    return alt, ElementTree.fromstring(base64.b64decode(data))


# --- parallel coordinates ---


def test_line_of_a_trial_crosses_each_axis_at_its_value() -> None:
    chart = lay_out_trials(
        view_of(trial(0, 0.5, width=8, depth=5, lr=1e-4), trial(1, 0.9, width=32, depth=1, lr=0.01))
    )

    assert chart is not None
    assert [axis.name for axis in chart.axes] == ["width", "depth", "lr (log)", "accuracy"]
    assert [line.points for line in chart.lines] == [(0.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.5, 1.0)]
    assert chart.axes[0].ticks == ((0.0, "8"), (0.5, "16"), (1.0, "32"))
    assert chart.axes[2].ticks == ((0.0, "0.0001"), (1.0, "1"))
    assert chart.axes[3].ticks == ((0.0, "0.5"), (1.0, "0.9"))


def test_best_trial_is_drawn_last_and_pruned_trials_first() -> None:
    trials = (
        trial(0, 0.9),
        trial(1, 0.95, state="PRUNED"),
        trial(2, 0.5),
        trial(3, math.nan, state="FAIL"),
        trial(4, 0.6, state="RUNNING"),
    )

    chart = lay_out_trials(view_of(*trials))

    assert chart is not None
    assert [line.number for line in chart.lines] == [1, 2, 4, 0]
    assert [line.is_best for line in chart.lines] == [False, False, False, True]


@pytest.mark.parametrize(("mode", "qualities"), [("max", [0.0, 1.0]), ("min", [1.0, 0.0])])
def test_quality_follows_the_mode(mode: str, qualities: list[float]) -> None:
    chart = lay_out_trials(view_of(trial(0, 1.0), trial(1, 2.0), mode=mode))

    assert chart is not None
    assert [line.quality for line in sorted(chart.lines, key=lambda a: a.number)] == qualities


def test_diverged_trial_does_not_squeeze_the_others() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1e9]

    chart = lay_out_trials(
        view_of(*(trial(i, value) for i, value in enumerate(values)), mode="min")
    )

    assert chart is not None
    heights = {line.number: line.points[-1] for line in chart.lines}
    assert heights[4] == 1.0
    assert heights[1] - heights[0] > 0.1
    assert chart.axes[-1].ticks[1][1].startswith("≥ ")


@pytest.mark.parametrize(
    "trials",
    [
        (),
        (trial(0, 0.5),),
        (trial(0, 0.5), trial(1, math.nan)),
        (trial(0, 0.5), trial(1, math.inf)),
    ],
)
def test_chart_needs_two_trials_with_a_value(trials: tuple[TrialRow, ...]) -> None:
    view = view_of(*trials)

    assert lay_out_trials(view) is None
    assert render_parallel(view) == ""
    with pytest.raises(EtrainError, match="need two trials"):
        plot_parallel(view)


def test_trial_with_values_outside_of_the_space_has_no_line() -> None:
    strange: list[dict[str, Any]] = [
        {"width": True},
        {"width": 64},
        {"width": [8]},
        {"lr": -1.0},
        {"depth": "two"},
    ]
    trials = [trial(i, 0.5, **params) for i, params in enumerate(strange)]

    chart = lay_out_trials(view_of(*trials, trial(8, 0.6), trial(9, 0.7)))

    assert chart is not None
    assert [line.number for line in chart.lines] == [8, 9]


VALUES = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.lists(
        st.tuples(
            VALUES,
            st.sampled_from([8, 16, 32]),
            st.floats(1e-4, 1.0),
            st.sampled_from(["COMPLETE", "PRUNED", "RUNNING"]),
        ),
        min_size=2,
        max_size=30,
    ),
    st.sampled_from(["min", "max"]),
)
def test_every_line_stays_between_the_ends_of_the_axes(
    drawn: list[tuple[float, int, float, str]], mode: str
) -> None:
    trials = [
        trial(i, value, width=width, lr=lr, state=state)
        for i, (value, width, lr, state) in enumerate(drawn)
    ]
    view = view_of(*trials, mode=mode)

    chart = lay_out_trials(view)

    assert chart is not None
    assert len(chart.lines) == len(trials)
    for line in chart.lines:
        assert all(0 <= place <= 1 for place in (*line.points, line.quality))
        assert len(line.points) == len(chart.axes)
    assert sum(line.is_best for line in chart.lines) == 1
    image_in(render_parallel(view))


def test_image_has_a_text_alternative_and_escaped_names() -> None:
    space = {"kind": Parameter(choice=["<b>", "a&b"])}
    trials = [trial(0, 0.5, kind="<b>"), trial(1, 0.9, kind="a&b", state="PRUNED")]

    html = render_parallel(view_of(*trials, space=space, metric="<i>"))

    alt, svg = image_in(html)
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    lines = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert "<i>" not in html
    assert {"kind", "<b>", "a&b", "<i>"} <= set(texts)
    assert alt.startswith("Parallel coordinates of 2 trials over kind, &lt;i&gt;. Best trial 0: ")
    assert [line.get("stroke-opacity") for line in lines] == ["0.35", "0.9"]
    assert [line.get("stroke") for line in lines] == [colour_of(1.0), colour_of(0.0)]


# --- importance ---


def test_importance_is_a_table_with_its_values_as_text() -> None:
    shares = (("lr", 0.75), ("width", 0.25))

    html = render_importance(Importance(shares=shares, num_trials=12, rung=1024))

    assert "from 12 trials compared at 1,024 samples" in html
    assert html.index("<td>lr</td><td>75%</td>") < html.index("<td>width</td><td>25%</td>")


def test_display_says_why_the_importance_is_unknown() -> None:
    reason = "it needs 10 complete trials, and there are 2"

    html = render_html(view_of(trial(0, 0.5), trial(1, 0.6)), Importance(reason=reason))

    assert f"importance of the parameters: unknown, {reason}" in html
    assert html.count("<table>") == 1


# --- figures ---


def test_figures_draw_every_line_and_every_bar() -> None:
    view = view_of(trial(0, 0.5), trial(1, 0.9), trial(2, 0.7, state="PRUNED"))

    [lines] = plot_parallel(view).axes
    [bars] = plot_importance("net", {"lr": 0.75, "width": 0.25}).axes

    assert [label.get_text() for label in lines.get_xticklabels()] == [
        *("width", "depth", "lr (log)", "accuracy")
    ]
    assert len(lines.lines) == 3 + 4
    assert [bar.get_width() for bar in bars.patches] == [0.75, 0.25]


def test_unknown_figure_gets_the_nearest_kind() -> None:
    with pytest.raises(ConfigError, match="not 'paralel'") as info:
        check_kind("paralel")

    assert "parallel" in str(info.value.hint)


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
