"""Render a job without JavaScript, for exports, other front ends and terminals.

Sanitizers of untrusted notebooks remove ``<svg>`` and ``<style>``, but keep an ``<img>`` with a
data URL. The chart is therefore such an image, in mid tones that are readable on white and on
black.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from etrain_jupyter.log.events import describe_parameters
from etrain_jupyter.notebook.dashboard.event_text import dollars, number, seconds
from etrain_jupyter.notebook.dashboard.exhibits_html import render_exhibits
from etrain_jupyter.notebook.dashboard.freshness import trouble_of
from etrain_jupyter.notebook.dashboard.saved_exhibits import SavedExhibits
from etrain_jupyter.notebook.dashboard.series import Floats, SmallFloats, thin
from etrain_jupyter.notebook.dashboard.snapshot import (
    CostSummary,
    EventLine,
    Marker,
    Snapshot,
    TimeSplit,
    WorkerRow,
)
from etrain_jupyter.untrusted import plain_line, plain_text

Curves = Mapping[str, tuple[Floats, SmallFloats]]

WIDTH, LOSS_HEIGHT, WORLD_HEIGHT = 720, 180, 64
LEFT, RIGHT, TOP, GAP = 52, 8, 18, 30
TEXT, GRID, TRAIN, EVAL = "#808080", "#80808040", "#3b82d6", "#e0823d"
MARKER_COLOURS = {"lost": "#d64545", "failed": "#d64545", "notice": "#d99a1c", "join": "#3f9d54"}
ALARM = MARKER_COLOURS["failed"]
MAX_CURVE_POINTS = 400
MAX_LISTED_EVENTS = 10
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
        f"<p><b>{escape(str(snapshot.name))}</b> {escape(_headline(snapshot))}</p>",
        _progress(snapshot),
        _warning(snapshot),
        _chart_image(snapshot, curves),
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
    return f'<p style="color:{ALARM}">{escape(text)}</p>' if text else ""


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
    return f"<pre><code>{escape(error.traceback or error.error)}</code></pre>" if error else ""


def _worker_table(snapshot: Snapshot) -> str:
    if not snapshot.workers:
        return ""
    heads = "".join(f"<th>{name}</th>" for name in WORKER_COLUMNS)
    rows = "".join(_worker_row(worker) for worker in snapshot.workers)
    num_more = snapshot.num_more_workers
    more = f"<p>and {num_more:,} more</p>" if num_more else ""
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _worker_row(worker: WorkerRow) -> str:
    rank = "" if worker.rank is None else worker.rank
    state = worker.state + (f" ({worker.note})" if worker.note else "")
    split = worker.split
    cells = (
        rank,
        worker.worker,
        state,
        _machine_of(worker),
        f"{split.samples_per_s:,.0f}" if split else "",
        _shares(split) if split else "",
        worker.waits_for,
        f"{worker.steps:,}",
    )
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"


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
    items = "".join(
        f"<li>{escape(_since_start(event, snapshot))} {_level(event)}{escape(event.text)}</li>"
        for event in reversed(latest)
    )
    return f"<details><summary>Latest events</summary><ul>{items}</ul></details>" if items else ""


def _level(event: EventLine) -> str:
    return f"<b>{event.level}</b> " if event.level in ("warning", "error") else ""


def _since_start(event: EventLine, snapshot: Snapshot) -> str:
    # Relative, because an export does not know the reader's time zone.
    passed = max(0, round(event.time - (snapshot.submitted_at or event.time)))
    return f"+{passed // 60}:{passed % 60:02d}"


def _chart_image(snapshot: Snapshot, curves: Curves) -> str:
    # A curve with one point has no line; the headline shows its value.
    loss = curves.get("loss")
    if loss is None or len(loss[0]) < 2:
        return ""
    svg = _chart(snapshot, curves).encode()
    alt = f"loss over {snapshot.step:,} steps, last {number(float(loss[1][-1]))}; world size"
    data = base64.b64encode(svg).decode()
    return f'<p><img alt="{alt}" width="{WIDTH}" src="data:image/svg+xml;base64,{data}"></p>'


def _chart(snapshot: Snapshot, curves: Curves) -> str:
    # The loss above the world size, over the same steps:
    #
    #   TOP                       +--------------------------+
    #   LOSS_HEIGHT               |  loss, eval.loss         |
    #                             +--------------------------+
    #   GAP
    #   WORLD_HEIGHT              |  world size, a staircase |
    #                             +--------------------------+
    #                             LEFT                   RIGHT
    last_step = max(float(curves["loss"][0][-1]), 1.0)
    world_top = TOP + LOSS_HEIGHT + GAP
    height = world_top + WORLD_HEIGHT + 20
    lines = [("loss", TRAIN, 1.2), ("eval.loss", EVAL, 2.0)]
    drawn = {name: thin(*curves[name], MAX_CURVE_POINTS) for name, _, _ in lines if name in curves}
    losses = _Panel(TOP, LOSS_HEIGHT, last_step, *_range(list(drawn.values())))
    worlds = _Panel(world_top, WORLD_HEIGHT, last_step, 0, float(snapshot.max_workers or 1))
    parts = [
        losses.frame("loss: train blue, eval orange" if "eval.loss" in drawn else "loss"),
        worlds.frame("workers"),
        *(
            losses.curve(*drawn[name], colour, width)
            for name, colour, width in lines
            if name in drawn
        ),
        _world_curve(worlds, curves, last_step),
        *(_marker_line(marker, losses, height) for marker in snapshot.markers),
        _label(WIDTH - RIGHT, height - 4, f"step {last_step:,.0f}"),
    ]
    style = f'font-family="sans-serif" font-size="11" fill="{TEXT}"'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'


def _label(right: int, baseline: int, text: str) -> str:
    return f'<text x="{right}" y="{baseline}" text-anchor="end">{text}</text>'


def _range(curves: Sequence[tuple[Floats, SmallFloats]]) -> tuple[float, float]:
    values = np.concatenate([y for _, y in curves])
    values = values[np.isfinite(values)]
    # A loss that is NaN from its first step still gets axes.
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    # A constant curve has no range to scale to: draw it in the middle.
    return (low, high) if high > low else (low - 0.5, low + 0.5)


class _Panel:
    def __init__(self, top: int, height: int, last_step: float, low: float, high: float) -> None:
        self.top, self.height = top, height
        self._last_step, self._low, self._high = last_step, low, high

    def x(self, step: float) -> float:
        # Markers of undone steps may be beyond the end of the loss.
        return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, step / self._last_step)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - (value - self._low) / (self._high - self._low))

    def frame(self, title: str) -> str:
        bottom = self.top + self.height
        box = (
            f'<path d="M{LEFT} {self.top}H{WIDTH - RIGHT}M{LEFT} {bottom}H{WIDTH - RIGHT}" '
            f'stroke="{GRID}" fill="none"/>'
        )
        labels = [
            f'<text x="{LEFT}" y="{self.top - 5}">{title}</text>',
            _label(LEFT - 6, self.top + 4, number(self._high)),
            _label(LEFT - 6, bottom + 4, number(self._low)),
        ]
        return box + "".join(labels)

    def curve(self, x: Floats, y: SmallFloats, colour: str, width: float) -> str:
        # SVG has no NaN: the line skips those points.
        shown = np.isfinite(y)
        points = " ".join(
            f"{self.x(step):.1f},{self.y(float(value)):.1f}"
            for step, value in zip(x[shown], y[shown], strict=True)
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _world_curve(panel: _Panel, curves: Curves, last_step: float) -> str:
    # Each value lasts until the next, so the path has only horizontal and vertical lines.
    steps, sizes = curves.get("world_size", (np.zeros(0), np.zeros(0, np.float32)))
    if not len(steps):
        return ""
    path = f"M{panel.x(steps[0]):.1f} {panel.y(float(sizes[0])):.1f}"
    path += "".join(
        f"H{panel.x(step):.1f}V{panel.y(float(size)):.1f}"
        for step, size in zip(steps[1:], sizes[1:], strict=True)
    )
    path += f"H{panel.x(last_step):.1f}"
    return f'<path d="{path}" fill="none" stroke="{TRAIN}" stroke-width="1.5"/>'


def _marker_line(marker: Marker, panel: _Panel, height: int) -> str:
    # Only faults and joins: lines for checkpoints and restores would hide the curve.
    colour = MARKER_COLOURS.get(marker.kind)
    if colour is None:
        return ""
    x = f"{panel.x(marker.step):.1f}"
    return (
        f'<path d="M{x} {panel.top}V{height - 20}" stroke="{colour}" stroke-dasharray="3 3">'
        f"<title>{escape(marker.text)}</title></path>"
    )
