"""Exhibits of a job: the figures, texts and tables that ``eval.score`` returned.

The log and the files may come from another user. A name becomes a path only after a check, and a
file is returned only if it has the size and digest in the log and passes the checks of its format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.errors import RunStoreError
from etrain_jupyter.log.events import ExhibitFormat, ExhibitStored
from etrain_jupyter.log.exhibits import (
    MAX_BYTES,
    Content,
    InvalidExhibitError,
    Table,
    exhibit_key,
    is_as_logged,
    parse_exhibit,
    read_exhibit,
)
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.storage.bucket_log.objects import RunObjects


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A figure, text or table that ``eval.score`` returned for one evaluation.

    As the last expression of a cell, a figure is displayed.
    """

    step: int
    """Step of the weights that were evaluated."""
    name: str
    format: ExhibitFormat
    """``png``, ``text`` or ``table``."""
    size_bytes: int
    time: float
    """When it was stored, in seconds since the epoch."""
    read: Callable[[], Content] = field(repr=False, compare=False)
    """Returns the checked content; see ``load``."""

    def load(self) -> bytes | str | list[dict[str, Any]]:
        """Return the content: the bytes of a PNG, the text, or the rows of the table as dicts.

        Raises:
            RunStoreError: If the file is missing or invalid, or the bucket cannot be read.
        """
        content = self.read()
        if isinstance(content, Table):
            return [dict(zip(content.columns, row, strict=True)) for row in content.rows]
        return content

    def _repr_png_(self) -> bytes | None:
        content = self.read() if self.format == "png" else None
        return content if isinstance(content, bytes) else None


def exhibits_of(record: RunRecord, stored: Iterable[ExhibitStored]) -> list[Exhibit]:
    """Return the exhibits that events of a job describe, by step and then by name.

    Events with an invalid name, step or format are skipped.
    """
    found = []
    for event in sorted(stored, key=lambda event: (event.step, event.name)):
        try:
            key = exhibit_key(step=event.step, name=event.name, format=event.format)
        except InvalidExhibitError:
            continue
        found.append(
            Exhibit(
                step=event.step,
                name=event.name,
                format=event.format,
                size_bytes=event.size_bytes,
                time=event.time,
                read=functools.partial(_read, record, event, key),
            )
        )
    return found


def _read(record: RunRecord, event: ExhibitStored, key: str) -> Content:
    what = f"{key} of job {record.job_id}"
    data = None
    try:
        data = read_exhibit(record.folder, key)
    except FileNotFoundError:
        pass
    except OSError as exc:
        raise RunStoreError(
            f"{what} cannot be read: {exc.strerror or exc} ({record.folder})"
        ) from exc
    # This machine's copy of a job in a bucket may be missing or outdated.
    if record.place and (data is None or not is_as_logged(data, event)):
        data = RunObjects(record.place).get(key, most_bytes=MAX_BYTES + 1)
    if data is None:
        later = " It may not be uploaded yet: try again in a few seconds." if record.place else ""
        raise RunStoreError(f"{what} does not exist in {record.where}.{later}")
    if not is_as_logged(data, event):
        raise RunStoreError(
            f"{what} differs from the log: it has {len(data):,} bytes, and {event.size_bytes:,} "
            "bytes with another SHA-256 were stored. It is not displayed, because it was truncated "
            "or replaced after the evaluation."
        )
    try:
        return parse_exhibit(event.format, data)
    except InvalidExhibitError as exc:
        raise RunStoreError(f"{what} {exc}. It is not displayed.") from exc
