"""Render a comparison as HTML: a self-contained page, and the output of a cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from etrain_jupyter import __version__
from etrain_jupyter.display.charts import Curve, dot, image, line_chart
from etrain_jupyter.display.numbers import counted
from etrain_jupyter.display.tables import Html, html_list, html_of, html_table
from etrain_jupyter.insight.curves import (
    STEPPED,
    available_axes,
    curves_of,
    default_columns,
    name_of,
    scale_of,
    scaling_points,
)
from etrain_jupyter.insight.runs import Axis, Run
from etrain_jupyter.insight.table import columns_of, short_value
from etrain_jupyter.untrusted import plain_line

Rows = Sequence[Mapping[str, Any]]

MAX_CELL_CHARTS = 4
"""Maximum number of charts below a cell."""
MAX_PAGE_CHARTS = 12
AXIS_NAMES: dict[Axis, str] = {
    "steps": "steps", "samples": "samples", "time": "time", "usd": "cost",
}  # fmt: skip

# The page must also open from an e-mail, so it contains no script and loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root{color-scheme:light dark;--line:#80808040}
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1480px;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th[scope=row],th:first-child{text-align:left}
th[title]{text-decoration:underline dotted}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.5em}
.notes{border-left:3px solid #d99a1c;margin:1rem 0;padding:.2rem 1rem .2rem 1.6rem}
.axis{position:absolute;opacity:0}
.axis+label{display:inline-block;padding:.25rem .8rem;border:1px solid var(--line);cursor:pointer}
.axis:checked+label{background:#0072b2;color:#fff}
.axis:focus-visible+label{outline:2px solid #e69f00}
.charts{display:none;flex-wrap:wrap;gap:1rem;margin-top:1rem}
.charts svg{max-width:100%;height:auto}
.scaling{display:flex}
footer{margin-top:2rem;color:#808080;font-size:12px}
"""


def render_page(
    labels: Sequence[str],
    runs: Sequence[Run],
    rows: Rows,
    notes: Sequence[str],
    differences: Mapping[str, Sequence[str]],
) -> str:
    """Return one HTML page without scripts that loads nothing."""
    axes = available_axes(runs)
    shown = "".join(f"#over-{axis}:checked~.{axis}{{display:flex}}" for axis in axes)
    switches = "".join(
        f'<input class="axis" type="radio" name="axis" id="over-{axis}"'
        f"{' checked' if axis == axes[0] else ''}>"
        f'<label for="over-{axis}">{AXIS_NAMES[axis]}</label>'
        for axis in axes
    )
    charts = "".join(
        f'<div class="charts {axis}">{"".join(_charts(labels, runs, axis, MAX_PAGE_CHARTS))}</div>'
        for axis in axes
    )
    title = f"Comparison of {counted(len(runs), 'job')}"
    made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width"><meta name="referrer" '
        f'content="no-referrer"><title>{title}</title><style>{_STYLE}{shown}</style></head><body>'
        f"<h1>{title}</h1>{_table(rows)}{_notes(notes)}<h2>Curves</h2><div>{switches}{charts}</div>"
        f"{_scaling(labels, runs, rows)}{_differences(labels, differences)}"
        f"<footer>etrain-jupyter {__version__}, {made_at}</footer></body></html>\n"
    )


def render_cell(
    labels: Sequence[str],
    runs: Sequence[Run],
    rows: Rows,
    notes: Sequence[str],
    differences: Mapping[str, Sequence[str]],
) -> str:
    """Return the output of a cell, as HTML that a sanitizer does not change."""
    # A sanitizer removes inline SVG, styles and inputs, but keeps images.
    charts = _charts(labels, runs, "steps", MAX_CELL_CHARTS)
    images = "".join(map(image, (*charts, *_scaling_charts(labels, runs, rows))))
    parts = (_table(rows), _notes(notes), images, _differences(labels, differences, heading="h4"))
    return f"<div>{''.join(parts)}</div>"


def _table(rows: Rows) -> str:
    columns = columns_of(rows)
    lines = []
    for index, row in enumerate(rows):
        job, *cells = (column.cell(row) for column in columns)
        lines.append([Html(f"{dot(index)} {html_of(job)}"), *cells])
    table = html_table(
        [plain_line(column.heading) for column in columns],
        lines,
        tooltips=[column.about for column in columns],
        has_row_heads=True,
    )
    return f'<div class="scroll">{table}</div>'


def _notes(notes: Sequence[str]) -> str:
    return html_list(notes, css_class="notes")


def _differences(
    labels: Sequence[str], differences: Mapping[str, Sequence[str]], *, heading: str = "h2"
) -> str:
    if not differences:
        return ""
    lines = [[plain_line(key), *map(short_value, values)] for key, values in differences.items()]
    table = html_table(["key", *labels], lines, has_row_heads=True)
    return f'<{heading}>Differences between the cells</{heading}><div class="scroll">{table}</div>'


def _charts(labels: Sequence[str], runs: Sequence[Run], over: Axis, most: int) -> Iterator[str]:
    for column in default_columns(runs)[:most]:
        curves = list(curves_of(labels, runs, column, over))
        if curves:
            is_stepped = column in STEPPED
            yield line_chart(
                name_of(column),
                curves,
                x_label=scale_of(over, runs).label,
                is_stepped=is_stepped,
                starts_at_zero=is_stepped,
            )


def _scaling(labels: Sequence[str], runs: Sequence[Run], rows: Rows) -> str:
    charts = "".join(_scaling_charts(labels, runs, rows))
    return f'<h2>Scaling</h2><div class="charts scaling">{charts}</div>' if charts else ""


def _scaling_charts(labels: Sequence[str], runs: Sequence[Run], rows: Rows) -> Iterator[str]:
    points = scaling_points(runs, rows)
    if not points:
        return
    measured = [
        Curve(index=i, label=labels[i], x=np.array([workers]), y=np.array([rate]))
        for i, workers, rate in points.measured
    ]
    ideal = [
        Curve(index=0, label="linear scaling", x=np.array(xs), y=np.array(ys))
        for xs, ys in points.ideal
    ]
    yield line_chart(
        "samples/s, and linear scaling",
        measured,
        x_label="workers",
        starts_at_zero=True,
        ideal=ideal,
    )
