"""This machine's copy of a job's log: filled from the bucket by whoever reads.

A copy has at most one process that changes it: the coordinator for as long as it writes there, else
a reader while it fills it. They hold a lock (``flock``) on ``.copy.lock``; a reader that does not
get it reads what is there.
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
"""How long nothing may come before the log is listed again: what follows may have been packed."""
_TAIL_BYTES = 64 * 1024


class LogCopy:
    """The copy in one folder.

    Args:
        chain: The log in the bucket.
        log_path: The copy; made if it is not there, with its folder.
    """

    def __init__(self, chain: Chain, log_path: Path) -> None:
        self._chain = chain
        self.path = log_path
        self._is_checked = False
        """Whether this copy was seen to be the beginning of the log, or to go on from its end."""
        self._listed_at = 0.0

    def refresh(self) -> None:
        """Add what the bucket has and the copy has not; another process may be doing so.

        Raises:
            RunStoreError: If the bucket cannot be read, or the log there is damaged.
        """
        with copy_lock(self.path.parent) as is_ours:
            if is_ours:
                self.fill()
            else:
                self.forget()

    def fill(self) -> int:
        """Do so for whoever holds the lock, and return the ``seq`` up to which both are one log.

        A copy that has something else than the log is put aside: its writer was fenced.
        """
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
        """Have the next look compare the copy with the log again."""
        self._is_checked = False

    def _fill_from(self, seq: int, line: bytes) -> int:
        common = 0
        for first, lines in self._chain.read_from(max(seq, 1)):
            fresh: Sequence[bytes] = lines
            if seq and first <= seq:
                if lines[seq - first] != line:
                    return self._begin_anew()
                fresh = lines[seq - first + 1 :]
            self._append(fresh)
            common = first + len(lines) - 1
            if first % EVENTS_PER_SEGMENT == 1 and len(lines) == EVENTS_PER_SEGMENT:
                self._fetch_columns(first)
        if common or not seq:
            return common
        end, last = self._chain.end()
        if end and line_at(self.path, end) != last:
            return self._begin_anew()
        return end  # it is ahead: its writer ended before all was uploaded

    def _begin_anew(self) -> int:
        aside = self.path.with_name(f"{self.path.stem}.{time.time_ns()}.lost.jsonl")
        self.path.rename(aside)
        shutil.rmtree(segments_of(self.path), ignore_errors=True)
        return self._fill_from(0, b"")

    def _append(self, lines: Sequence[bytes]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))

    def _fetch_columns(self, first: int) -> None:
        """Fetch what makes reading fast; whoever reads compares it with the lines."""
        key = columns_key(first)
        path = self.path.parent / key
        if path.exists() or (data := self._chain.objects.get(key)) is None:
            return
        path.parent.mkdir(exist_ok=True)
        hidden = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
        hidden.write_bytes(data)
        hidden.rename(path)


@contextlib.contextmanager
def copy_lock(folder: Path, *, patience_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock of a copy; yields whether it was to be had within ``patience_s``."""
    handle = take_lock(folder, patience_s=patience_s)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def take_lock(folder: Path, *, patience_s: float) -> int | None:
    """Return an open file that holds the lock of a copy; None if somebody else goes on having it.

    Raises:
        RunStoreError: If the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise RunStoreError(
            f"this machine's copy of the job cannot be kept in {folder} ({exc.strerror}). Make it "
            "writable, or set ETRAIN_STATE to a folder of yours"
        ) from exc
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError as exc:
            if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return handle  # a file system without locks: there is one user's one machine
            if time.monotonic() >= deadline:
                os.close(handle)
                return None
        time.sleep(0.05)


def end_of(path: Path) -> tuple[int, bytes]:
    """Return the last event's ``seq`` and line, and cut off a torn one behind it.

    Raises:
        RunStoreError: If the last line is no event.
    """
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            length, data = _TAIL_BYTES, b""
            while True:
                file.seek(max(0, size - length))
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                if whole.count(b"\n") > 1 or length >= size:
                    break
                length *= 4
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
            f"the last line of {path} is no event. Remove that file to have it fetched anew"
        ) from exc


def line_at(path: Path, seq: int) -> bytes:
    """Return one line of a copy; nothing if it is shorter."""
    reader = LogReader(path)
    reader.skip(seq - 1)
    return b"".join(reader.read_lines(1))
