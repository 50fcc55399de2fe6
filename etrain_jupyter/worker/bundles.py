"""Cache of bundles on a worker's machine: one file per bundle, shared by all local processes.

If a supervisor can read the job's folder, its trainers use the file there, and nothing is cached.
Otherwise it fetches the file from the scheduler. Processes that use a file hold a shared lock on
``DIGEST.lock`` next to it; writing or removing the file requires the exclusive lock::

    etrain-bundles-1000/         0700, in Dask's folder for temporary files
    ├── 0f3a....lock             locked by each supervisor that uses the file
    ├── 0f3a....                 0600, complete
    └── 91bc....part             being written
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

from etrain_jupyter.untrusted import is_private_folder, make_private
from etrain_jupyter.wire.messages import BundleRef
from etrain_jupyter.wire.requests import BundlePiece, FetchBundle, RefusedRequestError

LOOK_S = 0.05
"""Interval in seconds at which to check whether another supervisor has fetched the file."""

FETCH_S = 30.0
"""Timeout in seconds for one piece of a bundle."""

PATIENCE_S = 90.0
"""Seconds for which a piece is retried; longer than a scheduler restart takes."""

RETRY_S = 1.0
"""Seconds between attempts to fetch a piece."""

CallScheduler = Callable[[FetchBundle], Awaitable[BundlePiece]]
"""Sends a request to the current scheduler."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class BundleFetchError(Exception):
    """A bundle is unavailable on this machine; the message states the reason and the remedy."""


def folder_of(local_directory: str) -> Path:
    """Return the machine's folder of bundles, next to a worker's own local directory."""
    return Path(local_directory).parent / f"etrain-bundles-{os.getuid()}"


class MachineBundles:
    """Bundles used by one supervisor.

    Args:
        call_scheduler: Fetches a piece; called again after a failure, perhaps by then with another
            scheduler.
    """

    def __init__(self, call_scheduler: CallScheduler) -> None:
        self._call_scheduler = call_scheduler
        self._folder = Path()
        self._locks: dict[str, int] = {}  # open lock files, by digest
        self._getting = asyncio.Lock()  # held while a bundle is fetched or waited for
        # Digest of the bundle being fetched; empty if the bundle was released in the meantime.
        self._coming = ""

    def begin(self, folder: Path) -> None:
        """Set the folder, and remove unused bundles that killed processes have left behind."""
        if folder == self._folder:
            return
        self._folder = folder
        # Users may share Dask's folder. Nothing is removed from a folder that is not ours alone.
        locks = list(folder.glob("*.lock")) if is_private_folder(folder) else []
        for lock in locks:
            with contextlib.suppress(OSError):  # another supervisor has removed it
                _remove_unused(lock, os.open(lock, os.O_RDWR))

    async def get(self, bundle: BundleRef) -> Path:
        """Return the file containing a bundle, and keep it until the bundle is released.

        Args:
            bundle: ``digest``, ``size`` in bytes, and ``path`` in the job's folder.

        Raises:
            BundleFetchError: If the bundle is unavailable.
        """
        shared, digest = Path(bundle.path), bundle.digest
        if _size_of(shared) == bundle.size:
            return shared  # the trainer checks the digest when it opens the file
        if not _DIGEST.fullmatch(digest):  # it becomes a file name
            raise BundleFetchError(f"{digest!r} is not a SHA-256 digest")
        path = self._folder / digest
        async with self._getting:
            if digest not in self._locks:
                self._coming = digest
                self._locks[digest] = await self._get(path, bundle.size)
                if not self._coming:  # ``release`` was called during the await
                    self.release(digest)
                    raise BundleFetchError("its job has ended")
        return path

    def release(self, digest: str) -> None:
        """Release a bundle; the machine's last user removes it."""
        if digest == self._coming:
            self._coming = ""
        descriptor = self._locks.pop(digest, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                _remove_unused(self._folder / f"{digest}.lock", descriptor)

    def release_all(self) -> None:
        """Release all bundles."""
        for digest in [*self._locks, self._coming]:
            self.release(digest)

    async def _get(self, path: Path, size: int) -> int:
        """Wait for the file or fetch it; return the open lock file that protects it."""
        lock = path.with_suffix(".lock")
        while True:
            try:
                make_private(self._folder)
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as exc:
                raise self._not_stored(size, exc) from exc
            try:
                # exclusive lock is free        no user: fetch the file if it is missing, then share
                # only a shared lock is free    in use: share it
                # no lock is free               being fetched or removed: wait and check again
                is_kept = False
                if _is_locked(descriptor, fcntl.LOCK_EX) and _is_file_of(lock, descriptor):
                    if not path.exists():
                        await self._write(path, size)
                    # Downgrading the lock is not atomic. Another supervisor may remove the file in
                    # the meantime, so check again below.
                    is_kept = _is_locked(descriptor, fcntl.LOCK_SH)
                elif _is_locked(descriptor, fcntl.LOCK_SH):
                    is_kept = True
                is_kept = is_kept and path.exists() and _is_file_of(lock, descriptor)
                if is_kept:
                    return descriptor
            except BaseException:  # including cancellation: leave no unused files
                _remove_unused(lock, descriptor)
                raise
            os.close(descriptor)
            await asyncio.sleep(LOOK_S)

    async def _write(self, path: Path, size: int) -> None:
        draft, digest = path.with_suffix(".part"), hashlib.sha256()

        def put(file: BinaryIO, data: bytes) -> None:
            digest.update(data)
            file.write(data)

        try:
            draft.unlink(missing_ok=True)  # a killed supervisor may have left a partial file
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
                offset = 0
                while offset < size and (data := await self._fetch(path.name, offset)):
                    # Run this in a thread, so that a slow disk does not delay the heartbeats.
                    await asyncio.to_thread(put, file, data)
                    offset += len(data)
            if digest.hexdigest() != path.name:
                raise BundleFetchError(
                    f"bundle {path.name[:12]} does not match its digest: "
                    f"received {offset} of {size} bytes"
                )
            draft.replace(path)
        except OSError as exc:
            raise self._not_stored(size, exc) from exc
        finally:
            draft.unlink(missing_ok=True)

    async def _fetch(self, digest: str, offset: int) -> bytes:
        """Return the next piece of a bundle. Retry while the scheduler is restarting."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                request = FetchBundle(digest=digest, offset=offset)
                return (await asyncio.wait_for(self._call_scheduler(request), FETCH_S)).data
            except RefusedRequestError as exc:  # the same request would be refused again
                raise BundleFetchError(str(exc)) from exc
            except OSError as exc:
                if time.monotonic() >= deadline:
                    raise BundleFetchError(
                        f"the scheduler did not send the job's bundle within {PATIENCE_S:.0f} s "
                        f"({type(exc).__name__}: {exc})"
                    ) from exc
            await asyncio.sleep(RETRY_S)

    def _not_stored(self, size: int, exc: OSError) -> BundleFetchError:
        return BundleFetchError(
            f"the job's bundle ({size / 2**20:.0f} MB) cannot be stored in {self._folder}: "
            f"{exc.strerror or exc}. Free space there, start the workers with another "
            "--local-directory, or pass a function that loads the data on the workers"
        )


def _remove_unused(lock: Path, descriptor: int) -> None:
    try:
        if _is_locked(descriptor, fcntl.LOCK_EX) and _is_file_of(lock, descriptor):
            # Remove the lock file last. While it exists, no other supervisor can create the files.
            for name in (lock.with_suffix(""), lock.with_suffix(".part"), lock):
                name.unlink(missing_ok=True)
    finally:
        os.close(descriptor)  # which releases the lock


def _is_locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file_of(path: Path, descriptor: int) -> bool:
    # A lock on a file removed by another supervisor protects nothing:
    #
    #   A: open lock       ............ flock: succeeds, but on the removed file
    #   B:           flock, unlink, close
    #   C:                              creates another lock file under the same name
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
