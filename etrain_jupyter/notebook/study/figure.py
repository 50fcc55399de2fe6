"""Figures of a study: the curves of its trials, parallel coordinates, and importance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from etrain_jupyter.config.source_map import did_you_mean
from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.insight.figures import figure_class
from etrain_jupyter.notebook.study.charts_html import BAR, FADED, colour_of
from etrain_jupyter.notebook.study.parallel import lay_out_trials
from etrain_jupyter.notebook.study.view import StudyView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"COMPLETE": "tab:green", "RUNNING": "tab:blue", "PRUNED": "tab:gray", "FAIL": "tab:red"}
KINDS = ("curves", "parallel", "importance")
"""Kinds of figures."""


def check_kind(kind: str) -> None:
    """Check a kind of figure.

    Raises:
        ConfigError: If it is unknown.
    """
    if kind not in KINDS:
        usual = "write study.plot('parallel')"
        raise ConfigError(
            f"a study has the figures {', '.join(KINDS)}, not {kind!r}",
            hint=did_you_mean(kind, KINDS) or usual,
        )


def plot_curves(view: StudyView) -> Figure:
    """Return a figure with two charts: the curve of each trial, and the best value so far.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    figure = figure_class()(figsize=(10, 4), layout="constrained")
    curves, best = figure.subplots(1, 2, sharey=True)
    for trial in view.trials:
        points = [(x, y) for x, y in trial.curve if math.isfinite(y)]
        if points:
            marker = "o" if len(points) == 1 else ""
            colour = COLOURS.get(trial.state, "tab:gray")
            curves.plot(*zip(*points, strict=True), color=colour, marker=marker, linewidth=1)
    for rung in view.rungs:
        curves.axvline(rung, color="black", linestyle=":", linewidth=0.8)
    curves.set_xlabel("samples")
    curves.set_ylabel(view.metric)
    curves.set_title(view.study_id)
    ended = [(t.number, t.value) for t in view.trials if not math.isnan(t.value)]
    if ended:
        better = max if view.mode == "max" else min
        numbers = [number for number, _ in ended]
        so_far = [better(value for _, value in ended[: i + 1]) for i in range(len(ended))]
        best.plot(numbers, [value for _, value in ended], "o", color="tab:gray")
        best.step(numbers, so_far, where="post", color="tab:green", label="best so far")
        best.legend(loc="best")
    best.set_xlabel("trial")
    return figure


def plot_parallel(view: StudyView) -> Figure:
    """Return a figure of parallel coordinates: one line per trial over parameters and metric.

    Raises:
        ConfigError: If matplotlib is not installed.
        EtrainError: If fewer than two trials have a value.
    """
    chart = lay_out_trials(view)
    if chart is None:
        raise EtrainError(
            f"parallel coordinates need two trials with a value, and study {view.study_id} has "
            "fewer. Nothing was drawn. study.wait() waits for its end."
        )
    figure = figure_class()(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    columns = range(len(chart.axes))
    for line in chart.lines:
        axes.plot(
            columns,
            line.points,
            color=colour_of(line.quality),
            alpha=FADED if line.state == "PRUNED" and not line.is_best else 0.9,
            linewidth=3.5 if line.is_best else 1.3,
        )
    for column, axis in zip(columns, chart.axes, strict=True):
        axes.axvline(column, color="black", linewidth=0.8)
        for place, label in axis.ticks:
            axes.annotate(
                label, (column, place), (4, 0), textcoords="offset points", fontsize="small",
                va="center", bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
            )  # fmt: skip
    axes.set_xticks(columns, [axis.name for axis in chart.axes])
    axes.set_yticks([])
    axes.set_frame_on(False)
    axes.set_title(view.study_id)
    return figure


def plot_importance(study_id: str, importance: Mapping[str, float]) -> Figure:
    """Return a figure of the importance of the parameters, the most important one on top.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    figure = figure_class()(figsize=(7, 1 + 0.4 * len(importance)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(importance), list(importance.values()), color=BAR)
    axes.bar_label(bars, [f"{share:.0%}" for share in importance.values()], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("importance")
    axes.set_title(study_id)
    return figure
