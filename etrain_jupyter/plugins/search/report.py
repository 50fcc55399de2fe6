"""State of a study at one moment, and how it is rendered as text and as HTML."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from etrain_jupyter.plugins.search.figures import Importance
from etrain_jupyter.untrusted import plain_line, plain_text

WIDTH, HEIGHT, PAD = 120, 24, 2
COLOURS = {"COMPLETE": "#3f9d54", "RUNNING": "#3b82d6", "PRUNED": "#808080", "FAIL": "#d64545"}
STATES = {"COMPLETE": "complete", "RUNNING": "running", "PRUNED": "pruned", "FAIL": "failed"}
MAX_ROWS = 200
"""Maximum number of trials in the table; the best ones are shown."""


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One trial of a study."""

    number: int
    state: str
    """``RUNNING``, ``COMPLETE``, ``PRUNED`` or ``FAIL``, as in Optuna."""
    params: dict[str, Any]
    value: float
    """The newest value of the metric; NaN before the first evaluation."""
    samples: int
    """Training samples at that value; those of the whole trial once it has ended."""
    reason: str
    job_id: str
    curve: tuple[tuple[int, float], ...] = ()
    """Samples and value of each evaluation."""


@dataclass(frozen=True, kw_only=True)
class StudyView:
    """A study at one moment."""

    name: str
    study_id: str
    status: str
    reason: str
    metric: str
    mode: str
    num_trials: int
    num_samples: int
    """Samples of a whole trial; 0 until it is known."""
    rungs: tuple[int, ...] = ()
    trials: tuple[TrialRow, ...] = ()

    @property
    def best(self) -> TrialRow | None:
        """The best complete trial; if there is none, the best running or else pruned trial."""
        # A pruned trial was compared at a rung, so its value may be better than those of trials
        # that have gone further.
        for state in ("COMPLETE", "RUNNING", "PRUNED"):
            rows = [t for t in self.trials if t.state == state and not math.isnan(t.value)]
            if rows:
                return (max if self.mode == "max" else min)(rows, key=lambda row: row.value)
        return None


def render_text(view: StudyView) -> str:
    """Return a study as one line."""
    return plain_line(f"<etrain study {view.name!r}: {', '.join(_facts(view))}>", max_length=2000)


def _facts(view: StudyView) -> list[str]:
    counts = [
        f"{count} {word_of(view, state)}"
        for state in STATES
        if (count := sum(trial.state == state for trial in view.trials))
    ]
    facts = [view.status + (f" ({view.reason})" if view.reason else "")]
    facts.append(f"{len(view.trials)} of {view.num_trials} trials: {', '.join(counts) or 'none'}")
    if view.best is not None:
        facts.append(f"best {view.metric} {view.best.value:.6g} with {describe_params(view.best)}")
    return facts


def word_of(view: StudyView, state: str) -> str:
    """Return the word for a trial's state."""
    # A stopped study leaves its running trials as they are, so that a resume continues them.
    if state == "RUNNING" and view.status != "running":
        return "unfinished"
    return STATES.get(state, state.lower())


def describe_params(trial: TrialRow) -> str:
    """Return the values of a trial as text."""
    return ", ".join(f"{name}={_short(value)}" for name, value in trial.params.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def render_html(view: StudyView, importance: Importance) -> str:
    """Return a study as HTML that a sanitizer does not change."""
    parts = [f"<p><b>{escape(view.name)}</b> {escape(', '.join(_facts(view)))}</p>"]
    if view.rungs:
        rungs = ", ".join(f"{count:,}" for count in view.rungs)
        parts.append(f"<p>rungs at {rungs} of {view.num_samples:,} samples</p>")
    if view.trials:
        parts += [f"<p>{escape(_describe_importance(importance))}</p>", _table(view)]
    hidden = len(view.trials) - MAX_ROWS
    if hidden > 0:
        parts.append(f"<p>{hidden} more trials are in study.trials</p>")
    return plain_text("<div>" + "".join(parts) + "</div>")  # its texts may be another user's


def _describe_importance(importance: Importance) -> str:
    """Return the importance of the parameters as text, or why it is unknown."""
    if importance.reason:
        return f"importance of the parameters: unknown, {importance.reason}"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in importance.shares)
    return f"importance of the parameters: {shares} (from {importance.basis})"


def _table(view: StudyView) -> str:
    names = list(dict.fromkeys(name for trial in view.trials for name in trial.params))
    headings = ["trial", "state", f"{view.metric}", *names, "samples", "curve", ""]
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    rows = "".join(_row(view, trial, names) for trial in sort_trials(view)[:MAX_ROWS])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def sort_trials(view: StudyView) -> list[TrialRow]:
    """Return the trials: running and complete ones first, each group by value, best first."""
    sign = -1.0 if view.mode == "max" else 1.0
    order = {"COMPLETE": 0, "RUNNING": 0, "PRUNED": 1, "FAIL": 2}
    return sorted(
        view.trials,
        key=lambda t: (
            order.get(t.state, 3),
            math.isnan(t.value),
            0.0 if math.isnan(t.value) else sign * t.value,
            t.number,
        ),
    )


def _row(view: StudyView, trial: TrialRow, names: Sequence[str]) -> str:
    is_best = view.best is not None and trial.number == view.best.number
    value = "" if math.isnan(trial.value) else f"{trial.value:.6g}"
    cells = [
        str(trial.number),
        word_of(view, trial.state),
        f"{value}\N{NO-BREAK SPACE}(best)" if is_best else value,
        *(_short(trial.params.get(name, "")) for name in names),
        f"{trial.samples:,}",
    ]
    shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    reason = escape(plain_line(trial.reason, max_length=120))
    row = f"{shown}<td>{_curve(view, trial)}</td><td>{reason}</td>"
    return f"<tr>{row}</tr>"


def _curve(view: StudyView, trial: TrialRow) -> str:
    """Return a trial's curve as an image, on the scale of all trials."""
    points = [(x, y) for x, y in trial.curve if math.isfinite(y)]
    if not points:
        return ""
    values = [y for row in view.trials for _, y in row.curve if math.isfinite(y)]
    low, high = min(values), max(values)
    width = max(view.num_samples, max(x for x, _ in points))
    spread = (high - low) or 1.0
    # All curves begin at 0 samples, so that a single evaluation also shows as a line.
    placed = [
        (
            PAD + (WIDTH - 2 * PAD) * x / width,
            HEIGHT - PAD - (HEIGHT - 2 * PAD) * (y - low) / spread,
        )
        for x, y in [(0, points[0][1]), *points]
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">'
        f'<polyline points="{line}" fill="none" stroke="{COLOURS.get(trial.state, "#808080")}" '
        'stroke-width="1.5"/></svg>'
    )
    text = escape(f"{view.metric} from {points[0][1]:.4g} to {points[-1][1]:.4g}")
    # Sanitizers of untrusted notebooks remove <svg>, but keep an image with a data URL.
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{text}" width="{WIDTH}" src="data:image/svg+xml;base64,{data}">'
