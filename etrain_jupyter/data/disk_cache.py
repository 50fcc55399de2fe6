"""Cache of remote blocks on this machine's disk, shared by its ranks.

::

    <folder>/<digest of source, file, version, range>.block    the bytes, then their SHA-256
    <folder>/lock-3f                                            held while a block is fetched
    <folder>/lock                                               held while blocks are removed

An entry is written under a temporary name and renamed, so a reader finds all of it or none. Of two
ranks that need the same block, one fetches it, and the other one waits for the lock and reads the
file. The locks are ``flock`` locks, which end with their process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from etrain_jupyter.untrusted import make_private

_DIGEST_BYTES = 32
_SUFFIX = ".block"
_FREE_SHARE = 0.1
"""Share of the limit that a removal frees, so that not every new block removes another one."""


def default_folder() -> Path:
    """Return this user's cache folder on this machine."""
    return Path(tempfile.gettempdir()) / f"etrain-shards-{os.getuid()}"


class DiskCache:
    """Blocks in a folder, up to a total size; the least recently used ones are removed first.

    Safe to use from several processes and threads. A cache that cannot be used, because its disk is
    full or not writable, is bypassed: every block is then fetched from its source.

    Args:
        folder: The folder; created if necessary.
        max_bytes: Maximum size of all entries. 0 disables the cache.
        warn: Called once with a message if the cache cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._warn = warn
        self._lock = threading.Lock()
        self._has_warned = False
        self._num_added_bytes = max_bytes  # the first new entry measures the folder
        self._is_usable = max_bytes > 0
        if self._is_usable:
            try:
                make_private(folder)
            except OSError as exc:
                self._is_usable = False
                self._report(exc)

    def get(self, key: str, size: int, fetch: Callable[[], bytes]) -> bytes:
        """Return the ``size`` bytes under a key; fetch them if they are not cached.

        The key identifies the bytes, including the version of their source.
        """
        if not self._is_usable or size + _DIGEST_BYTES > self._max_bytes:
            return fetch()
        name = hashlib.sha256(key.encode()).hexdigest()
        path = self._folder / f"{name}{_SUFFIX}"
        try:
            # One of 256 locks, by the first two digits: unrelated blocks seldom share one.
            with self._locked(f"lock-{name[:2]}"):
                found = self._read(path, size)
                if found is not None:
                    return found
                data = fetch()
                try:
                    self._write(path, data)
                except OSError as exc:
                    self._report(exc)
                return data
        except OSError as exc:
            # The error is from a lock file: ``fetch`` raises ShardError.
            self._report(exc)
            return fetch()

    def _read(self, path: Path, size: int) -> bytes | None:
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        data, digest = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
        if len(data) != size or hashlib.sha256(data).digest() != digest:
            path.unlink(missing_ok=True)  # corrupted on this disk; fetch it again
            return None
        with suppress(OSError):  # another process has removed it meanwhile
            os.utime(path)  # the time of its last use
        return data

    def _write(self, path: Path, data: bytes) -> None:
        self._make_room(len(data) + _DIGEST_BYTES)
        partial = path.with_name(f"{uuid.uuid4().hex}.partial")
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.write(hashlib.sha256(data).digest())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        # Measuring a folder with many entries takes time, so it happens only after this process
        # has added a tenth of the limit. Up to that much per process may exceed the limit, so the
        # removal keeps that much free.
        with self._lock:
            self._num_added_bytes += num_bytes
            if self._num_added_bytes < self._max_bytes * _FREE_SHARE:
                return
            self._num_added_bytes = num_bytes
        with self._locked("lock"):
            self._remove_oldest(int(self._max_bytes * (1 - _FREE_SHARE)) - num_bytes)

    def _remove_oldest(self, max_bytes: int) -> None:
        entries = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(_SUFFIX):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                entries.append((status.st_mtime_ns, status.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= max_bytes:
                return
            Path(path).unlink(missing_ok=True)
            total -= size

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        file = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _report(self, exc: OSError) -> None:
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        reason = "is full" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else f"failed ({exc})"
        self._warn(
            f"the shard cache {self._folder} {reason}; blocks that do not fit are read from their "
            "source each time they are needed. Free some space, or give Shards another cache_dir "
            "or smaller cache_bytes."
        )
