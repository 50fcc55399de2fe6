"""Atomic file writes, and scratch files."""

from __future__ import annotations

import atexit
import errno
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PosixPath

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints.manifest import BLOCK_BYTES, Part

_CHUNK_BYTES = 4 << 20
_SCRATCH, _LOCK = "etrain-checkpoint-", "lock"
_SCRATCH_AGE_S = 60.0
"""A scratch folder younger than this may not be locked yet."""
# Errors from link() on file systems such as FAT, some FUSE mounts and some network shares.
_HAS_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def write_new(
    path: Path,
    data: bytes | memoryview | Path,
    progress: Callable[[int], None] = lambda num_bytes: None,
    *,
    key: str = "",
    block_bytes: int = BLOCK_BYTES,
) -> Part:
    """Write a new file durably; return its entry for a manifest.

    Args:
        path: Path of the new file.
        data: The bytes, or a file to copy.
        progress: Called with the size of each piece.
        key: Key of the part that the file contains.
        block_bytes: Size of the blocks, each with its own digest; at most 4 MiB, or a multiple.
    """
    digest, size = hashlib.sha256(), 0
    blocks = []
    with path.open("xb") as file:
        for chunk in _chunks_of(data, min(_CHUNK_BYTES, block_bytes)):
            file.write(chunk)
            digest.update(chunk)
            if size % block_bytes == 0:
                blocks.append(hashlib.sha256())
            blocks[-1].update(chunk)
            size += len(chunk)
            progress(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    part = Part(key=key, sha256=digest.hexdigest(), size=size)
    if len(blocks) <= 1:
        return part
    digests = tuple(block.hexdigest() for block in blocks)
    return replace(part, block_bytes=block_bytes, blocks=digests)


def _chunks_of(data: bytes | memoryview | Path, size: int) -> Iterator[bytes | memoryview]:
    if isinstance(data, Path):
        with data.open("rb") as file:
            while chunk := file.read(size):
                yield chunk
    else:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), size):
            yield view[start : start + size]


def link_if_absent(source: Path, target: Path) -> bool:
    """Give a file a second name; return False if that name exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno not in _HAS_NO_LINKS:
            raise
        # Exclusive creation still lets only one of several writers succeed. A crash may leave a
        # truncated copy, which readers detect: the manifest contains its own digest.
        try:
            write_new(target, source)
        except FileExistsError:
            return False
    return True


@contextmanager
def removed_at_end(path: Path) -> Iterator[None]:
    """Remove a temporary file at the end of the block, unless it was renamed."""
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make names durable; otherwise a power failure may lose a file even though it was synced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ScratchFile(PosixPath):
    """The path of a temporary file, from ``new_scratch_file``.

    The file is deleted when this object is garbage-collected. Paths derived from it do not delete
    the file.
    """


def new_scratch_file() -> ScratchFile:
    """Return an unused path in this process's scratch folder.

    Its file is deleted when the returned object is garbage-collected.

    The folder is deleted when the process exits. If a process is killed, its folder remains until
    the next process that needs such a folder finds it unlocked and deletes it.

    Raises:
        CheckpointError: If the folder cannot be created.
    """
    try:
        path = ScratchFile(_scratch_of(os.getpid()) / secrets.token_hex(8))
    except OSError as exc:
        raise CheckpointError(
            f"no folder for copies of checkpoints can be created in {tempfile.gettempdir()}: "
            f"{exc.strerror}. Free space there, or set TMPDIR"
        ) from exc
    # Pass a string, because a reference to the path itself would keep it alive forever. Do not
    # register it in __init__, which from Python 3.12 on also runs for each path derived from this
    # one.
    weakref.finalize(path, _unlink, os.fspath(path))
    return path


# A scratch folder is in use while its lock is held:
#
#   mkdtemp    open(lock)    flock      the process runs      exit: rmtree
#   |--- no lock yet, but -----|----- locked: others skip ---|
#   |    younger than 60 s     |                              killed: the kernel releases the lock,
#                                                             and the next process deletes it
#
# The cache is keyed by process ID, so that a forked child creates its own folder.
@functools.cache
def _scratch_of(_pid: int) -> Path:
    remove_unlocked_scratch()
    path = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    atexit.register(_remove_scratch, path, lock)
    return path


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def _remove_scratch(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def remove_unlocked_scratch(*, age_s: float = _SCRATCH_AGE_S) -> None:
    """Delete the scratch folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        try:
            if time.time() - path.stat().st_mtime < age_s:
                continue
            lock = os.open(path / _LOCK, os.O_RDWR)
        except OSError:
            continue  # gone, or belongs to another user
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)  # its process is running
        else:
            _remove_scratch(path, lock)
