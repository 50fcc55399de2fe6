"""Draw line charts as SVG, for pages that must not need scripts, fonts or other files."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.display.numbers import number
from etrain_jupyter.display.tables import Html, html_of

Floats: TypeAlias = NDArray[np.floating[Any]]

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 26, 36
TEXT, GRID = "#808080", "#80808040"  # readable on a white and on a black background
# Okabe and Ito's palette, which readers with color vision deficiency can distinguish.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6bb1", "#7f7f7f")
MAX_DOTS = 40
"""Maximum number of points for which a curve has dots."""
MAX_LABEL = 200
"""Maximum number of characters of a label."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values over the horizontal axis of a chart."""

    index: int
    """Number of its color; for a comparison, the position of the job."""
    label: str
    x: Floats
    """Positions on the axis, shape ``(n,)``."""
    y: Floats
    """Values, finite, shape ``(n,)``."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line at a position on the horizontal axis."""

    x: float
    color: str
    label: str


def color_of(index: int) -> str:
    """Return the color of a curve."""
    return COLORS[index % len(COLORS)]


def dot(index: int) -> Html:
    """Return a dot in the color of a curve. It serves as a legend and needs no styles."""
    return Html(f'<span style="color:{color_of(index)}">●</span>')


def image(data: str | bytes, alt: str = "chart", *, width: int | None = None) -> Html:
    """Return an SVG chart or a PNG as an image with a data URL.

    Sanitizers of untrusted notebooks remove ``<svg>``, but keep an image.
    """
    kind, content = ("png", data) if isinstance(data, bytes) else ("svg+xml", data.encode())
    size = "" if width is None else f' width="{width}"'
    encoded = base64.b64encode(content).decode()
    return Html(f'<img alt="{html_of(alt)}"{size} src="data:image/{kind};base64,{encoded}">')


def _dashes(index: int) -> str:
    # If there are more jobs than colors, the second round is dashed.
    return ' stroke-dasharray="5 3"' if index >= len(COLORS) else ""


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    is_stepped: bool = False,
    starts_at_zero: bool = False,
    ideal: Sequence[Curve] = (),
    marks: Sequence[Mark] = (),
    width: int = WIDTH,
    height: int = HEIGHT,
) -> str:
    """Return an SVG image with one line per curve; the horizontal axis starts at zero.

    Args:
        title: Quantity on the vertical axis.
        curves: The curves, each with at least one point.
        x_label: Quantity on the horizontal axis.
        is_stepped: True to hold a value until the next point.
        starts_at_zero: True if the vertical axis includes zero.
        ideal: Curves to draw thin and gray, for reference.
        marks: Vertical lines; one beyond the curves is drawn at their end.
        width: Width of the image.
        height: Height of the image.
    """
    every = [*curves, *ideal]
    last = max(float(c.x.max()) for c in every) or 1.0
    lows = [0.0] if starts_at_zero else []
    ys = _ticks([*lows, *(float(v) for c in every for v in (c.y.min(), c.y.max()))])
    frame = _Frame(last, ys, width, height)
    parts = [
        frame.grid(),
        _text(LEFT, 15, title, weight=600),
        _text((LEFT + width - RIGHT) / 2, height - 5, x_label, anchor="middle"),
        *(frame.line(curve, TEXT, is_stepped=False, is_thin=True) for curve in ideal),
        *(frame.line(c, color_of(c.index), is_stepped=is_stepped) for c in curves),
        *map(frame.mark, marks),
    ]
    style = f'font-family="sans-serif" font-size="11" fill="{TEXT}" role="img"'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    label = html_of(f"{title} over {x_label}", MAX_LABEL)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


class _Frame:
    """Maps values to pixels: from 0 to ``last``, and from the first to the last of ``ys``."""

    def __init__(self, last: float, ys: Sequence[float], width: int, height: int) -> None:
        self._last, self._ys = last, ys
        self._right, self._bottom = width - RIGHT, height - BOTTOM
        self._xs = [tick for tick in _ticks([0.0, last]) if tick <= last * (1 + 1e-9)]

    def _x(self, value: float) -> float:
        return LEFT + (self._right - LEFT) * value / self._last

    def _y(self, value: float) -> float:
        share = (value - self._ys[0]) / (self._ys[-1] - self._ys[0])
        return self._bottom - (self._bottom - TOP) * share

    def grid(self) -> str:
        lines = "".join(f"M{LEFT} {self._y(y):.1f}H{self._right}" for y in self._ys)
        return (
            f'<path d="{lines}" stroke="{GRID}" fill="none"/>'
            + "".join(_text(LEFT - 6, self._y(y) + 4, number(y), anchor="end") for y in self._ys)
            + "".join(
                _text(self._x(x), self._bottom + 15, number(x), anchor="middle") for x in self._xs
            )
        )

    def line(self, curve: Curve, color: str, *, is_stepped: bool, is_thin: bool = False) -> str:
        points = [
            (self._x(x), self._y(y))
            for x, y in zip(curve.x.tolist(), curve.y.tolist(), strict=True)
        ]
        path = f"M{points[0][0]:.1f} {points[0][1]:.1f}" + "".join(
            f"H{x:.1f}V{y:.1f}" if is_stepped else f"L{x:.1f} {y:.1f}" for x, y in points[1:]
        )
        width = 1 if is_thin else 1.8
        # A line of one point is invisible, so mark the points of a short curve.
        dots = (
            "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points)
            if len(points) <= MAX_DOTS and not is_stepped and not is_thin
            else ""
        )
        return (
            f'<g fill="{color}"><title>{html_of(curve.label, MAX_LABEL)}</title><path d="{path}" '
            f'fill="none" stroke="{color}" stroke-width="{width}"{_dashes(curve.index)}/>{dots}</g>'
        )

    def mark(self, mark: Mark) -> str:
        x = f"{self._x(min(mark.x, self._last)):.1f}"
        return (
            f'<path d="M{x} {TOP}V{self._bottom}" stroke="{mark.color}" stroke-dasharray="3 3">'
            f"<title>{html_of(mark.label, MAX_LABEL)}</title></path>"
        )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: int = 400) -> str:
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {attributes}>{html_of(text, MAX_LABEL)}</text>"


def _ticks(values: Iterable[float], most: int = 6) -> list[float]:
    """Return at most about ``most`` round values whose range includes all of ``values``.

    >>> _ticks([0.0, 93.0]), _ticks([2.0, 2.0])
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [1.0, 1.5, 2.0, 2.5, 3.0])
    """
    values = list(values)
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # A constant has no range, so draw it in the middle.
        margin = abs(low) / 2 or 0.5
        low, high = low - margin, high + margin
    rough = (high - low) / (most - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    size = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    # Round to remove errors such as 0.30000000000000004.
    digits = max(0, 1 - math.floor(math.log10(size)))
    return [round(i * size, digits) + 0.0 for i in range(first, last + 1)]
