"""Draw the charts of a study as images, in mid tones that are readable on white and on black."""

from __future__ import annotations

import base64
from html import escape

from etrain_jupyter.notebook.study.importance import Importance
from etrain_jupyter.notebook.study.parallel import (
    ParallelAxis,
    ParallelChart,
    TrialLine,
    lay_out_trials,
)
from etrain_jupyter.notebook.study.view import StudyView

WIDTH, HEIGHT = 720, 230
LEFT, RIGHT, TOP, BOTTOM = 70, 70, 36, 20
TEXT, AXIS, BAR = "#808080", "#808080", "#3b82d6"
WORSE, BETTER = (217, 123, 41), (59, 130, 214)
"""Colours of the ends of the metric's range as RGB: orange and blue differ for every reader."""
FADED = 0.35
"""Opacity of a pruned trial."""
BAR_WIDTH, BAR_HEIGHT = 240, 10


def image_of(svg: str, alt: str, *, width: int) -> str:
    """Return an SVG chart as an ``<img>`` with a text alternative."""
    # Sanitizers of untrusted notebooks remove <svg>, but keep an image with a data URL.
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(alt)}" width="{width}" src="data:image/svg+xml;base64,{data}">'


def colour_of(quality: float) -> str:
    """Return the colour of a value, from 0 for the worse end of the range to 1 for the better one.

    >>> colour_of(0.0), colour_of(1.0)
    ('#d97b29', '#3b82d6')
    """
    pairs = zip(WORSE, BETTER, strict=True)
    return "#" + "".join(f"{round(a + (b - a) * quality):02x}" for a, b in pairs)


# --- parallel coordinates -------------------------------------------------------------------------


def render_parallel(view: StudyView) -> str:
    """Return the parallel coordinates of the trials; empty while fewer than two have a value."""
    chart = lay_out_trials(view)
    if chart is None:
        return ""
    worse = "low" if view.mode == "max" else "high"
    better = "high" if view.mode == "max" else "low"
    legend = (
        f"Each line is a trial: orange for {worse} {view.metric}, blue for {better} {view.metric}, "
        "faint if pruned, thick for the best trial."
    )
    image = image_of(_parallel_svg(chart), _describe(view, chart), width=WIDTH)
    return f"<p>{image}<br><small>{escape(legend)}</small></p>"


def _describe(view: StudyView, chart: ParallelChart) -> str:
    names = ", ".join(axis.name for axis in chart.axes)
    text = f"Parallel coordinates of {len(chart.lines)} trials over {names}."
    if view.best is not None:
        values = ", ".join(f"{name} {value}" for name, value in view.best.params.items())
        text += f" Best trial {view.best.number}: {values}, {view.metric} {view.best.value:.6g}."
    return f"{text} The table lists all values."


def _parallel_svg(chart: ParallelChart) -> str:
    step = (WIDTH - LEFT - RIGHT) / (len(chart.axes) - 1)
    columns = [LEFT + step * i for i in range(len(chart.axes))]
    lines = "".join(_line(line, columns) for line in chart.lines)
    # The axes are drawn last, so that their labels are on top of the lines.
    axes = "".join(
        _axis(axis, x, x == columns[0]) for axis, x in zip(chart.axes, columns, strict=True)
    )
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    style = f'font-family="sans-serif" font-size="11" fill="{TEXT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{lines}{axes}</svg>'


def _y(place: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - place)


def _line(line: TrialLine, columns: list[float]) -> str:
    points = " ".join(
        f"{x:.1f},{_y(place):.1f}" for x, place in zip(columns, line.points, strict=True)
    )
    opacity = FADED if line.state == "PRUNED" and not line.is_best else 0.9
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour_of(line.quality)}" '
        f'stroke-opacity="{opacity}" stroke-width="{3.5 if line.is_best else 1.3}"/>'
    )


def _axis(axis: ParallelAxis, x: float, is_first: bool) -> str:
    # No line crosses the labels above and below the axis, and those to the left of the first one.
    parts = [
        f'<path d="M{x:.1f} {_y(1)}V{_y(0)}" stroke="{AXIS}"/>',
        _text(x, 12, axis.name, weight="bold"),
    ]
    for place, label in axis.ticks:
        if place == 1:
            parts.append(_text(x, TOP - 7, label))
        elif place == 0:
            parts.append(_text(x, HEIGHT - 5, label))
        else:
            anchor, shift = ("end", -5) if is_first else ("start", 5)
            parts.append(_text(x + shift, _y(place) + 4, label, anchor=anchor))
    return "".join(parts)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


# --- importance -----------------------------------------------------------------------------------


def render_importance(importance: Importance) -> str:
    """Return the importance of the parameters as a table with bars, or why it is unknown."""
    if importance.reason:
        return f"<p>importance of the parameters: unknown, {escape(importance.reason)}</p>"
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{share:.0%}</td><td>{_bar(share)}</td></tr>"
        for name, share in importance.shares
    )
    title = f"importance of the parameters, from {importance.basis}"
    head = "<tr><th>parameter</th><th>importance</th><th></th></tr>"
    return f"<p>{title}</p><table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _bar(share: float) -> str:
    size = f'viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"'
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
        f'<rect width="{BAR_WIDTH * share:.1f}" height="{BAR_HEIGHT}" fill="{BAR}"/></svg>'
    )
    return image_of(svg, "", width=BAR_WIDTH)  # the share is next to it as text
