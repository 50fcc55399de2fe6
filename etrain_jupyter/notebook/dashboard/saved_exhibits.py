"""Exhibits on the dashboard: in the snapshot, in messages, and in the saved output.

The snapshot has their names and steps. A view requests the content of one exhibit when it displays
it::

    view     exhibit (view, name, step) ->
    kernel       <- exhibit (to, name, step, format, error, text or table), a PNG as a buffer

The saved output has the newest exhibits, within a limit. A notebook stores them twice: as HTML for
front ends without the extension, and as JSON for the extension, which displays them with a slider
while no kernel is attached to the job.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.events import ExhibitStored
from etrain_jupyter.log.exhibits import NAME, Content, Table
from etrain_jupyter.notebook.dashboard.snapshot import ExhibitSeries, to_json
from etrain_jupyter.untrusted import plain_text

MAX_BYTES = 300_000
"""Maximum size of the exhibits in the saved output of a job that has ended. Base64 adds a third,
and the notebook stores them twice."""
MAX_BYTES_RUNNING = 100_000
"""Maximum size while the job runs, because every update of the saved output contains them."""
MAX_EXHIBITS = 50
"""Maximum number of exhibits in the saved output; the front end keeps as many."""
MAX_READ_S = 5.0
"""Seconds after which no further exhibit is read. The next update reads the rest."""
ReadExhibit = Callable[[str, int], Content]
"""Returns the content of an exhibit, given its name and step; raises an ``EtrainError``."""

MAX_NAMES = 50
"""Maximum number of names in a snapshot; beyond it, names without recent steps are left out."""
MAX_STEPS = 300
"""Maximum number of steps per name in a snapshot. The coordinator keeps fewer, but a log may come
from another user."""


@dataclass(frozen=True, kw_only=True)
class SavedExhibit:
    """An exhibit in the saved output."""

    name: str
    step: int
    content: Content

    def to_json(self) -> dict[str, Any]:
        """Return the exhibit as the notebook stores it; a PNG is encoded as base64."""
        description, buffers = describe_content(self.content)
        data = {"data": base64.b64encode(buffers[0]).decode()} if buffers else {}
        return {"name": self.name, "step": self.step, **description, **data}


@dataclass(frozen=True, kw_only=True)
class SavedExhibits:
    """The exhibits in the saved output."""

    exhibits: tuple[SavedExhibit, ...] = ()
    """The newest of each name, then the others, newest first."""
    total: int = 0
    """Number of exhibits that the job has."""


def choose_saved(
    stored: Mapping[int, Mapping[str, ExhibitStored]], *, max_bytes: int = MAX_BYTES
) -> list[ExhibitStored]:
    """Choose the exhibits for the saved output: the newest of each name first, then older ones.

    One that is too large is skipped, so that it does not displace all others.
    """
    newest: dict[str, ExhibitStored] = {}
    older = []
    for step in sorted(stored, reverse=True):
        for name, event in sorted(stored[step].items()):
            if not NAME.fullmatch(name):
                continue
            if name in newest:
                older.append(event)
            else:
                newest[name] = event
    chosen: list[ExhibitStored] = []
    left = max_bytes
    for event in [*newest.values(), *older]:
        if len(chosen) < MAX_EXHIBITS and 0 <= event.size_bytes <= left:
            chosen.append(event)
            left -= event.size_bytes
    return chosen


class ExhibitCache:
    """Contents of the exhibits in the saved output. Thread-safe."""

    def __init__(self, read: ReadExhibit | None) -> None:
        self._read = read
        self._reading = threading.Lock()
        # The key has the digest, too, because a job may evaluate a step again after a rewind.
        self._contents: dict[tuple[int, str, str], Content] = {}

    def is_complete(self, chosen: Sequence[ExhibitStored]) -> bool:
        """Return True if there is nothing to read."""
        contents = self._contents
        return self._read is None or all(_key(event) in contents for event in chosen)

    def load(self, chosen: Sequence[ExhibitStored]) -> bool:
        """Read the missing contents, and drop those of other exhibits.

        Exhibits that cannot be read are left out; the next call retries them.

        Returns:
            True if a content was read.
        """
        read = self._read
        if read is None:
            return False
        with self._reading:
            kept = {
                _key(event): self._contents[_key(event)]
                for event in chosen
                if _key(event) in self._contents
            }
            num_kept, ends_at = len(kept), time.monotonic() + MAX_READ_S
            for event in chosen:
                if _key(event) in kept:
                    continue
                if time.monotonic() > ends_at:
                    break
                try:
                    kept[_key(event)] = read(event.name, event.step)
                except (EtrainError, OSError):
                    continue
            # Replace the dict, because other threads read it without the lock.
            self._contents = kept
            return len(kept) > num_kept

    def select(self, chosen: Sequence[ExhibitStored]) -> tuple[SavedExhibit, ...]:
        """Return the exhibits that have been read, without waiting."""
        contents = self._contents
        return tuple(
            SavedExhibit(name=event.name, step=event.step, content=contents[_key(event)])
            for event in chosen
            if _key(event) in contents
        )


def _key(event: ExhibitStored) -> tuple[int, str, str]:
    return event.step, event.name, event.digest


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


def answer_request(
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
            rows = [
                [plain_text(cell) if isinstance(cell, str) else to_json(cell) for cell in row]
                for row in content.rows
            ]
            table = {"columns": [plain_text(name) for name in content.columns], "rows": rows}
            return {"format": "table", "table": table}, []
