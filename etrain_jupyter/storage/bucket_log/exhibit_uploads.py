"""Upload the exhibits that a log names, and delete those that it removes, in order."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from etrain_jupyter.log.events import ExhibitsRemoved, ExhibitStored, event_from_dict
from etrain_jupyter.log.exhibit_files import read_exhibit
from etrain_jupyter.log.exhibits import InvalidExhibitError, exhibit_key, is_exhibit_key
from etrain_jupyter.storage.bucket_log.objects import RunObjects

_EVENTS = tuple(f'{{"event":"{kind}"'.encode() for kind in ("ExhibitStored", "ExhibitsRemoved"))


class ExhibitUploads:
    """Copy the files of a run folder that uploaded events name. Not thread-safe.

    Files are uploaded after the events that name them, because other machines wait for the events,
    and a bucket that rejects an exhibit must not stop the log. Files that are not uploaded when
    this process dies stay on this machine.

    Args:
        objects: The job in the bucket.
        run_dir: This machine's run folder.
    """

    def __init__(self, objects: RunObjects, run_dir: Path) -> None:
        self._objects, self._run_dir = objects, run_dir
        self._due: deque[tuple[str, str]] = deque()
        """``put`` or ``delete``, and the key, in the order of the log."""

    def note_lines(self, lines: Iterable[bytes]) -> None:
        """Note the files that lines of the log name."""
        for line in lines:
            if not line.startswith(_EVENTS):
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError, InvalidExhibitError):
                self._note(event_from_dict(json.loads(line)))

    def _note(self, event: Any) -> None:
        if isinstance(event, ExhibitStored):
            key = exhibit_key(step=event.step, name=event.name, format=event.format)
            self._due.append(("put", key))
        elif isinstance(event, ExhibitsRemoved):
            self._due.extend(("delete", key) for key in event.files if is_exhibit_key(key))

    def upload(self) -> None:
        """Upload and delete the files that are due.

        Raises:
            RunStoreError: If the bucket rejects one; the next call retries it.
        """
        while self._due:
            action, key = self._due[0]
            if action == "delete":
                self._objects.delete(key)
            # A file that has been removed since needs no upload.
            elif (data := self._read(key)) is not None:
                self._objects.put(key, data)
            self._due.popleft()

    def _read(self, key: str) -> bytes | None:
        try:
            return read_exhibit(self._run_dir, key)
        except OSError:
            return None
