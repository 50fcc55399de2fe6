"""Upload a job's log to the bucket: new events first, then packs of older ones."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import time
from collections import deque
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import FencedError, RunStoreError
from etrain_jupyter.log.event_log import LogReader
from etrain_jupyter.log.events import ExhibitsRemoved, ExhibitStored, LogLine, event_from_dict
from etrain_jupyter.log.exhibits import (
    InvalidExhibitError,
    exhibit_key,
    is_exhibit_key,
    read_exhibit,
)
from etrain_jupyter.log.segments import EVENTS_PER_SEGMENT, finished_segments
from etrain_jupyter.storage.bucket_log.chain import (
    PACKS,
    PIECE_EVENTS,
    Chain,
    LogObject,
    columns_key,
    pack_key,
    piece_key,
)
from etrain_jupyter.storage.bucket_log.local_copy import LogCopy

MARK_FILE = ".uploaded.json"
"""File in the copy's folder that names the writer and the last event it has uploaded."""
ALIVE = "alive.json"
CLAIM_TRIES = 5
_FACTS = ("status", "reason", "step", "total_steps", "world_size", "time")
_STATUS_EVENTS = tuple(
    f'{{"event":"{kind}"'.encode() for kind in ("JobStatusChanged", "JobPlanned", "JobRestored")
)
_EXHIBIT_EVENTS = (b'{"event":"ExhibitStored"', b'{"event":"ExhibitsRemoved"')


class Uploads:
    """Upload a log from its folder to the bucket. Not thread-safe.

    Args:
        chain: The log in the bucket.
        log_path: The log.
        writer: Writer name in the uploaded objects; by default the previous one in this folder.
        seq: Last event of this log that is in the bucket; required with ``writer``.
    """

    def __init__(
        self, chain: Chain, log_path: Path, *, writer: str = "", seq: int | None = None
    ) -> None:
        self.chain = chain
        self._path = log_path
        known = _read_mark(log_path.parent) if not writer else {}
        self.writer = writer or str(known.get("writer") or new_writer())
        self.seq = int(known.get("seq", 0)) if seq is None else seq
        self._own: list[int] = []
        """First events of our objects that may be deleted once they are packed, in order. Those
        from an earlier process with the same writer are unknown, and stay in the bucket."""
        self._packed: dict[int, int] = {}
        """Last packed event by pack size; empty before the first listing."""
        # The key of our first object stays taken forever, because it fences the previous writer.
        self._began_at = self.seq + 1
        self._reader: LogReader | None = None
        self._pending: list[bytes] = []
        self.facts: dict[str, Any] = {}
        """The job's status, from the newest uploaded lines."""
        self._exhibits: deque[tuple[str, str]] = deque()
        """Files that uploaded lines name: ``put`` or ``delete``, and the key, in the log's order.
        Those that are not uploaded when this process dies stay on this machine."""

    def upload(self) -> bool:
        """Write the next events, at most ``PIECE_EVENTS``; return whether there were any.

        Raises:
            FencedError: If another writer has taken over this log.
            RunStoreError: If the bucket cannot be written; the next call retries.
        """
        if not self._pending:
            self._reader = self._reader or _reader_after(self._path, self.seq)
            self._pending = self._reader.read_lines(PIECE_EVENTS)
        if not self._pending:
            return False
        piece = LogObject(first=self.seq + 1, lines=tuple(self._pending), writer=self.writer)
        # Cases, if the key was taken:
        #
        #   writer    lines                     meaning
        #   we        the same                  the response to our first attempt was lost
        #   we        the first ones of ours    written before a crash; continue after them
        #   otherwise                           another writer has taken over: we are fenced
        found = self.chain.put_piece(piece)
        count = len(found.lines)
        if found.writer != self.writer or list(found.lines) != self._pending[:count]:
            raise FencedError(
                f"event {piece.first} of {self.chain.objects} was written by {found.writer}: the "
                "job continues there"
            )
        self._pending = self._pending[count:]
        self._record_written(found)
        return True

    def write_next(self, line: bytes) -> None:
        """Append a line to a fully uploaded log, first to the chain, then to the copy.

        Raises:
            FencedError: If another writer has taken over this log; nothing was written.
        """
        # Write to the chain first: if the key is taken, the copy must not change. After a crash
        # between the two writes, the copy lacks the line, and the next `LogCopy.fill` adds it.
        piece = LogObject(first=self.seq + 1, lines=(line,), writer=self.writer)
        found = self.chain.put_piece(piece)
        if found != piece:
            raise FencedError(
                f"event {piece.first} of {self.chain.objects} was written by {found.writer}"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._record_written(piece)
        self._reader, self._pending = None, []  # the reader has not seen this line

    def _record_written(self, piece: LogObject) -> None:
        for line in _status_lines(piece.lines):
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                self.facts |= {name: event[name] for name in _FACTS if name in event}
        if piece.first != self._began_at:
            self._own.append(piece.first)
        for line in piece.lines:
            if line.startswith(_EXHIBIT_EVENTS):
                with contextlib.suppress(ValueError, KeyError, TypeError, InvalidExhibitError):
                    self._note_exhibit(event_from_dict(json.loads(line)))
        self.seq = piece.last
        temporary = self._path.parent / f"{MARK_FILE}.tmp"
        mark = {"writer": self.writer, "seq": self.seq}
        temporary.write_text(json.dumps(mark), encoding="utf-8")
        temporary.replace(self._path.parent / MARK_FILE)

    def _note_exhibit(self, event: Any) -> None:
        if isinstance(event, ExhibitStored):
            key = exhibit_key(step=event.step, name=event.name, format=event.format)
            self._exhibits.append(("put", key))
        elif isinstance(event, ExhibitsRemoved):
            self._exhibits.extend(("delete", key) for key in event.files if is_exhibit_key(key))

    def upload_exhibits(self) -> None:
        """Upload and delete the files that uploaded events name.

        Called after the events are uploaded, because other machines wait for them, and a bucket
        that rejects an exhibit must not stop the log.

        Raises:
            RunStoreError: If the bucket rejects one; the next call retries it.
        """
        while self._exhibits:
            action, key = self._exhibits[0]
            if action == "delete":
                self.chain.objects.delete(key)
            else:
                try:
                    data = read_exhibit(self._path.parent, key)
                except OSError:
                    pass  # a file that has been removed since needs no upload
                else:
                    self.chain.objects.put(key, data)
            self._exhibits.popleft()

    def pack(self) -> None:
        """Write the packs that are due, and delete the objects that they contain."""
        if not self._packed:
            ends = [(size, first + size - 1) for first, size in self.chain.list_packs()]
            for size in PACKS:
                self._packed[size] = max((end for n, end in ends if n >= size), default=0)
        for size in PACKS:
            # Events that are in a larger pack need no smaller one.
            self._packed[size] = max(n for s, n in self._packed.items() if s >= size)
            while self._packed[size] + size <= self.seq:
                first = self._packed[size] + 1
                if not self._write_pack(first, size):
                    break
                self._packed[size] += size
                self._remove_packed(first, size)

    def _write_pack(self, first: int, size: int) -> bool:
        lines = _reader_after(self._path, first - 1).read_lines(size)
        if len(lines) != size:
            raise RunStoreError(f"{self._path} has fewer lines than were uploaded from it")
        if size == EVENTS_PER_SEGMENT:
            try:
                columns = (self._path.parent / columns_key(first)).read_bytes()
            except FileNotFoundError:
                return False  # the columns are still being written, so retry in the next round
            # Upload the columns before the pack, so that a reader that finds the pack also finds
            # them.
            self.chain.objects.put_if_absent(columns_key(first), columns)
        self.chain.put_pack(first, lines)
        return True

    def _remove_packed(self, first: int, size: int) -> None:
        # An object ends where our next one begins. If it starts before this pack, the previous pack
        # has its first events. An object that ends after this pack is kept.
        end = first + size
        following = [*self._own[1:], self.seq + 1]
        covered = [own for own, next_ in zip(self._own, following, strict=True) if next_ <= end]
        for own in covered:
            self.chain.objects.delete(piece_key(own))
            self._own.remove(own)
        if size == PACKS[0]:
            for start in range(first, end, PACKS[1]):
                self.chain.objects.delete(pack_key(start, PACKS[1]))

    def beat(self, *, has_ended: bool = False) -> None:
        """Write the job's status, which is also the writer's heartbeat.

        Readers compute its age from S3's clock only, so the clocks of the machines do not matter.
        """
        status = {
            **self.facts,
            "writer": self.writer,
            "host": platform.node(),
            "seq": self.seq,
            "has_ended": has_ended,
        }
        self.chain.objects.put(ALIVE, json.dumps(status).encode())


def _status_lines(lines: tuple[bytes, ...]) -> list[bytes]:
    # Thousands of lines may arrive at once, so parse only those with matching first bytes.
    steps = [n for n, line in enumerate(lines) if line.startswith(b'{"event":"StepCompleted"')]
    last = steps[-1] if steps else -1
    return [line for n, line in enumerate(lines) if n == last or line.startswith(_STATUS_EVENTS)]


def claim(copy: LogCopy, chain: Chain, *, job_id: str, end: int | None = None) -> Uploads:
    """Become the only writer of a log; the caller holds the lock of its copy.

    Events that only this machine has are uploaded first. Then the next key in the chain is claimed
    with a line that names the new writer. Only one of several writers can create this key.

    Args:
        copy: This machine's copy.
        chain: The log in the bucket.
        job_id: The job.
        end: The newest event when the log was found to have no writer; None to continue after
            whatever event is last, and to fence its writer.

    Raises:
        FencedError: If another process writes the log.
        RunStoreError: If the bucket cannot be read or written.
    """
    # Taking a log over, with --force, from a writer A that may still be running:
    #
    #   A                                        B (here)
    #   put log/...0041: written
    #   (paused, or cut off from its cluster)    fill the copy: 80 events
    #                                            put log/...0081, a line that names B: written
    #   put log/...0081: the key is taken by B
    #   FencedError: A stops writing             continues at event 82
    #
    # If A is faster and takes the key, B fills its copy again and tries the next one.
    writer = new_writer()
    for attempt in range(CLAIM_TRIES):
        uploads = Uploads(chain, copy.path, writer=writer, seq=copy.fill())
        try:
            # Events that never reached the bucket, from a killed writer on this machine.
            while uploads.upload():
                pass
            # The log has grown since the caller looked at it.
            if end is not None and uploads.seq != end:
                raise FencedError(f"it has {uploads.seq} events instead of {end}")
            text = f"From here on the log is written by {writer}"
            event = LogLine(
                job_id=job_id,
                time=time.time(),
                seq=uploads.seq + 1,
                level="info",
                worker="",
                text=text,
            )
            line = json.dumps(event.to_json_dict(), separators=(",", ":"), ensure_ascii=False)
            uploads.write_next(line.encode())
        except FencedError as exc:
            if attempt + 1 == CLAIM_TRIES or end is not None:
                raise FencedError(
                    f"the log of job {job_id} is being written by another process: {exc}. Nothing "
                    f"was changed. Follow the job with %etrain attach {job_id}, or add --force to "
                    "take it over"
                ) from exc
            copy.forget()  # compare again: the last events of the copy may not be in the log
        else:
            return uploads
    raise AssertionError("unreachable")


def new_writer() -> str:
    """Return a unique name for a writer."""
    return f"{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"


def _reader_after(path: Path, seq: int) -> LogReader:
    # Start at the end of the last finished segment before `seq`, whose byte position is known,
    # instead of counting lines from the beginning. (1 << 62: only the positions, no events.)
    offset = lines = 0
    for _, place in finished_segments(path, since=1 << 62):
        if lines + EVENTS_PER_SEGMENT > seq:
            break
        offset, lines = place.end, lines + EVENTS_PER_SEGMENT
    reader = LogReader(path, offset=offset, lines=lines)
    reader.skip(seq - lines)
    return reader


def _read_mark(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads((folder / MARK_FILE).read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        return {}
