"""Writing files that are whole or not there, whatever cuts the writer short."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK_BYTES = 4 << 20
_HAS_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def write_new(path: Path, data: bytes | memoryview | Path) -> tuple[int, str]:
    """Write a new file durably; return its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in _chunks_of(data):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _chunks_of(data: bytes | memoryview | Path) -> Iterator[bytes | memoryview]:
    if isinstance(data, Path):
        with data.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    else:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]


def link_if_absent(source: Path, target: Path) -> bool:
    """Give a file a name that nothing has yet; return False if something has it."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno not in _HAS_NO_LINKS:
            raise
        return _copy_if_absent(source, target)
    return True


def _copy_if_absent(source: Path, target: Path) -> bool:
    """Do it on a file system without hard links: still one writer, but a crash may cut it short."""
    try:
        write_new(target, source)
    except FileExistsError:
        return False
    return True


@contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Remove a temporary file if the block raises."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


@contextmanager
def removed_at_end(path: Path) -> Iterator[None]:
    """Remove a temporary file when the block ends, however it ends."""
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make names durable; without it a crash of the machine may lose a file that was synced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
