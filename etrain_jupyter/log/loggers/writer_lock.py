"""Lock that prevents two processes from writing the same job to the same logger."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_S = 0.1
"""Interval in seconds between two attempts to lock."""
_OTHER_CHARACTERS = re.compile(r"[^\w.-]")


@contextlib.contextmanager
def writer_lock(log_path: Path, name: str, is_wanted: Callable[[], bool]) -> Iterator[bool]:
    """Hold the lock of a logger, which prevents values from being written twice.

    Two processes overlap where a job changes hands::

        scheduler's logger   follows the job ──── lingers after its end ── unlocks
        %etrain track                             waits ────────────────── locks, writes the rest

    Args:
        log_path: The log. The lock file is created next to it.
        name: Name of the logger.
        is_wanted: Returns False to end the wait for the current holder.

    Yields:
        False if the wait ended before the lock was free.
    """
    path = log_path.with_name(f".logger-{_OTHER_CHARACTERS.sub('_', name)}.lock")
    try:
        # Another user may own the folder: no link is followed.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        # Another user's read-only folder: no scheduler of this user writes that job.
        yield True
        return
    try:
        yield _lock(fd, is_wanted)
    finally:
        os.close(fd)


def _lock(fd: int, is_wanted: Callable[[], bool]) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not is_wanted():
                return False
            time.sleep(POLL_S)
