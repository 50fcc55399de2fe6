"""Distinguish jobs that this user submitted from those that another user put into the run store.

Resuming a job runs its bundle, so the record must be this user's own. A run store may be shared,
and anyone with write access can forge a ``job.json``. Each record that this user's kernels write is
therefore signed with a key in the user's state directory, which other users cannot read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etrain_jupyter.storage.bucket_log.locations import private_root

RECORD_FORMAT = 2
"""Format of ``job.json`` and ``study.json``; etrain-jupyter 0.1 wrote none."""
KEY_FILE = "signing.key"
KEY_BYTES = 32
SIGNED = ("job_id", "pool", "config", "bundle_digest", "cwd")
"""The fields that determine which code a resume runs, and where. The digest covers the bundle."""


def sign(values: Mapping[str, Any]) -> str:
    """Return the signature of a job's record; empty if this user cannot store a key.

    A job without a signature can still be resumed with ``--trust``.
    """
    key = _read_key() or _make_key()
    return _signature(values, key) if key else ""


def is_signed(values: Mapping[str, Any], signature: str) -> bool:
    """Return True if this user signed the record in its current form."""
    key = _read_key()
    # `compare_digest` raises a TypeError for a non-ASCII string, which a forged record may contain.
    if key is None or not signature.isascii():
        return False
    return hmac.compare_digest(_signature(values, key), signature)


def _signature(values: Mapping[str, Any], key: bytes) -> str:
    signed = json.dumps([values[name] for name in SIGNED], sort_keys=True).encode()
    return hmac.new(key, b"etrain job.json\n" + signed, hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    """Return the key; None if it is missing or if others can read it."""
    with contextlib.suppress(OSError):
        # Another user may have planted a link, a pipe or a readable file, so open without following
        # links or blocking, and check the opened file rather than its path.
        handle = os.open(_key_path(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
            if stat.S_ISREG(status.st_mode) and is_private:
                key = file.read(KEY_BYTES + 1)
                return key if len(key) == KEY_BYTES else None
    return None


def _make_key() -> bytes | None:
    """Create the key; if another process has created it first, return that key."""
    # Two kernels may do this at once. Both must end up with the same key, or one of them signs
    # records that later kernels reject:
    #   A: write hidden A               link -> key A exists            read key A
    #   B:          write hidden B            link fails, key exists    read key A
    path = _key_path()
    hidden = path.with_name(f".{KEY_FILE}.{secrets.token_hex(4)}")
    # Ignore the error, because with a read-only home folder, jobs stay unsigned and can only be
    # resumed with --trust.
    with contextlib.suppress(OSError):
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with os.fdopen(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
                f.write(secrets.token_bytes(KEY_BYTES))
                f.flush()
                os.fsync(f.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(hidden, path)
        finally:
            hidden.unlink(missing_ok=True)
    return _read_key()


def _key_path() -> Path:
    return private_root() / KEY_FILE
