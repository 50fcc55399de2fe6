"""Figure of a study: the curve of each trial, and the best value so far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from etrain_jupyter.insight.figures import figure_class
from etrain_jupyter.notebook.study.view import StudyView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"COMPLETE": "tab:green", "RUNNING": "tab:blue", "PRUNED": "tab:gray", "FAIL": "tab:red"}


def plot_study(view: StudyView) -> Figure:
    """Return a figure with two charts.

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
