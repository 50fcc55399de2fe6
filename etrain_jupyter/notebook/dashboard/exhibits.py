"""Exhibits on the dashboard: their names and steps in the snapshot, and a message per content.

A view requests the content of one exhibit when it displays it::

    view     exhibit (view, name, step) ->
    kernel       <- exhibit (to, name, step, format, error, text or table), a PNG as a buffer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.events import ExhibitStored
from etrain_jupyter.log.exhibits import NAME, Content, Table
from etrain_jupyter.notebook.dashboard.snapshot import ExhibitSeries, to_json
from etrain_jupyter.untrusted import plain_text

ReadExhibit = Callable[[str, int], Content]
"""Returns the content of an exhibit, given its name and step; raises an ``EtrainError``."""

MAX_NAMES = 50
"""Maximum number of names in a snapshot; beyond it, names without recent steps are left out."""
MAX_STEPS = 300
"""Maximum number of steps per name in a snapshot. The coordinator keeps fewer, but a log may come
from another user."""


def series_of(exhibits: Mapping[int, Mapping[str, ExhibitStored]]) -> tuple[ExhibitSeries, ...]:
    """Return the names and steps of a job's exhibits, which are given by step and then by name."""
    steps: dict[str, list[int]] = {}
    for step in sorted(exhibits, reverse=True):
        for name in exhibits[step]:
            if NAME.fullmatch(name) and (name in steps or len(steps) < MAX_NAMES):
                steps.setdefault(name, []).append(step)
    return tuple(
        ExhibitSeries(name=name, steps=tuple(reversed(steps[name][:MAX_STEPS])))
        for name in sorted(steps)
    )


def answer(
    read: ReadExhibit | None, content: Mapping[str, Any]
) -> tuple[dict[str, Any], list[bytes]]:
    """Answer a view's request for an exhibit.

    Returns:
        The message, and its buffers.
    """
    name, step = content.get("name"), content.get("step")
    message: dict[str, Any] = {
        "kind": "exhibit",
        "to": str(content.get("view", "")),
        "name": name,
        "step": step,
        "error": "",
    }
    if read is None or not isinstance(name, str) or not isinstance(step, int):
        return message | {"error": "This exhibit is not available."}, []
    try:
        found = read(name, step)
    except (EtrainError, OSError) as exc:
        return message | {"error": plain_text(str(exc))}, []
    description, buffers = describe_content(found)
    return message | description, buffers


def describe_content(content: Content) -> tuple[dict[str, Any], list[bytes]]:
    """Return the format and the text or table of an exhibit as JSON, and a PNG as a buffer."""
    match content:
        case bytes():
            return {"format": "png"}, [content]
        case str():
            return {"format": "text", "text": plain_text(content)}, []
        case Table():
            rows = [[_cell(value) for value in row] for row in content.rows]
            table = {"columns": [plain_text(name) for name in content.columns], "rows": rows}
            return {"format": "table", "table": table}, []


def _cell(value: Any) -> Any:
    return plain_text(value) if isinstance(value, str) else to_json(value)
