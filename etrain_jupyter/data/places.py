"""Files of a data set, in a folder or in a bucket."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from etrain_jupyter.config.store_url import S3, split_s3_url
from etrain_jupyter.errors import ShardError
from etrain_jupyter.storage.objects import store_errors_as
from etrain_jupyter.untrusted import create_file

if TYPE_CHECKING:
    from etrain_jupyter.storage.objects.s3_bucket import Bucket

_MAX_OPEN_FILES = 64
_NUM_ATTEMPTS = 6
"""Attempts for each request, each with boto3's own retries. There are more than for a checkpoint,
because an error ends the job, and a failed checkpoint does not."""


class NoPlaceError(ShardError):
    """The folder does not exist."""


Check = Callable[[bytes], bool]
"""Returns False for bytes that must not be used."""


class FileFacts(NamedTuple):
    """A file of a data set, as listed."""

    size: int
    """In bytes."""
    version: str
    """Its ETag in a bucket; modification time in a folder."""


class Place(Protocol):
    """The files of one data set; safe to use from several threads."""

    is_remote: bool
    """True if reading a file twice costs a transfer, so that it should be cached."""

    def list(self) -> dict[str, FileFacts]:
        """Return all files by name, relative to the place."""
        ...

    def read(self, name: str, first: int, size: int, *, version: str, check: Check | None) -> bytes:
        """Return a range of a file.

        Args:
            name: The file.
            first: Offset of the first byte.
            size: Number of bytes.
            version: The version that the file must have; empty for any. Ignored in a folder,
                because a copy on another machine may have other times.
            check: Returns False for wrong bytes, which raise an error.

        Raises:
            ShardError: If the file is missing, too short or altered, or cannot be read.
        """
        ...

    def write(self, name: str, source: Path) -> None:
        """Create or replace a file from a local one, atomically."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Create a small file atomically; return False if it exists."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file; it need not exist."""
        ...


def open_place(path: str) -> Place:
    """Return the place at a folder's path or ``s3://`` URL; nothing is read yet.

    Raises:
        ShardError: If the URL is invalid, or boto3 is missing.
    """
    if path.startswith(S3):
        return BucketPlace(path)
    return FolderPlace(Path(path))


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path or URL in the form in which it is sent to workers.

    Raises:
        ShardError: If the scheme is unknown.
    """
    text = os.fspath(path)
    scheme = urlsplit(text).scheme if "://" in text else "file"
    if scheme == "s3":
        return text.rstrip("/")
    if scheme != "file":
        raise ShardError(
            f"{text!r}: shards cannot be read from {scheme}://. Give the path of a folder, or "
            "s3://bucket/prefix."
        )
    local = unquote(urlsplit(text).path) if "://" in text else text
    return str(Path(local).expanduser().absolute())


# ------------------------------------------------------------------------------------------ folder


class _Seen(NamedTuple):
    inode: int
    size: int
    changed_ns: int


class FolderPlace:
    """Files below a folder."""

    is_remote = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()
        """Descriptors of the files that were read last."""
        self._seen: dict[str, _Seen] = {}
        """Every file as it was when this process first read it."""

    def __str__(self) -> str:
        return str(self._folder)

    def list(self) -> dict[str, FileFacts]:
        """Return all files below the folder; only itself if it is a file."""
        if not self._folder.exists():
            raise NoPlaceError(
                f"{self} does not exist on this machine. If only the workers have it, let them "
                "open it: name a function that returns Shards(...) as data.train."
            )
        try:
            if self._folder.is_file():
                found = [self._folder]
                base = self._folder.parent
            else:
                found = [p for p in sorted(self._folder.rglob("*")) if p.is_file()]
                base = self._folder
            return {
                path.relative_to(base).as_posix(): FileFacts(
                    status.st_size, str(status.st_mtime_ns)
                )
                for path in found
                for status in (path.stat(),)
            }
        except OSError as exc:
            raise ShardError(f"{self} cannot be listed: {exc.strerror}.") from exc

    def read(self, name: str, first: int, size: int, *, version: str, check: Check | None) -> bytes:
        """Return a range of a file."""
        try:
            data = self._pread(name, first, size)
        except FileNotFoundError as exc:
            raise _missing(self, name) from exc
        except OSError as exc:
            raise ShardError(f"shard {name} in {self} cannot be read: {exc.strerror}.") from exc
        if len(data) != size:
            raise ShardError(
                f"shard {name} in {self} is truncated: it ends at byte {first + len(data)}, and "
                f"byte {first + size} is needed. Nothing was skipped. Restore it, then resume the "
                "job (%etrain resume JOB)."
            )
        if check is not None and not check(data):
            raise altered_error(self, name, f"bytes {first} to {first + size} have another SHA-256")
        return data

    def facts(self, name: str) -> FileFacts:
        """Return the size and modification time of one file, as ``list`` does.

        Raises:
            ShardError: If the file is missing, or was altered since this process first read it.
        """
        with self._lock:
            try:
                self._open(name)
            except FileNotFoundError as exc:
                raise _missing(self, name) from exc
            except OSError as exc:
                raise ShardError(f"shard {name} in {self} cannot be read: {exc.strerror}.") from exc
            seen = self._seen[name]
        return FileFacts(seen.size, str(seen.changed_ns))

    def _pread(self, name: str, first: int, size: int) -> bytes:
        with self._lock:
            duplicate = os.dup(self._open(name))  # another thread may close the first one
        try:
            data = os.pread(duplicate, size, first)  # usually all: a block is not copied
            while len(data) < size and (
                piece := os.pread(duplicate, size - len(data), first + len(data))
            ):
                data += piece
            return data
        finally:
            os.close(duplicate)

    def _open(self, name: str) -> int:
        """Return the descriptor of a file, which has not changed since it was first opened."""
        if name not in self._files:
            while len(self._files) >= _MAX_OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            path = self._folder if self._folder.is_file() else self._folder / name
            self._files[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._files.move_to_end(name)
        file = self._files[name]
        # A file that is written in place changes under an open descriptor; one that is replaced by
        # a rename does not.
        status = os.fstat(file)
        now = _Seen(status.st_ino, status.st_size, status.st_mtime_ns)
        if now != self._seen.setdefault(name, now):
            raise altered_error(self, name, "its size or modification time has changed")
        return file

    def write(self, name: str, source: Path) -> None:
        """Create or replace a file from a local one, atomically."""
        target = self._folder / name
        # Named after the source, because several processes may write the same file.
        partial = target.with_name(f".{target.name}.{source.name}.partial")
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as read, create_file(partial) as written:
            while piece := read.read(1 << 20):
                written.write(piece)
            written.flush()
            os.fsync(written.fileno())
        os.replace(partial, target)

    def create(self, name: str, data: bytes) -> bool:
        """Create a small file atomically; return False if it exists."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / name
        partial = target.with_name(f".{name}.{os.getpid()}.partial")
        with create_file(partial) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, target)  # unlike a rename, fails if the target exists
        except FileExistsError:
            return False
        finally:
            partial.unlink()
        return True

    def delete(self, name: str) -> None:
        """Delete a file; it need not exist."""
        (self._folder / name).unlink(missing_ok=True)

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)


# ------------------------------------------------------------------------------------------ bucket

_shard_errors = functools.partial(store_errors_as, ShardError, "{}.")


class BucketPlace:
    """Objects below a prefix of a bucket.

    Raises:
        ShardError: If the URL is invalid, or boto3 is missing.
    """

    is_remote = True

    def __init__(self, url: str) -> None:
        self._bucket = _open_bucket(url)

    def __str__(self) -> str:
        return str(self._bucket)

    def list(self) -> dict[str, FileFacts]:
        """Return all objects below the prefix."""
        with _shard_errors():
            found = self._bucket.versions("shards cannot be listed")
        return {name: FileFacts(*facts) for name, facts in sorted(found.items())}

    def read(self, name: str, first: int, size: int, *, version: str, check: Check | None) -> bytes:
        """Return a range of an object; request, body and check are retried together."""
        from etrain_jupyter.storage.objects.s3_requests import MissingError, TakenError

        what = f"shard {name} cannot be read"
        with _shard_errors():
            try:
                return self._bucket.get_range(
                    name, first, size, what, etag=version, check=check or (lambda data: True)
                )
            except MissingError as exc:
                raise _missing(self, name) from exc
            except TakenError as exc:
                raise altered_error(self, name, f"its ETag is not {version} any more") from exc

    def write(self, name: str, source: Path) -> None:
        """Create or replace an object from a local file."""
        with _shard_errors():
            self._bucket.replace_file(name, source, f"shard {name} cannot be written")

    def create(self, name: str, data: bytes) -> bool:
        """Create a small object; return False if it exists."""
        what, token = f"{name} cannot be written", os.urandom(8).hex()
        with _shard_errors():
            return self._bucket.put_if_absent(name, data, what, token=token)

    def delete(self, name: str) -> None:
        """Delete an object; it need not exist."""
        with _shard_errors():
            self._bucket.delete(name, f"{name} cannot be deleted")


def _open_bucket(url: str) -> Bucket:
    # Imported here because boto3 is an optional dependency.
    try:
        from etrain_jupyter.storage.objects.s3_bucket import Bucket
        from etrain_jupyter.storage.objects.s3_requests import S3Limits
    except ModuleNotFoundError as exc:
        raise ShardError(
            f"{url} needs boto3, which is not installed. Install it on this machine and on the "
            'workers: pip install "etrain-jupyter[data,s3]"'
        ) from exc
    try:
        name, prefix = split_s3_url(url)
    except ValueError as exc:
        raise ShardError(f"the URL of the shards {exc}. Write s3://bucket/prefix.") from exc
    limits = S3Limits(num_attempts=_NUM_ATTEMPTS, repeats_unavailable=True)
    return Bucket(name, prefix, limits, setting="the URL of the shards")


def _missing(place: Place, name: str) -> ShardError:
    return ShardError(
        f"shard {name} is missing in {place}. Nothing was skipped. Restore it, then resume the "
        "job (%etrain resume JOB)."
    )


def altered_error(place: Place, name: str, how: str) -> ShardError:
    """Return the error for a file that was replaced after it was indexed."""
    return ShardError(
        f"shard {name} in {place} is not the one that was indexed: {how}. Its data were not used. "
        "Restore it and resume the job (%etrain resume JOB); to train on the new data, start a new "
        "job."
    )
