"""Render a comparison: its table as text, a self-contained HTML page, and the output of a cell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from etrain_jupyter import __version__
from etrain_jupyter.display.charts import Curve, dot, image, line_chart
from etrain_jupyter.display.numbers import MISSING, counted, dollars, duration
from etrain_jupyter.display.tables import (
    Column,
    Html,
    align_columns,
    html_list,
    html_of,
    html_table,
)
from etrain_jupyter.insight.curves import (
    STEPPED,
    Compared,
    available_axes,
    curves_of,
    default_columns,
    name_of,
    scale_of,
    scaling_points,
)
from etrain_jupyter.insight.runs import Axis
from etrain_jupyter.untrusted import plain_line

IF_DIFFERENT = ("status", "device", "batch", "steps", "epochs", "saved_usd", "interruptions")
"""Columns that the text has only if the jobs differ in them, because lines are short."""
MAX_TEXT = 60
"""Maximum number of characters of a value from a configuration."""
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


# --- text ---

_ratio = "{:.2f}".format


def _workers(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


_BEFORE = (
    Column(key="job", heading="job"),
    Column(key="status", heading="status"),
    Column(key="workers", heading="workers", about="mean, weighted by time", show=_workers),
    Column(key="device", heading="device"),
    Column(key="batch", heading="batch", about="mean number of samples per step"),
    Column(key="steps", heading="steps"),
    Column(key="epochs", heading="epochs", show=_ratio),
    Column(
        key="samples_per_s",
        heading="samples/s",
        about="without loading, evaluation, saving and recovery",
    ),
    Column(
        key="speedup",
        heading="speed-up",
        about="throughput relative to the job with the fewest workers",
        show="{:.1f}x".format,
    ),
    Column(
        key="efficiency",
        heading="efficiency",
        about="speed-up by the ratio of workers; 1.00 is linear scaling",
        show=_ratio,
    ),
)
_TRAIN_LOSS = Column(key="train_loss", heading="train loss", about="mean over the last steps")
"""Shown if no job has evaluations."""
_AFTER = (
    Column(
        key="hours",
        heading="time",
        about="from the beginning of the first step to the end of the last one",
        show=duration,
    ),
    Column(key="usd", heading="cost", show=dollars),
    Column(key="saved_usd", heading="saved", about="relative to on-demand prices", show=dollars),
    Column(
        key="wasted_usd",
        heading="wasted",
        about="part of the cost for booting, warming up or draining after the first step",
        show=dollars,
    ),
    Column(
        key="interruptions", heading="interruptions", about="workers that were preempted or lost"
    ),
)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns that have a value in any row, with those of the metrics in the middle."""
    metrics = list(_metric_columns(rows)) or [_TRAIN_LOSS]
    found = [*_BEFORE, *metrics, *_AFTER]
    return [column for column in found if any(_is_known(row.get(column.key)) for row in rows)]


def _is_known(value: Any) -> bool:
    # A count of zero interruptions in all jobs is not worth a column.
    return bool(value) and not (isinstance(value, float) and math.isnan(value))


def _metric_columns(rows: Sequence[Mapping[str, Any]]) -> Iterator[Column]:
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("best_"))
    for name in (key.removeprefix("best_") for key in keys):
        best, final = f"best_{name}", f"final_{name}"
        # One column is enough if the last evaluation is the best one in every job.
        is_same = all(row.get(best) == row.get(final) for row in rows)
        yield Column(key=best, heading=name if is_same else f"best {name}", about="evaluation")
        if not is_same:
            yield Column(key=final, heading=f"final {name}", about="last evaluation")


def render_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table as text; a line below it has the values that all jobs have in common."""
    columns = columns_of(rows)
    common = [
        column
        for column in columns
        if column.key in IF_DIFFERENT and len(rows) > 1 and len({*map(column.cell, rows)}) == 1
    ]
    columns = [column for column in columns if column not in common]
    lines = [[column.heading.upper() for column in columns]]
    lines += [[column.cell(row) for column in columns] for row in rows]
    shared = ", ".join(f"{column.heading} {column.cell(rows[0])}" for column in common)
    return align_columns(lines) + (f"\nAll jobs: {shared}" if shared else "")


def render_differences(labels: Sequence[str], differences: Mapping[str, Sequence[str]]) -> str:
    """Return the keys in which the jobs differ as text; empty if they do not differ."""
    if not differences:
        return ""
    return align_columns(
        [
            ["DIFFERENCES", *labels],
            *([key, *map(short_value, values)] for key, values in differences.items()),
        ]
    )


def short_value(value: str) -> str:
    """Return a value of a configuration on one line of limited length."""
    return plain_line(value, MAX_TEXT) or MISSING


# --- HTML ---


def render_page(compared: Compared) -> str:
    """Return one HTML page without scripts that loads nothing."""
    axes = available_axes(compared.runs)
    shown = "".join(f"#over-{axis}:checked~.{axis}{{display:flex}}" for axis in axes)
    switches = "".join(
        f'<input class="axis" type="radio" name="axis" id="over-{axis}"'
        f"{' checked' if axis == axes[0] else ''}>"
        f'<label for="over-{axis}">{AXIS_NAMES[axis]}</label>'
        for axis in axes
    )
    charts = "".join(
        f'<div class="charts {axis}">{"".join(_charts(compared, axis, MAX_PAGE_CHARTS))}</div>'
        for axis in axes
    )
    title = f"Comparison of {counted(len(compared.runs), 'job')}"
    made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width"><meta name="referrer" '
        f'content="no-referrer"><title>{title}</title><style>{_STYLE}{shown}</style></head><body>'
        f"<h1>{title}</h1>{_table(compared.rows)}{_notes(compared)}<h2>Curves</h2><div>{switches}{charts}</div>"
        f"{_scaling(compared)}{_differences(compared)}"
        f"<footer>etrain-jupyter {__version__}, {made_at}</footer></body></html>\n"
    )


def render_cell(compared: Compared) -> str:
    """Return the output of a cell, as HTML that a sanitizer does not change."""
    # A sanitizer removes inline SVG, styles and inputs, but keeps images.
    charts = _charts(compared, "steps", MAX_CELL_CHARTS)
    images = "".join(map(image, (*charts, *_scaling_charts(compared))))
    differences = _differences(compared, heading="h4")
    return f"<div>{_table(compared.rows)}{_notes(compared)}{images}{differences}</div>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
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


def _notes(compared: Compared) -> str:
    return html_list(compared.notes, css_class="notes")


def _differences(compared: Compared, *, heading: str = "h2") -> str:
    found = compared.differences
    if not found:
        return ""
    lines = [[plain_line(key), *map(short_value, values)] for key, values in found.items()]
    table = html_table(["key", *compared.labels], lines, has_row_heads=True)
    return f'<{heading}>Differences between the cells</{heading}><div class="scroll">{table}</div>'


def _charts(compared: Compared, over: Axis, most: int) -> Iterator[str]:
    labels, runs = compared.labels, compared.runs
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


def _scaling(compared: Compared) -> str:
    charts = "".join(_scaling_charts(compared))
    return f'<h2>Scaling</h2><div class="charts scaling">{charts}</div>' if charts else ""


def _scaling_charts(compared: Compared) -> Iterator[str]:
    points = scaling_points(compared.runs, compared.rows)
    if not points:
        return
    measured = [
        Curve(index=i, label=compared.labels[i], x=np.array([workers]), y=np.array([rate]))
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
