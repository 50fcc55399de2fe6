"""Exhibits of a job: formats, limits and keys of the figures, texts and tables of ``eval.score``.

Each exhibit is one file in the run folder, or one object with the same key in a bucket::

    exhibits/step_00000120/confusion.png    a picture
                           report.txt       text in UTF-8
                           worst.json       a table: {"columns": [...], "rows": [[...], ...]}

The trainer that scored, the coordinator that writes the file, and the kernel that displays it all
check an exhibit with ``parse_exhibit``, because none of them trusts the previous one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etrain_jupyter.log.events import ExhibitFormat, ExhibitStored
from etrain_jupyter.process.files import draft_of
from etrain_jupyter.untrusted import read_regular

FOLDER = "exhibits"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Pattern of an exhibit's name, which is also its file name without the suffix."""
MAX_BYTES = 1_000_000
"""Maximum size of one exhibit."""
MAX_CHARACTERS = 20_000
"""Maximum length of a text."""
MAX_ROWS, MAX_COLUMNS = 200, 20
MAX_PIXELS = 16_000_000
"""Maximum number of pixels in a picture, because a small PNG may decode to gigabytes."""
MAX_PER_EVALUATION = 16
MAX_EVALUATION_BYTES = 4_000_000
"""Maximum size of all exhibits of one evaluation."""

_SUFFIXES: dict[ExhibitFormat, str] = {"png": "png", "text": "txt", "table": "json"}
_KEY = re.compile(rf"{FOLDER}/step_[0-9]{{8,15}}/{NAME.pattern}\.(png|txt|json)")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER = struct.Struct(">I4sII")  # length and type of the first chunk, width, height

Cell = str | int | float | bool | None


class InvalidExhibitError(ValueError):
    """An exhibit is malformed or exceeds a limit. The message continues a sentence about it."""


@dataclass(frozen=True)
class Table:
    """A table of scalar cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """Each row has one cell per column; None for a missing value."""


Content = bytes | str | Table
"""An exhibit that was checked: the bytes of a PNG, a text or a table."""


def check_name(name: str) -> str:
    """Return a name unchanged. Call it before the name becomes part of a path or key.

    Raises:
        InvalidExhibitError: If it is not a valid name.
    """
    if not NAME.fullmatch(name):
        raise InvalidExhibitError(
            "has an invalid name. Use at most 64 letters, digits, '_' and '-', beginning with a "
            "letter or digit"
        )
    return name


def parse_exhibit(format: ExhibitFormat, data: bytes) -> Content:
    """Check the bytes of an exhibit, and return its content.

    Raises:
        InvalidExhibitError: If they do not match the format, or exceed a limit.
    """
    if len(data) > MAX_BYTES:
        raise InvalidExhibitError(f"has {len(data):,} bytes; the limit is {MAX_BYTES:,}")
    if format == "png":
        return _checked_png(data)
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        raise InvalidExhibitError("is not valid UTF-8") from exc
    return _checked_text(text) if format == "text" else _checked_table(text)


def encode_table(table: Table) -> bytes:
    """Return the bytes of a table; ``parse_exhibit`` checks them."""
    return json.dumps({"columns": table.columns, "rows": table.rows}).encode()


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of an exhibit's bytes, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def is_as_logged(data: bytes, event: ExhibitStored) -> bool:
    """Return True if these are the bytes that an event of the log describes."""
    return len(data) == event.size_bytes and digest_of(data) == event.digest


def size_of_png(data: bytes) -> tuple[int, int]:
    """Return the width and height in pixels of a PNG that ``parse_exhibit`` has checked."""
    _, _, width, height = _PNG_HEADER.unpack_from(data, len(_PNG_SIGNATURE))
    return width, height


def _checked_png(data: bytes) -> bytes:
    if not data.startswith(_PNG_SIGNATURE) or len(data) < len(_PNG_SIGNATURE) + _PNG_HEADER.size:
        raise InvalidExhibitError("is not a PNG")
    length, chunk, width, height = _PNG_HEADER.unpack_from(data, len(_PNG_SIGNATURE))
    if chunk != b"IHDR" or length != 13 or not width or not height:
        raise InvalidExhibitError("is not a valid PNG")
    if width * height > MAX_PIXELS:
        raise InvalidExhibitError(
            f"has {width:,} x {height:,} pixels; the limit is {MAX_PIXELS:,} in total"
        )
    return data


def _checked_text(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise InvalidExhibitError(f"has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}")
    return text


def _checked_table(text: str) -> Table:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidExhibitError("is not JSON") from exc
    columns = values.get("columns") if isinstance(values, dict) else None
    rows = values.get("rows") if isinstance(values, dict) else None
    if not isinstance(columns, list) or not isinstance(rows, list):
        raise InvalidExhibitError("is not a table")
    check_table_size(len(rows), len(columns))
    if not all(isinstance(column, str) for column in columns):
        raise InvalidExhibitError("has a column whose name is not text")
    for row in rows:
        if not isinstance(row, list) or len(row) != len(columns) or not all(map(_is_cell, row)):
            raise InvalidExhibitError("has a row that does not consist of one scalar per column")
    return Table(tuple(columns), tuple(map(tuple, rows)))


def check_table_size(num_rows: int, num_columns: int) -> None:
    """Check the size of a table.

    Raises:
        InvalidExhibitError: If it exceeds the limit, or has no column.
    """
    if not num_columns:
        raise InvalidExhibitError("has no columns")
    if num_rows > MAX_ROWS or num_columns > MAX_COLUMNS:
        raise InvalidExhibitError(
            f"has {num_rows:,} rows and {num_columns:,} columns; the limit is {MAX_ROWS} rows and "
            f"{MAX_COLUMNS} columns"
        )


def _is_cell(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


# --- keys ---


def exhibit_key(*, step: int, name: str, format: ExhibitFormat) -> str:
    """Return the path of an exhibit, relative to the run folder or the job's URL.

    Raises:
        InvalidExhibitError: If no valid key can be formed from the values, which may come from the
            log of another user.
    """
    suffix = _SUFFIXES.get(format)
    if suffix is None or not 0 <= step < 10**15:
        raise InvalidExhibitError("has an invalid format or step")
    return f"{FOLDER}/step_{step:08d}/{check_name(name)}.{suffix}"


def is_exhibit_key(key: str) -> bool:
    """Return True if this is a key that ``exhibit_key`` could return."""
    return _KEY.fullmatch(key) is not None


def write_exhibit(run_dir: Path, key: str, data: bytes) -> None:
    """Create or replace the file of an exhibit, atomically.

    Raises:
        OSError: If the disk rejects it, or a folder in its path is a symbolic link.
    """
    path = _path_of(run_dir, key)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Not synced, because a sync would block the coordinator. The log has the digest, so a reader
    # notices a file that a machine crash has truncated.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with draft_of(path) as draft, os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
        file.write(data)


def read_exhibit(run_dir: Path, key: str) -> bytes:
    """Return the bytes of an exhibit's file, which the caller checks.

    Raises:
        OSError: If it is missing, too large or not a regular file, or if a folder in its path is a
            symbolic link.
    """
    return read_regular(_path_of(run_dir, key), most_bytes=MAX_BYTES)


def load_stored(run_dir: Path, event: ExhibitStored) -> Content | None:
    """Return the content of the exhibit that an event describes.

    Returns:
        The checked content. None if the file is missing or invalid, or differs from the event, for
        example because the exhibit was removed or replaced after the event.
    """
    try:
        key = exhibit_key(step=event.step, name=event.name, format=event.format)
        data = read_exhibit(run_dir, key)
        return parse_exhibit(event.format, data) if is_as_logged(data, event) else None
    except (OSError, InvalidExhibitError):
        return None


def remove_exhibits(run_dir: Path, keys: Iterable[str]) -> None:
    """Remove files of exhibits, and the folders that this empties. The files need not exist."""
    for key in keys:
        with contextlib.suppress(OSError):
            path = _path_of(run_dir, key)
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def _path_of(run_dir: Path, key: str) -> Path:
    if not is_exhibit_key(key):
        raise ValueError(f"{ascii(key)[:100]} is not the key of an exhibit")
    # Other users may be able to write to the run folder. A link could make this process read,
    # replace or remove files elsewhere.
    path = run_dir / key
    for folder in (path.parent.parent, path.parent):
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(folder))
    return path
