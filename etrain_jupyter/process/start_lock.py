"""Lock that serializes the start and shutdown of one Python environment's clusters."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path


def lock_key_of(prefix: str) -> str:
    """Return the key of a pool's start lock, given the prefix of its cluster ids."""
    return prefix.removeprefix("local-")


@contextlib.contextmanager
def start_lock(root: Path, key: str, *, timeout_s: float) -> Iterator[int]:
    """Hold the start lock.

    The lock belongs to the open file description, so a child that inherits the descriptor also
    holds it. If a launcher is killed, no other launcher can start a second head while the first is
    starting::

        launcher    lock ── starts keeper ──────── (killed)
        keeper                └─ starts scheduler, closes its descriptor
        scheduler                  └─────────────────── listens, publishes, closes: unlocked

    Args:
        root: The state directory.
        key: The key from ``lock_key_of``.
        timeout_s: Seconds to wait for the current holder.

    Yields:
        The file descriptor.

    Raises:
        TimeoutError: If another process still holds the lock after ``timeout_s``.
    """
    path = root / f"start-{key}.lock"
    deadline = time.monotonic() + timeout_s
    while (fd := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path} is held by another process")
        time.sleep(0.02)
    try:
        yield fd
    finally:
        os.close(fd)


def remove_start_lock(root: Path, key: str) -> None:
    """Delete the lock file. Only the holder may call this."""
    (root / f"start-{key}.lock").unlink(missing_ok=True)


def _try_lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have deleted the file between our open and our lock. Other
        # processes then lock a new file with the same name, so our lock has no effect:
        #
        #     holder   locked ────────────── unlinks, closes
        #     this       opens the file ───────────────────── locks the deleted file: retry
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    os.close(fd)
    return None
