"""The durable log of a job: one event per line, as JSON, in the order in which they happened.

There is one writer, the coordinator, and any number of readers, which need only the file. The event
with ``seq`` n is line n, without gaps, so a reader can request the events that it has missed.
Non-finite floats are written as ``NaN`` and ``Infinity``, an extension of JSON that Python can
read, so that a diverged loss does not look like a missing one.

Durability: every event survives the exit of any process once ``append`` has returned. Events that
readers act on (``DURABLE``) then also survive a crash of the machine; steps and messages are synced
in groups. No reader receives an event before ``append`` has returned. Long logs are read through
``log.segments``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.events import (
    BestReached,
    CheckpointCommitted,
    EarlyStopped,
    Event,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobStatusChanged,
    JobSubmitted,
    LogFormatError,
    UserErrorRaised,
    event_from_dict,
)
from etrain_jupyter.untrusted import make_private, open_regular

LOG_FILE = "events.jsonl"
"""Name of the log in the folder of a job."""

DURABLE = (
    BestReached,
    CheckpointCommitted,
    EarlyStopped,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobStatusChanged,
    JobSubmitted,
    UserErrorRaised,
)
"""Events that readers act on: synced to disk before any reader receives them."""

# Number of lines parsed per call. This is faster than parsing one line at a time, and also faster
# than parsing all at once, because the garbage collector would then repeatedly traverse hundreds of
# thousands of dicts.
_PARSE_LINES = 1000

_READ_BYTES = 1024 * 1024

# Maximum length of a line. Without a limit, a file without newlines would be read into memory.
_LONGEST_LINE = 64 * 1024 * 1024

# A symbolic link or a named pipe in place of the log is rejected, never written to.
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

# Exceptions raised when something that is not an event is parsed.
_PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class EventLog:
    """The single writer of a job's log. An existing log is continued after its last complete line.

    Args:
        path: The file; created with its folder if it does not exist.
        fsync_every_s: Maximum time in seconds before a step or a message is synced. Until then, it
            is only in the page cache, and a crash of the machine would lose it. Applies while
            events arrive. 0 syncs every batch; None syncs only events in ``DURABLE`` and on close.
        clock: Monotonic clock in seconds.

    Raises:
        EtrainError: If another process is writing this log.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fsync_every_s: float | None = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self._fsync_every_s = fsync_every_s
        self._clock = clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, _OPEN_FLAGS, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise EtrainError(f"{self.path} is not a regular file. Nothing was written to it.")
            # Lock before the repair, because a running writer may be in the middle of the last
            # line.
            _lock(self._file, self.path)
            self._size, self._last_seq = _cut_torn_tail(self._file, self.path)
            _fsync_folder(self.path.parent)
        except BaseException:
            os.close(self._file)
            raise
        # True if bytes may follow the last complete line, because truncating the file failed.
        self._is_torn = False
        self._synced_at = clock()
        self._is_synced = True

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event; 0 while the log is empty."""
        return self._last_seq

    def append(self, events: Iterable[Event]) -> list[Event]:
        """Write events as one batch and return them with their sequence numbers.

        Text that UTF-8 cannot encode (file names may contain such text) is escaped.

        Raises:
            OSError: If the disk rejected the write; the log is then unchanged.
        """
        # number -> encode -> write -> fsync, if due -> return -> readers get them
        #                       |        |
        #                       +--------+-- OSError: truncate to ``size``, keep ``last_seq``;
        #                                    the caller may append the same events again
        numbered = [event.with_seq(self._last_seq + i) for i, event in enumerate(events, start=1)]
        if not numbered:
            return []
        try:
            data = _lines_of(numbered)
        except UnicodeEncodeError:  # rare, so texts are checked only in this case
            numbered = [event_from_dict(readable(event.to_json_dict())) for event in numbered]
            data = _lines_of(numbered)
        size = self._size
        try:
            self._write(data)
            if self._is_sync_due(numbered):
                self.sync()
        except OSError:
            # Half a line would corrupt the next one, and lines whose sync failed are not durable.
            self._truncate(size)
            raise
        self._last_seq += len(numbered)
        return numbered

    def sync(self) -> None:
        """Sync the log, so that all appended events survive a crash of the machine."""
        if not self._is_synced:
            os.fsync(self._file)
        self._is_synced, self._synced_at = True, self._clock()

    def is_in_place(self) -> bool:
        """Return False if the file was deleted or moved while it was open."""
        return is_open_file(self._file, self.path)

    def write_again(self) -> None:
        """Write the whole log to a new file at its path, and continue there.

        Raises:
            OSError: The disk's error. The log then continues in the old file.
        """
        new = copy_open_file(self._file, self.path, size=self._size)
        with contextlib.suppress(EtrainError):  # no other process knows the new file yet
            _lock(new, self.path)
        os.close(self._file)
        self._file, self._is_torn = new, False

    def close(self) -> None:
        """Sync and close the file. May be called twice."""
        if self._file < 0:
            return
        try:
            self.sync()
        finally:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        if self._is_torn:  # if truncating still fails, this raises, and nothing is appended
            os.ftruncate(self._file, self._size)
            self._is_torn = False
        written = 0
        while written < len(data):  # a nearly full disk may accept only a part
            written += os.write(self._file, data[written:])
        self._size += len(data)
        self._is_synced = False

    def _truncate(self, size: int) -> None:
        self._size, self._is_torn = size, True
        with contextlib.suppress(OSError):  # the next write retries
            os.ftruncate(self._file, size)
            self._is_torn = False

    def _is_sync_due(self, events: list[Event]) -> bool:
        if any(isinstance(event, DURABLE) for event in events):
            return True
        limit = self._fsync_every_s
        return limit is not None and self._clock() - self._synced_at >= limit


def is_open_file(file: int, path: Path) -> bool:
    """Return whether a path still names an open file; True if that cannot be determined."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def copy_open_file(source: int, path: Path, *, size: int) -> int:
    """Copy the first bytes of an open file, which may be deleted, to a new file at ``path``.

    Returns:
        The new file, open for appending. It replaces any file at ``path`` atomically.

    Raises:
        OSError: If it cannot be written, or if another user may have prepared its folder.
    """
    make_private(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    new = os.open(draft, _OPEN_FLAGS | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(new, "wb", closefd=False) as file:
            for start in range(0, size, _READ_BYTES):
                file.write(os.pread(source, min(_READ_BYTES, size - start), start))
        os.fsync(new)
        draft.replace(path)
        _fsync_folder(path.parent)
    except BaseException:
        os.close(new)
        draft.unlink(missing_ok=True)
        raise
    return new


def readable(value: Any) -> Any:
    r"""Return ``value`` with surrogates escaped in all strings: UTF-8 cannot encode them.

    >>> readable({"text": "caf\\udce9"})
    {'text': 'caf\\udce9'}
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {readable(key): readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [readable(item) for item in value]
    return value


def _lines_of(events: list[Event]) -> bytes:
    return "".join(_encode(event.to_json_dict()) + "\n" for event in events).encode()


class LogReader:
    """Follow a log that another process writes: each ``read`` returns the new events.

    It keeps a byte offset and no open file, so it does not need to be closed.

    Args:
        path: The file; it may not exist yet.
        offset: Number of bytes to skip; must be the end of a line.
        lines: Number of lines in the skipped bytes.
    """

    def __init__(self, path: str | os.PathLike[str], *, offset: int = 0, lines: int = 0) -> None:
        self.path = Path(path)
        self._offset = offset
        self._lines = lines

    @property
    def position(self) -> tuple[int, int]:
        """Number of bytes and lines before the next event."""
        return self._offset, self._lines

    def skip(self, num_events: int) -> int:
        """Skip at most ``num_events`` events without parsing them; return the number skipped."""
        return len(self.read_lines(num_events))

    def read(self, limit: int | None = None) -> list[Event]:
        """Return the next events, at most ``limit``; an unfinished line is left for the next call.

        Raises:
            EtrainError: If a complete line is not an event: the file is damaged.
        """
        first_line = self._lines + 1
        return parse_lines(self.read_lines(limit), self.path, first_line)

    def read_lines(self, limit: int | None = None) -> list[bytes]:
        """Return the next complete lines, at most ``limit``, without their newlines."""
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset)
                data = _read_lines(file, math.inf if limit is None else limit, self.path)
        except FileNotFoundError:
            return []
        # Drop the bytes after the last newline, because the writer may be in the middle of a line.
        lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1][:limit]
        self._offset += sum(map(len, lines)) + len(lines)  # with their newlines
        self._lines += len(lines)
        return lines


def _read_lines(file: BinaryIO, limit: float, path: Path) -> bytes:
    """Read at least ``limit`` lines, or all lines, without reading a long log completely.

    Raises:
        EtrainError: If a line is implausibly long.
    """
    pieces: list[bytes] = []
    length = 0
    while limit > 0 and (piece := file.read(_READ_BYTES)):
        pieces.append(piece)
        num_lines = piece.count(b"\n")
        limit -= num_lines
        length = length + len(piece) if not num_lines else 0  # since the last newline
        if length > _LONGEST_LINE:
            raise EtrainError(
                f"{path} is not the log of a job: it has a line of over {_LONGEST_LINE >> 20} MiB."
            )
    return b"".join(pieces)


def read_events(
    path: str | os.PathLike[str], *, since: int = 0, limit: int | None = None
) -> list[Event]:
    """Return the events of a log with ``seq > since``, at most ``limit``, in order.

    A last line that a crash has truncated is skipped; a missing file counts as empty.

    Raises:
        EtrainError: If a complete line is not an event: the file is damaged.
    """
    reader = LogReader(path)
    # Line n holds the event with seq n.
    return reader.read(limit) if reader.skip(since) == since else []


def parse_lines(lines: list[bytes], path: Path, first_line: int) -> list[Event]:
    """Return the events in complete lines.

    Raises:
        EtrainError: If a line is not an event. The message contains the file and the line number.
    """
    events: list[Event] = []
    for start in range(0, len(lines), _PARSE_LINES):
        chunk = lines[start : start + _PARSE_LINES]
        events += _parse_chunk(chunk, path, first_line + start)
    return events


def _parse_chunk(lines: list[bytes], path: Path, first_line: int) -> list[Event]:
    try:
        dicts = json.loads(b"[" + b",".join(lines) + b"]")
        if len(dicts) == len(lines):  # a damaged line may parse as two items
            return [event_from_dict(data) for data in dicts]
    except _PARSE_ERRORS:
        pass  # A line in the chunk is damaged: parse line by line to find it.
    return [_parse_line(line, path, n) for n, line in enumerate(lines, start=first_line)]


def _parse_line(line: bytes, path: Path, number: int) -> Event:
    try:
        return event_from_dict(json.loads(line))
    except LogFormatError as exc:
        raise EtrainError(str(exc)) from exc
    except _PARSE_ERRORS as exc:
        raise EtrainError(
            f"Line {number} of {path} is not an event: {line[:80]!r} ({exc}). "
            f"The {number - 1} lines before it are intact. "
            "To read them, remove this line and everything after it."
        ) from exc


def _lock(file: int, path: Path) -> None:
    # A second writer may be a coordinator that was declared dead but is still running. The kernel
    # releases the lock when a process exits, even if it is killed.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return  # The file system has no locks; generation numbers still fence stale writers.
        raise EtrainError(
            f"{path} is being written by another process: the job's coordinator still runs. "
            "Nothing was written. Run %etrain ls to find its cluster."
        ) from exc


def _cut_torn_tail(file: int, path: Path) -> tuple[int, int]:
    """Remove an unfinished last line; return the size of the remaining file and its last seq.

    Raises:
        EtrainError: If the file has complete lines, but none of them is an event. The file is not
            changed.
    """
    size = os.fstat(file).st_size
    if size == 0:
        return 0, 0
    # {"event": ..., "seq": 7}\n      whole: the log continues after this line
    # \0\0\0\0\0\n                    whole, but no event: a machine crash may leave such blocks
    # {"event": ..., "se              torn
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as data:
        end, seq = data.rfind(b"\n") + 1, 0
        has_lines = end > 0
        while end and not seq:
            start = data.rfind(b"\n", 0, end - 1) + 1
            seq = _seq_of(data[start:end])
            end = end if seq else start
    if has_lines and not seq:
        raise EtrainError(f"{path} is not the log of a job. Nothing was written to it.")
    if end < size:
        os.ftruncate(file, end)
    return end, seq


def _seq_of(line: bytes) -> int:
    try:
        return event_from_dict(json.loads(line)).seq
    except _PARSE_ERRORS:
        return 0  # not an event


def _fsync_folder(folder: Path) -> None:
    # Make the name of a new file durable. Without its name, the file would be lost in a crash.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
