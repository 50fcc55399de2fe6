"""Files of a job's exhibits, in the run folder next to the log whose events describe them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from etrain_jupyter.log.events import ExhibitStored
from etrain_jupyter.log.exhibits import (
    MAX_BYTES,
    Content,
    InvalidExhibitError,
    exhibit_key,
    is_as_logged,
    is_exhibit_key,
    parse_exhibit,
)
from etrain_jupyter.untrusted import read_regular


def write_exhibit(run_dir: Path, key: str, data: bytes) -> None:
    """Create or replace the file of an exhibit, atomically.

    Raises:
        OSError: If the disk rejects it, or a folder in its path is a symbolic link.
    """
    path = _path_of(run_dir, key)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # Not synced, because a sync would block the coordinator: the log has the digest, so a reader
    # notices a file that a machine crash has truncated.
    try:
        with os.fdopen(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


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
    """Remove files of exhibits, and the folders that this empties. They need not exist."""
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
