"""Lay out parallel coordinates: one line per trial, over the parameters and the metric.

The positions are numbers from 0 to 1, so that the HTML output and Matplotlib draw the same chart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.config.search_schema import Parameter, Value
from etrain_jupyter.notebook.study.view import StudyView
from etrain_jupyter.untrusted import plain_line

MAX_TICKS = 8
"""Maximum number of labels on the axis of a choice."""
MAX_LABEL = 16
"""Maximum number of characters of a label."""
MAX_LINES = 500
"""Maximum number of lines; the best trials are drawn."""
FENCE = 3.0
"""Values farther from the quartiles than this many interquartile ranges are at the axis's end."""


@dataclass(frozen=True, kw_only=True)
class ParallelAxis:
    """One vertical axis."""

    name: str
    ticks: tuple[tuple[float, str], ...]
    """Positions, from 0 at the bottom to 1 at the top, and their labels, in ascending order."""


@dataclass(frozen=True, kw_only=True)
class TrialLine:
    """The line of one trial."""

    number: int
    state: str
    points: tuple[float, ...]
    """Position on each axis, from 0 at the bottom to 1 at the top."""
    quality: float
    """Place of its value in the range of the metric's axis, from 0 for the worse end to 1."""
    is_best: bool


@dataclass(frozen=True, kw_only=True)
class ParallelChart:
    """Parallel coordinates of a study."""

    axes: tuple[ParallelAxis, ...]
    """The parameters in the order of the cell, then the metric."""
    lines: tuple[TrialLine, ...]
    """In drawing order: pruned trials first, and the best trial last, on top of the others."""


def lay_out_trials(view: StudyView) -> ParallelChart | None:
    """Return the chart of all trials with a value, or None if fewer than two have one."""
    trials = [trial for trial in view.trials if math.isfinite(trial.value)]
    if len(trials) < 2 or not view.space:
        return None
    scales = {name: _scale_of(parameter) for name, parameter in view.space.items()}
    low, high, metric = _metric_axis(view, [trial.value for trial in trials])
    is_max = view.mode == "max"
    lines = []
    for trial in trials:
        places = [_place(trial.params, name, scale) for name, scale in scales.items()]
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            continue  # a journal that another version or another user has written
        height = _clip((trial.value - low) / (high - low))
        lines.append(
            TrialLine(
                number=trial.number,
                state=trial.state,
                points=(*known, height),
                quality=height if is_max else 1 - height,
                is_best=view.best is not None and trial.number == view.best.number,
            )
        )
    if len(lines) < 2:
        return None
    lines.sort(key=lambda line: (line.is_best, line.state != "PRUNED", line.quality))
    axes = [_axis_of(name, parameter) for name, parameter in view.space.items()]
    return ParallelChart(axes=(*axes, metric), lines=tuple(lines[-MAX_LINES:]))


def _place(
    params: Mapping[str, Any], name: str, scale: Callable[[Any], float | None]
) -> float | None:
    return scale(params[name]) if name in params else None


def _scale_of(parameter: Parameter) -> Callable[[Any], float | None]:
    """Return the function from a parameter's value to its position; None for a foreign value."""
    if parameter.choice is not None:
        return _choice_scale(parameter.choice)
    return _range_scale(parameter)


def _choice_scale(choice: list[Value]) -> Callable[[Any], float | None]:
    # The type is part of the key: True == 1, but a choice may contain both.
    keys = [(type(value), value) for value in choice]
    places = _spread(len(choice))
    return lambda value: places[keys.index(key)] if (key := (type(value), value)) in keys else None


def _range_scale(parameter: Parameter) -> Callable[[Any], float | None]:
    low, high = parameter.bounds
    transform = math.log if parameter.log else float

    def scale(value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not math.isfinite(value) or (parameter.log and value <= 0):
            return None
        first, last = transform(low), transform(high)
        return _clip((transform(value) - first) / (last - first))

    return scale


def _axis_of(name: str, parameter: Parameter) -> ParallelAxis:
    if parameter.choice is None:
        low, high = parameter.bounds
        title = f"{name} (log)" if parameter.log else name
        return ParallelAxis(name=title, ticks=((0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")))
    ticks = list(zip(_spread(len(parameter.choice)), map(_label, parameter.choice), strict=True))
    stride = math.ceil(len(ticks) / MAX_TICKS)
    return ParallelAxis(name=name, ticks=tuple(ticks[::stride]))


def _metric_axis(view: StudyView, values: list[float]) -> tuple[float, float, ParallelAxis]:
    """Return the lowest and the highest value of the metric's axis, and the axis.

    A trial that diverged would squeeze all others into one point, so the worse end of the axis is
    limited, and the values beyond it are drawn there.
    """
    low, high = min(values), max(values)
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    margin = FENCE * (upper - lower)
    signs = ["", ""]
    if margin > 0 and view.mode == "min" and high > upper + margin:
        high, signs[1] = upper + margin, "≥ "
    if margin > 0 and view.mode == "max" and low < lower - margin:
        low, signs[0] = lower - margin, "≤ "
    if low == high:
        # A constant metric has no range: draw it in the middle.
        half = abs(low) / 2 or 0.5
        low, high = low - half, high + half
    ticks = ((0.0, f"{signs[0]}{low:.4g}"), (1.0, f"{signs[1]}{high:.4g}"))
    return low, high, ParallelAxis(name=view.metric, ticks=ticks)


def _spread(count: int) -> list[float]:
    return [0.5] if count == 1 else [i / (count - 1) for i in range(count)]


def _label(value: Value) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return plain_line(text, max_length=MAX_LABEL)


def _clip(place: float) -> float:
    return min(1.0, max(0.0, place))
