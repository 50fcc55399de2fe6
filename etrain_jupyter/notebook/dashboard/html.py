"""Render a job without JavaScript, for exports, other front ends and terminals.

Sanitizers of untrusted notebooks remove ``<svg>`` and ``<style>``, so the charts are images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from etrain_jupyter.display.charts import Curve, Mark, image, line_chart
from etrain_jupyter.display.numbers import dollars, number, seconds
from etrain_jupyter.display.tables import Html, html_list, html_of, html_table
from etrain_jupyter.log.events import describe_parameters
from etrain_jupyter.log.exhibits import Cell, Content, Table
from etrain_jupyter.notebook.dashboard.curves import Floats, SmallFloats, thin
from etrain_jupyter.notebook.dashboard.pace import trouble_of
from etrain_jupyter.notebook.dashboard.saved_exhibits import SavedExhibit, SavedExhibits
from etrain_jupyter.notebook.dashboard.snapshot import EventLine, Snapshot, WorkerRow
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
    facts = [*_progress_facts(snapshot), *_eval_facts(snapshot), _workers(snapshot)]
    if trouble := _checkpoint_trouble(snapshot):
        facts.append(trouble)
    if snapshot.eta_s is not None:
        facts.append(f"{seconds(snapshot.eta_s)} left")
    return plain_line(f"<etrain job {snapshot.name!r}: {', '.join(facts)}>", max_length=4000)


def render_html(snapshot: Snapshot, curves: Curves, exhibits: SavedExhibits | None = None) -> str:
    """Return the job as HTML that a sanitizer does not change."""
    name, headline = html_of(str(snapshot.name)), html_of(" · ".join(_headline(snapshot)))
    parts = [f"<p><b>{name}</b> {headline}</p>"]
    if snapshot.progress is not None:
        percent = f"{snapshot.progress * 100:.0f} %"
        value = f"{snapshot.progress:.4f}"
        parts.append(f'<progress max="1" value="{value}">{percent}</progress> {percent}')
    # The text alone must suffice, because a sanitizer may remove the color.
    if trouble := _checkpoint_trouble(snapshot):
        parts.append(f'<p style="color:{ALARM}">{html_of(trouble)}</p>')
    parts.append(_charts(snapshot, curves))
    if error := snapshot.error:
        parts.append(f"<pre><code>{html_of(error.traceback or error.error)}</code></pre>")
    parts.append(render_exhibits(exhibits or SavedExhibits(), snapshot.job_id))
    if snapshot.workers:
        parts.append(html_table(WORKER_COLUMNS, map(_worker_cells, snapshot.workers)))
        if num_more := snapshot.num_more_workers:
            parts.append(f"<p>and {num_more:,} more</p>")
    latest = snapshot.events[-MAX_LISTED_EVENTS:]
    if items := html_list(_event_item(event, snapshot) for event in reversed(latest)):
        parts.append(f"<details><summary>Latest events</summary>{items}</details>")
    return plain_text(f"<div>{''.join(parts)}</div>")


def _headline(snapshot: Snapshot) -> Iterator[str]:
    yield from _progress_facts(snapshot)
    yield from (f"{name} {value}" for name, value in _values(snapshot.metrics))
    yield from _eval_facts(snapshot)
    if snapshot.samples_per_s is not None:
        yield f"{number(float(snapshot.samples_per_s))} samples/s"
    if snapshot.global_batch_size is not None:
        yield f"batch {snapshot.global_batch_size:,}"
    if snapshot.num_parameters and snapshot.num_trained_parameters:
        yield describe_parameters(snapshot.num_trained_parameters, snapshot.num_parameters)
    if snapshot.lr is not None:
        yield f"lr {float(snapshot.lr):.3g}"
    yield _workers(snapshot)
    if cost := snapshot.cost:
        amounts = {"spent": cost.spent_usd, "saved": cost.saved_usd, "wasted": cost.wasted_usd}
        shown = {name: usd for name, usd in amounts.items() if usd or name == "spent"}
        yield ", ".join(f"{dollars(usd)} {name}" for name, usd in shown.items())
    if snapshot.elapsed_s is not None:
        yield seconds(snapshot.elapsed_s)


def _progress_facts(snapshot: Snapshot) -> Iterator[str]:
    yield snapshot.status + (f" ({snapshot.reason})" if snapshot.reason else "")
    total = snapshot.total_steps
    yield f"step {snapshot.step:,}" + (f" of {total:,}" if total else "")
    if snapshot.loss is not None:
        yield f"loss {number(float(snapshot.loss))}"


def _eval_facts(snapshot: Snapshot) -> list[str]:
    metrics = snapshot.eval.metrics if snapshot.eval else {}
    return [f"eval {name} {value}" for name, value in _values(metrics)]


def _workers(snapshot: Snapshot) -> str:
    most = snapshot.max_workers
    return f"workers {snapshot.world_size}" + (f" of {most}" if most else "")


def _values(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, number(float(value))) for name, value in metrics.items()]


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


def _worker_cells(worker: WorkerRow) -> tuple[str, ...]:
    rate = shares = ""
    if split := worker.split:
        rate = f"{split.samples_per_s:,.0f}"
        parts = sorted(split.shares.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.01)
    # The machine's type, price and zone if the pool reports them, otherwise the device.
    price = "" if worker.usd_per_h is None else f" ${worker.usd_per_h:.2f}/h"
    return (
        "" if worker.rank is None else str(worker.rank),
        str(worker.worker),
        worker.state + (f" ({worker.note})" if worker.note else ""),
        f"{worker.machine}{price} {worker.zone}" if worker.machine else str(worker.device),
        rate,
        shares,
        worker.waits_for,
        f"{worker.steps:,}",
    )


def _event_item(event: EventLine, snapshot: Snapshot) -> Html:
    # Relative, because an export does not know the reader's time zone.
    passed = max(0, round(event.time - (snapshot.submitted_at or event.time)))
    level = f"<b>{event.level}</b> " if event.level in ("warning", "error") else ""
    return Html(f"+{passed // 60}:{passed % 60:02d} {level}{html_of(event.text)}")


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
        # Only faults and joins, because lines for checkpoints and restores would hide the curve.
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
    """Return the newest exhibits, then the older ones by step, collapsed; empty if none exist."""
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
        evaluated = list(group)
        title = f"step {step:,}: {', '.join(one.name for one in evaluated)}"
        parts.append(_folded(title, "".join(map(_exhibit_html, evaluated))))
    if (num_missing := saved.total - len(saved.exhibits)) > 0:
        attach = f"%etrain attach {job_id if is_job_id(job_id) else 'JOB'}"
        parts.append(
            f"<p>This output does not contain {num_missing:,} of the {saved.total:,} exhibits. To "
            f"see them, run <code>{attach}</code> in JupyterLab with the etrain extension, or call "
            "<code>job.exhibits()</code>.</p>"
        )
    return "".join(parts)


def _folded(title: str, content: str, state: str = "") -> str:
    return f"<details{state}><summary>{html_of(title)}</summary>{content}</details>"


def _exhibit_html(exhibit: SavedExhibit) -> str:
    match exhibit.content:
        case bytes() as data:
            return f"<p>{image(data, f'{exhibit.name} at step {exhibit.step:,}')}</p>"
        case str() as text:
            return f"<pre><code>{html_of(text)}</code></pre>"
        case Table() as table:
            rows = [["" if cell is None else _shown(cell) for cell in row] for row in table.rows]
            return html_table(table.columns, rows)


def _shown(value: Cell) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _num_lines(content: Content) -> int:
    if isinstance(content, Table):
        return len(content.rows)
    return content.count("\n") if isinstance(content, str) else 0
