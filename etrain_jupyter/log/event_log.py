"""The durable log of a job: one event a line, as JSON, in the order in which they happened.

There is one writer, the coordinator, and any number of readers, who need nothing but the file. The
event with ``seq`` n is line n, without gaps, so that a reader can ask for what it missed. Floats
that are not finite are written as ``NaN`` and ``Infinity``, which Python reads back and strict JSON
does not have: a diverged loss must not look like a missing one.

What survives when: every event survives the end of any process once ``append`` has returned. What
others act on (``DURABLE``) then survives the end of the machine, too; steps and remarks are synced
in groups. Nobody is told of an event before ``append`` has returned. Long logs are read through
``events.segments``.
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
    UserErrorRaised,
    event_from_dict,
)
from etrain_jupyter.untrusted import open_regular

LOG_FILE = "events.jsonl"
"""Its name in the folder of a job."""

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
"""What somebody acts on who hears of it: synced before that, whatever the machine does then."""

_PARSE_LINES = 1000
"""Lines parsed with one call: faster than one at a time, and than all, which makes the garbage
collector walk over hundreds of thousands of dicts again and again."""

_READ_BYTES = 1024 * 1024

_LONGEST_LINE = 64 * 1024 * 1024
"""No event is as long; without an end a file would be read into memory as a whole."""

_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A link or a named pipe under the log's name is refused, never written to."""

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What parsing something that is not an event raises."""

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class EventLog:
    """The one writer of a job's log; opening an existing one goes on after its last whole line.

    Args:
        path: The file; made if it is not there, with its folder.
        fsync_every_s: Longest time, while events come, that a step or a remark is only in the
            machine's page cache: it survives a crash of any process at once, and one of the machine
            after this time. 0 syncs every batch; None only what is in ``DURABLE``, and the end.
        clock: Seconds, monotonic.

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
            _lock(self._file, self.path)
            self._size, self._last_seq = _cut_torn_tail(self._file, self.path)
            _fsync_folder(self.path.parent)
        except BaseException:
            os.close(self._file)
            raise
        self._is_torn = False
        """Whether bytes may follow the last whole line, because they could not be cut off."""
        self._synced_at = clock()
        self._is_synced = True

    @property
    def last_seq(self) -> int:
        """The newest event's place in the log; 0 while it is empty."""
        return self._last_seq

    def append(self, events: Iterable[Event]) -> list[Event]:
        """Write events with one call and return them with their sequence numbers.

        Text that UTF-8 cannot encode (file names may contain such text) is escaped.

        Raises:
            OSError: If the disk refused them; then the log is as it was before.
        """
        numbered = [event.with_seq(self._last_seq + i) for i, event in enumerate(events, start=1)]
        if not numbered:
            return []
        try:
            data = _lines_of(numbered)
        except UnicodeEncodeError:
            numbered = [event_from_dict(readable(event.to_dict())) for event in numbered]
            data = _lines_of(numbered)
        size = self._size
        try:
            self._write(data)
            if self._is_sync_due(numbered):
                self.sync()
        except OSError:
            # Half a line would corrupt the next one, and lines whose sync failed are not durable.
            self._cut(size)
            raise
        self._last_seq += len(numbered)
        return numbered

    def sync(self) -> None:
        """Wait until everything appended would survive a crash of the machine."""
        if not self._is_synced:
            os.fsync(self._file)
        self._is_synced, self._synced_at = True, self._clock()

    def close(self) -> None:
        """Sync and let go of the file; twice does no harm."""
        if self._file < 0:
            return
        try:
            self.sync()
        finally:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        if self._is_torn:
            os.ftruncate(self._file, self._size)
            self._is_torn = False
        written = 0
        while written < len(data):
            written += os.write(self._file, data[written:])
        self._size += len(data)
        self._is_synced = False

    def _cut(self, size: int) -> None:
        self._size, self._is_torn = size, True
        with contextlib.suppress(OSError):  # the next write tries again
            os.ftruncate(self._file, size)
            self._is_torn = False

    def _is_sync_due(self, events: list[Event]) -> bool:
        if any(isinstance(event, DURABLE) for event in events):
            return True
        limit = self._fsync_every_s
        return limit is not None and self._clock() - self._synced_at >= limit


def readable(value: Any) -> Any:
    r"""Return ``value`` with the surrogates in its texts escaped, which UTF-8 cannot encode.

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
    return "".join(_encode(event.to_dict()) + "\n" for event in events).encode()


class LogReader:
    """Follows a log that somebody else writes: each ``read`` returns what is new.

    It keeps a byte offset and no open file, so that it may be forgotten at any time.

    Args:
        path: The file; it need not be there yet.
        offset: Bytes to pass over, which end with a line.
        lines: How many lines they are.
    """

    def __init__(self, path: str | os.PathLike[str], *, offset: int = 0, lines: int = 0) -> None:
        self.path = Path(path)
        self._offset = offset
        self._lines = lines

    @property
    def position(self) -> tuple[int, int]:
        """The bytes and the lines before the next event."""
        return self._offset, self._lines

    def skip(self, num_events: int) -> int:
        """Pass over up to ``num_events`` events unparsed; return how many there were."""
        return len(self._take_lines(num_events))

    def read(self, limit: int | None = None) -> list[Event]:
        """Return the next events, at most ``limit``; a line that is not finished yet waits.

        Raises:
            EtrainError: If a whole line is not an event: the file was damaged.
        """
        first_line = self._lines + 1
        return parse_lines(self._take_lines(limit), self.path, first_line)

    def read_lines(self, limit: int | None = None) -> list[bytes]:
        """Return the next whole lines, at most ``limit``, without their ends."""
        return self._take_lines(limit)

    def _take_lines(self, limit: int | None) -> list[bytes]:
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset)
                data = _read_lines(file, math.inf if limit is None else limit, self.path)
        except FileNotFoundError:
            return []
        lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1][:limit]
        self._offset += sum(map(len, lines)) + len(lines)
        self._lines += len(lines)
        return lines


def _read_lines(file: BinaryIO, limit: float, path: Path) -> bytes:
    """Read at least ``limit`` lines, if there are as many: not the whole of a long log.

    Raises:
        EtrainError: If a line has no end.
    """
    pieces: list[bytes] = []
    length = 0
    while limit > 0 and (piece := file.read(_READ_BYTES)):
        pieces.append(piece)
        num_lines = piece.count(b"\n")
        limit -= num_lines
        length = length + len(piece) if not num_lines else 0
        if length > _LONGEST_LINE:
            raise EtrainError(f"{path} is not the log of a job: it has a line without an end.")
    return b"".join(pieces)


def read_events(
    path: str | os.PathLike[str], *, since: int = 0, limit: int | None = None
) -> list[Event]:
    """Return the events of a log with ``seq > since``, at most ``limit``, in order.

    A torn last line, which a crash may leave, is passed over; a file that is not there is empty.

    Raises:
        EtrainError: If a whole line is not an event: the file was damaged.
    """
    reader = LogReader(path)
    # Line n holds the event with seq n.
    return reader.read(limit) if reader.skip(since) == since else []


def parse_lines(lines: list[bytes], path: Path, first_line: int) -> list[Event]:
    """Return the events of whole lines.

    Raises:
        EtrainError: If one is not an event; it names the file and the line.
    """
    events: list[Event] = []
    for start in range(0, len(lines), _PARSE_LINES):
        chunk = lines[start : start + _PARSE_LINES]
        events += _parse_chunk(chunk, path, first_line + start)
    return events


def _parse_chunk(lines: list[bytes], path: Path, first_line: int) -> list[Event]:
    try:
        dicts = json.loads(b"[" + b",".join(lines) + b"]")
        if len(dicts) == len(lines):
            return [event_from_dict(data) for data in dicts]
    except _DAMAGE:
        pass  # Something in it is damaged: go line by line to tell where.
    return [_parse_line(line, path, n) for n, line in enumerate(lines, start=first_line)]


def _parse_line(line: bytes, path: Path, number: int) -> Event:
    try:
        return event_from_dict(json.loads(line))
    except _DAMAGE as exc:
        raise EtrainError(
            f"Line {number} of {path} is not an event: {line[:80]!r} ({exc}). "
            f"The {number - 1} before it are whole; remove the rest of the file to read them."
        ) from exc


def _lock(file: int, path: Path) -> None:
    """Refuse a second writer, for example a coordinator that was thought dead."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return  # A file system without locks; the generation numbers still fence.
        raise EtrainError(
            f"{path} is being written by another process: the job's coordinator still runs. "
            "Nothing was written. Look for it with %etrain ls."
        ) from exc


def _cut_torn_tail(file: int, path: Path) -> tuple[int, int]:
    """Remove what a crash left unfinished; return the size of the rest and its last seq.

    Raises:
        EtrainError: If the file has whole lines and none is an event; then it is left alone.
    """
    size = os.fstat(file).st_size
    if size == 0:
        return 0, 0
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
    """Return the sequence number in a line; 0 if it is not an event."""
    try:
        return event_from_dict(json.loads(line)).seq
    except _DAMAGE:
        return 0


def _fsync_folder(folder: Path) -> None:
    """Make a new file's name durable; its bytes alone would be lost without it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
