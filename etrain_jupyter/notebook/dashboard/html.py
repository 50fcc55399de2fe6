"""Render a job without JavaScript, for exports, other front ends and terminals.

Sanitizers of untrusted notebooks remove ``<svg>`` and ``<style>``, so the charts are images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from etrain_jupyter.display.charts import Curve, Mark, image, line_chart
from etrain_jupyter.display.numbers import dollars, number, seconds
from etrain_jupyter.display.tables import Html, html_list, html_of, html_table
from etrain_jupyter.log.events import describe_parameters
from etrain_jupyter.log.exhibits import Cell, Content, Table
from etrain_jupyter.notebook.dashboard.freshness import trouble_of
from etrain_jupyter.notebook.dashboard.saved_exhibits import SavedExhibit, SavedExhibits
from etrain_jupyter.notebook.dashboard.series import Floats, SmallFloats, thin
from etrain_jupyter.notebook.dashboard.snapshot import (
    CostSummary,
    EventLine,
    Snapshot,
    TimeSplit,
    WorkerRow,
)
from etrain_jupyter.untrusted import is_job_id, plain_line, plain_text

Curves = Mapping[str, tuple[Floats, SmallFloats]]

WIDTH, LOSS_HEIGHT, WORLD_HEIGHT = 720, 240, 130
MARKER_COLOURS = {"lost": "#d64545", "failed": "#d64545", "notice": "#d99a1c", "join": "#3f9d54"}
ALARM = MARKER_COLOURS["failed"]
MAX_CURVE_POINTS = 400
MAX_LISTED_EVENTS = 10
MAX_OPEN_LINES = 30
"""Longer exhibits (texts and tables) are collapsed at first."""
WORKER_COLUMNS = (
    *("rank", "worker", "state", "device"),
    *("samples/s", "time goes into", "waits for", "steps"),
)


def render_text(snapshot: Snapshot) -> str:
    """Return the job as one line."""
    facts = [_status(snapshot), _steps(snapshot)]
    if snapshot.loss is not None:
        facts.append(f"loss {number(float(snapshot.loss))}")
    if snapshot.eval:
        facts += [f"eval {name} {value}" for name, value in _values(snapshot.eval.metrics)]
    facts.append(f"workers {_workers(snapshot)}")
    if trouble := _checkpoint_trouble(snapshot):
        facts.append(trouble)
    if snapshot.eta_s is not None:
        facts.append(f"{seconds(snapshot.eta_s)} left")
    return plain_line(f"<etrain job {snapshot.name!r}: {', '.join(facts)}>", max_length=4000)


def render_html(snapshot: Snapshot, curves: Curves, exhibits: SavedExhibits | None = None) -> str:
    """Return the job as HTML that a sanitizer does not change."""
    parts = [
        f"<p><b>{html_of(str(snapshot.name))}</b> {html_of(_headline(snapshot))}</p>",
        _progress(snapshot),
        _warning(snapshot),
        _charts(snapshot, curves),
        _error(snapshot),
        render_exhibits(exhibits or SavedExhibits(), snapshot.job_id),
        _worker_table(snapshot),
        _event_list(snapshot),
    ]
    return plain_text("<div>" + "".join(part for part in parts if part) + "</div>")


def _headline(snapshot: Snapshot) -> str:
    facts = [_status(snapshot), _steps(snapshot)]
    if snapshot.loss is not None:
        facts.append(f"loss {number(float(snapshot.loss))}")
    facts += [f"{name} {value}" for name, value in _values(snapshot.metrics)]
    if snapshot.eval:
        facts += [f"eval {name} {value}" for name, value in _values(snapshot.eval.metrics)]
    if snapshot.samples_per_s is not None:
        facts.append(f"{number(float(snapshot.samples_per_s))} samples/s")
    if snapshot.global_batch_size is not None:
        facts.append(f"batch {snapshot.global_batch_size:,}")
    if snapshot.num_parameters and snapshot.num_trained_parameters:
        facts.append(describe_parameters(snapshot.num_trained_parameters, snapshot.num_parameters))
    if snapshot.lr is not None:
        facts.append(f"lr {float(snapshot.lr):.3g}")
    facts.append(f"workers {_workers(snapshot)}")
    if snapshot.cost:
        facts.append(_cost(snapshot.cost))
    if snapshot.elapsed_s is not None:
        facts.append(seconds(snapshot.elapsed_s))
    return " · ".join(facts)


def _cost(cost: CostSummary) -> str:
    amounts = {"spent": cost.spent_usd, "saved": cost.saved_usd, "wasted": cost.wasted_usd}
    shown = {name: usd for name, usd in amounts.items() if usd or name == "spent"}
    return ", ".join(f"{dollars(usd)} {name}" for name, usd in shown.items())


def _warning(snapshot: Snapshot) -> str:
    # Show it as text too, since a sanitizer may remove the colour.
    text = _checkpoint_trouble(snapshot)
    return f'<p style="color:{ALARM}">{html_of(text)}</p>' if text else ""


def _checkpoint_trouble(snapshot: Snapshot) -> str:
    # Use the time of the newest event, not the current time, so that an old log always looks the
    # same.
    trouble = trouble_of(snapshot, snapshot.updated_at)
    if not trouble:
        return ""
    newest = snapshot.checkpoint
    last = f"the newest is from step {newest.step:,}" if newest else "none yet"
    if newest and trouble == "overdue":
        last += f", {seconds(snapshot.updated_at - newest.time)} old"
    return f"checkpoint {trouble}, {last}"


def _status(snapshot: Snapshot) -> str:
    reason = f" ({snapshot.reason})" if snapshot.reason else ""
    return f"{snapshot.status}{reason}"


def _steps(snapshot: Snapshot) -> str:
    total = snapshot.total_steps
    return f"step {snapshot.step:,}" + (f" of {total:,}" if total else "")


def _workers(snapshot: Snapshot) -> str:
    most = snapshot.max_workers
    return f"{snapshot.world_size}" + (f" of {most}" if most else "")


def _values(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, number(float(value))) for name, value in metrics.items()]


def _progress(snapshot: Snapshot) -> str:
    if snapshot.progress is None:
        return ""
    percent = f"{snapshot.progress * 100:.0f} %"
    return f'<progress max="1" value="{snapshot.progress:.4f}">{percent}</progress> {percent}'


def _error(snapshot: Snapshot) -> str:
    error = snapshot.error
    return f"<pre><code>{html_of(error.traceback or error.error)}</code></pre>" if error else ""


def _worker_table(snapshot: Snapshot) -> str:
    if not snapshot.workers:
        return ""
    table = html_table(WORKER_COLUMNS, map(_worker_cells, snapshot.workers))
    num_more = snapshot.num_more_workers
    return table + (f"<p>and {num_more:,} more</p>" if num_more else "")


def _worker_cells(worker: WorkerRow) -> tuple[str, ...]:
    rank = "" if worker.rank is None else str(worker.rank)
    state = worker.state + (f" ({worker.note})" if worker.note else "")
    split = worker.split
    return (
        rank,
        str(worker.worker),
        state,
        _machine_of(worker),
        f"{split.samples_per_s:,.0f}" if split else "",
        _shares(split) if split else "",
        worker.waits_for,
        f"{worker.steps:,}",
    )


def _machine_of(worker: WorkerRow) -> str:
    """Return the machine's type, price and zone if the pool reports them, otherwise the device."""
    if not worker.machine:
        return str(worker.device)
    price = "" if worker.usd_per_h is None else f" ${worker.usd_per_h:.2f}/h"
    return f"{worker.machine}{price} {worker.zone}"


def _shares(split: TimeSplit) -> str:
    parts = sorted(split.shares.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.01)


def _event_list(snapshot: Snapshot) -> str:
    latest = snapshot.events[-MAX_LISTED_EVENTS:]
    items = html_list(
        Html(f"{_since_start(event, snapshot)} {_level(event)}{html_of(event.text)}")
        for event in reversed(latest)
    )
    return f"<details><summary>Latest events</summary>{items}</details>" if items else ""


def _level(event: EventLine) -> str:
    return f"<b>{event.level}</b> " if event.level in ("warning", "error") else ""


def _since_start(event: EventLine, snapshot: Snapshot) -> str:
    # Relative, because an export does not know the reader's time zone.
    passed = max(0, round(event.time - (snapshot.submitted_at or event.time)))
    return f"+{passed // 60}:{passed % 60:02d}"


def _charts(snapshot: Snapshot, curves: Curves) -> str:
    """Return the loss and, below it, the number of workers, over the same steps."""
    # A curve with one point has no line; the headline shows its value.
    steps, losses = curves.get("loss", (np.zeros(0), np.zeros(0, np.float32)))
    lines = [
        Curve(index=index, label=label, x=x[shown], y=y[shown])
        for index, (label, name) in enumerate((("train", "loss"), ("eval", "eval.loss")))
        if name in curves
        for x, y in [thin(*curves[name], MAX_CURVE_POINTS)]
        for shown in [np.isfinite(y)]
        if shown.any()
    ]
    if len(steps) < 2 or not lines:
        return ""
    has_eval = "eval.loss" in curves
    loss = line_chart(
        "loss: train blue, eval orange" if has_eval else "loss",
        lines,
        x_label="step",
        # Only faults and joins: lines for checkpoints and restores would hide the curve.
        marks=[
            Mark(x=marker.step, color=MARKER_COLOURS[marker.kind], label=marker.text)
            for marker in snapshot.markers
            if marker.kind in MARKER_COLOURS
        ],
        width=WIDTH,
        height=LOSS_HEIGHT,
    )
    alt = f"loss over {snapshot.step:,} steps, last {number(float(losses[-1]))}"
    return f"<p>{image(loss, alt, width=WIDTH)}{_world_chart(curves, float(steps[-1]))}</p>"


def _world_chart(curves: Curves, last_step: float) -> str:
    x, y = curves.get("world_size", (np.zeros(0), np.zeros(0, np.float32)))
    if not len(x):
        return ""
    # The curve has one point per change, and the last value holds until the last step.
    x, y = np.append(x, max(last_step, x[-1])), np.append(y, y[-1])
    world = Curve(index=0, label="workers", x=x, y=y)
    svg = line_chart(
        "workers", [world], x_label="step", is_stepped=True, starts_at_zero=True,
        width=WIDTH, height=WORLD_HEIGHT,
    )  # fmt: skip
    return image(svg, "number of workers", width=WIDTH)


# --- exhibits -------------------------------------------------------------------------------------


def render_exhibits(saved: SavedExhibits, job_id: str) -> str:
    """Return the newest exhibits, then the older ones by step, collapsed; empty without exhibits.

    Args:
        saved: The exhibits.
        job_id: The job, for the command that shows the rest.
    """
    if not saved.total:
        return ""
    names: set[str] = set()
    newest: list[SavedExhibit] = []
    older: list[SavedExhibit] = []
    for one in saved.exhibits:
        (older if one.name in names else newest).append(one)
        names.add(one.name)
    parts = ["<p><b>exhibits</b></p>"]
    for one in newest:
        title = f"{one.name}, step {one.step:,}"
        state = " open" if _num_lines(one.content) <= MAX_OPEN_LINES else ""
        parts.append(_folded(title, _exhibit_html(one), state))
    for step, group in groupby(older, key=lambda one: one.step):
        parts.append(_evaluated_exhibits(step, list(group)))
    return "".join([*parts, _left_out_exhibits(saved, job_id)])


def _evaluated_exhibits(step: int, exhibits: Sequence[SavedExhibit]) -> str:
    title = f"step {step:,}: {', '.join(one.name for one in exhibits)}"
    return _folded(title, "".join(_exhibit_html(one) for one in exhibits), "")


def _left_out_exhibits(saved: SavedExhibits, job_id: str) -> str:
    num_missing = saved.total - len(saved.exhibits)
    if num_missing <= 0:
        return ""
    attach = f"%etrain attach {job_id if is_job_id(job_id) else 'JOB'}"
    return (
        f"<p>This output does not contain {num_missing:,} of the {saved.total:,} exhibits. To see "
        f"them, run <code>{attach}</code> in JupyterLab with the etrain extension, or call "
        "<code>job.exhibits()</code>.</p>"
    )


def _folded(title: str, content: str, state: str) -> str:
    return f"<details{state}><summary>{html_of(title)}</summary>{content}</details>"


def _exhibit_html(exhibit: SavedExhibit) -> str:
    match exhibit.content:
        case bytes() as data:
            return f"<p>{image(data, f'{exhibit.name} at step {exhibit.step:,}')}</p>"
        case str() as text:
            return f"<pre><code>{html_of(text)}</code></pre>"
        case Table() as table:
            return html_table(table.columns, [[*map(_exhibit_cell, row)] for row in table.rows])


def _exhibit_cell(value: Cell) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else str(value)


def _num_lines(content: Content) -> int:
    match content:
        case str():
            return content.count("\n")
        case Table():
            return len(content.rows)
        case _:
            return 0
