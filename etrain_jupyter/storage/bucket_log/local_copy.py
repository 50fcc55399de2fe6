"""This machine's copy of a job's log, filled from the bucket by readers.

Only one process at a time changes a copy: the coordinator while it writes the log, otherwise a
reader that fills the copy. That process holds a lock (``flock``) on ``.copy.lock``. A reader that
does not get the lock reads the copy as it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from etrain_jupyter.errors import RunStoreError
from etrain_jupyter.log.event_log import LogReader
from etrain_jupyter.log.events import event_from_dict
from etrain_jupyter.log.segments import EVENTS_PER_SEGMENT, segments_of
from etrain_jupyter.storage.bucket_log.chain import Chain, columns_key

LOCK_FILE = ".copy.lock"
RELIST_S = 15.0
"""Time without new events after which the log is listed again, because new events may already be
packed."""
_TAIL_BYTES = 64 * 1024


class LogCopy:
    """The copy in one folder.

    Args:
        chain: The log in the bucket.
        log_path: The copy; created if missing, with its folder.
    """

    def __init__(self, chain: Chain, log_path: Path) -> None:
        self._chain = chain
        self.path = log_path
        self._is_checked = False
        """True once the copy was compared with the log, and one of them is a prefix of the
        other."""
        self._listed_at = 0.0

    def refresh(self) -> None:
        """Add events from the bucket to the copy, unless another process is doing so.

        Raises:
            RunStoreError: If the bucket cannot be read, or the log there is damaged.
        """
        with copy_lock(self.path.parent) as is_ours:
            if is_ours:
                self.fill()
            else:
                self.forget()

    def fill(self) -> int:
        """Fill the copy, locked by the caller; return the ``seq`` up to which it and the log agree.

        A copy that differs from the log is renamed, because its writer was fenced.
        """
        # The key of the next object follows from `seq`, so one request shows whether there are new
        # events, without a listing. If that key is missing, its events may already be packed, and
        # only a listing finds them.
        seq, line = end_of(self.path)
        if self._is_checked and time.monotonic() - self._listed_at < RELIST_S:
            while (piece := self._chain.read_piece(seq + 1)) is not None:
                self._append(piece.lines)
                seq = piece.last
                self._listed_at = time.monotonic()
            return seq
        seq = self._fill_from(seq, line)
        self._is_checked, self._listed_at = True, time.monotonic()
        return seq

    def forget(self) -> None:
        """Make the next ``refresh`` compare the copy with the log again."""
        self._is_checked = False

    def _fill_from(self, seq: int, line: bytes) -> int:
        # Cases, for a copy whose last event is `seq`:
        #
        #   the log has `seq`, with the same line     add the events after it
        #   the log has `seq`, with another line      another writer continued: set the copy aside
        #   the log ends earlier, with a line of      the copy's writer was killed before it
        #     the copy                                  uploaded the rest: keep the copy
        #   the log ends earlier, with another line   set the copy aside
        common = 0
        for first, lines in self._chain.read_from(max(seq, 1)):
            fresh: Sequence[bytes] = lines
            # The first part read may begin before `seq`.
            if seq and first <= seq:
                if lines[seq - first] != line:
                    return self._restart_copy()
                fresh = lines[seq - first + 1 :]
            self._append(fresh)
            common = first + len(lines) - 1
            if first % EVENTS_PER_SEGMENT == 1 and len(lines) == EVENTS_PER_SEGMENT:
                self._fetch_columns(first)
        if common or not seq:
            return common
        end, last = self._chain.end()
        if end:
            reader = LogReader(self.path)
            reader.skip(end - 1)
            if reader.read_lines(1) != [last]:
                return self._restart_copy()
        return end

    def _restart_copy(self) -> int:
        # Renamed, not deleted, because its last events exist nowhere else.
        aside = self.path.with_name(f"{self.path.stem}.{time.time_ns()}.lost.jsonl")
        self.path.rename(aside)
        shutil.rmtree(segments_of(self.path), ignore_errors=True)
        return self._fill_from(0, b"")

    def _append(self, lines: Sequence[bytes]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))

    def _fetch_columns(self, first: int) -> None:
        # Columns make reading fast, but are optional. Readers check them against the lines.
        key = columns_key(first)
        path = self.path.parent / key
        if path.exists() or (data := self._chain.objects.get(key)) is None:
            return
        path.parent.mkdir(exist_ok=True)
        # Readers of the log take any file with the final name, so it must be complete.
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
        temporary.write_bytes(data)
        temporary.rename(path)


@contextlib.contextmanager
def copy_lock(folder: Path, *, patience_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock of a copy; yield whether it was available within ``patience_s``."""
    handle = take_lock(folder, patience_s=patience_s)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def take_lock(folder: Path, *, patience_s: float) -> int | None:
    """Return an open file that holds the lock of a copy; None if another process still holds it.

    Raises:
        RunStoreError: If the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise RunStoreError(
            f"this machine's copy of the job cannot be stored in {folder} ({exc.strerror}). Make "
            "the folder writable, or set ETRAIN_STATE to another one"
        ) from exc
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError as exc:
            # The file system has no locks, so assume that no other process changes the copy.
            if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return handle
            if time.monotonic() >= deadline:
                os.close(handle)
                return None
        time.sleep(0.05)


def end_of(path: Path) -> tuple[int, bytes]:
    """Return the last event's ``seq`` and line, and remove an incomplete line after it.

    Raises:
        RunStoreError: If the last line is not an event.
    """
    try:
        with path.open("r+b") as file:
            # Read the end in growing blocks. The last line is complete in the block only if the
            # newline before it is also in it, or the block is the whole file.
            size = file.seek(0, os.SEEK_END)
            length, data = _TAIL_BYTES, b""
            while True:
                file.seek(max(0, size - length))
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                if whole.count(b"\n") > 1 or length >= size:
                    break
                length *= 4
            # A line without a newline was cut off by a crash in `_append` or in the coordinator.
            file.truncate(size - (len(data) - len(whole)))
    except FileNotFoundError:
        return 0, b""
    if not whole:
        return 0, b""
    line = whole[:-1].rpartition(b"\n")[2]
    try:
        return event_from_dict(json.loads(line)).seq, line
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RunStoreError(
            f"the last line of {path} is not an event. Remove that file to fetch it again"
        ) from exc
