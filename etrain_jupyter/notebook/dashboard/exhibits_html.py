"""Render the exhibits of a job as HTML, for front ends without the extension."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from itertools import groupby

from etrain_jupyter.log.exhibits import Cell, Content, Table
from etrain_jupyter.notebook.dashboard.event_text import number
from etrain_jupyter.notebook.dashboard.saved_exhibits import SavedExhibit, SavedExhibits
from etrain_jupyter.untrusted import is_job_id, plain_text

MAX_OPEN_LINES = 30
"""Longer texts and tables are collapsed at first."""


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
        parts.append(_folded(title, _content(one), state))
    for step, group in groupby(older, key=lambda one: one.step):
        parts.append(_evaluation(step, list(group)))
    return "".join([*parts, _left_out(saved, job_id)])


def _evaluation(step: int, exhibits: Sequence[SavedExhibit]) -> str:
    title = f"step {step:,}: {', '.join(one.name for one in exhibits)}"
    return _folded(title, "".join(_content(one) for one in exhibits), "")


def _left_out(saved: SavedExhibits, job_id: str) -> str:
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
    return f"<details{state}><summary>{escape(title)}</summary>{content}</details>"


def _content(exhibit: SavedExhibit) -> str:
    match exhibit.content:
        case bytes() as data:
            alt = escape(f"{exhibit.name} at step {exhibit.step:,}")
            encoded = base64.b64encode(data).decode()
            return f'<p><img alt="{alt}" src="data:image/png;base64,{encoded}"></p>'
        case str() as text:
            return f"<pre><code>{escape(plain_text(text))}</code></pre>"
        case Table() as table:
            heads = "".join(f"<th>{_escaped(name)}</th>" for name in table.columns)
            rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
            return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: Cell) -> str:
    if value is None:
        return "<td></td>"
    return f"<td>{number(value) if isinstance(value, float) else _escaped(str(value))}</td>"


def _escaped(text: str) -> str:
    return escape(plain_text(text))


def _num_lines(content: Content) -> int:
    match content:
        case str():
            return content.count("\n")
        case Table():
            return len(content.rows)
        case _:
            return 0
