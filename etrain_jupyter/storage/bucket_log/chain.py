"""A job's log in a bucket: a chain of objects, each written at most once.

::

    log/000000000041.jsonl       events from seq 41 up to the next object's first event
    packs/000000000001-000000001000.jsonl.gz         older events: 1,000 of them, later 20,000
    events.segments/000000000001-000000020000.npz    the latter as columns

An object of ``log/`` is named after its first event and written only if its key is free. This
fences writers: a writer that continues from the end of the log cannot create the next object if
another writer has already done so. Packs are copies. After writing a pack, its writer deletes the
objects of ``log/`` that the pack contains. It keeps the first object of each writer, so that the
keys at which other writers were fenced stay taken.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from etrain_jupyter.errors import RunStoreError
from etrain_jupyter.log.segments import EVENTS_PER_SEGMENT
from etrain_jupyter.storage.bucket_log.objects import RunObjects

PIECE_EVENTS = 1_000
"""Maximum events in one object of ``log/``."""
PACKS = (EVENTS_PER_SEGMENT, 1_000)
"""Events per pack, larger first; smaller packs are deleted once a larger one exists."""
_MAX_PACK_BYTES = 512 * 1024 * 1024
FETCH_THREADS = 8
_RELISTS = 3  # consecutive listings without progress before an event counts as missing
_PIECE_KEY = re.compile(r"log/(\d{12})\.jsonl")
_PACK_KEY = re.compile(r"packs/(\d{12})-(\d{12})\.jsonl\.gz")


@dataclass(frozen=True, kw_only=True)
class LogObject:
    """Content of one object of ``log/``."""

    first: int
    """``seq`` of its first event."""
    lines: tuple[bytes, ...]
    """Events as in ``events.jsonl``, without line endings."""
    writer: str
    """Name of the writer."""

    @property
    def last(self) -> int:
        """``seq`` of its last event."""
        return self.first + len(self.lines) - 1

    def to_bytes(self) -> bytes:
        """Return the object's bytes: a header line, then the events."""
        body = b"".join(line + b"\n" for line in self.lines)
        head = {
            "etrain": "log",
            "first": self.first,
            "count": len(self.lines),
            "writer": self.writer,
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        return json.dumps(head).encode() + b"\n" + body


def piece_key(first: int) -> str:
    """Return the key of the object whose first event is ``first``."""
    return f"log/{first:012d}.jsonl"


def pack_key(first: int, size: int) -> str:
    """Return the key of a pack."""
    return f"packs/{first:012d}-{first + size - 1:012d}.jsonl.gz"


def columns_key(first: int) -> str:
    """Return the key of a large pack's columns: their file name in a run folder."""
    return f"events.segments/{first:012d}-{first + EVENTS_PER_SEGMENT - 1:012d}.npz"


class Chain:
    """The log of one job; safe to use from several threads."""

    def __init__(self, objects: RunObjects) -> None:
        self.objects = objects

    def read_piece(self, first: int) -> LogObject | None:
        """Return the object whose first event is ``first``; None if there is none.

        Raises:
            RunStoreError: If it is truncated, or not part of a log.
        """
        key = piece_key(first)
        data = self.objects.get(key)
        if data is None:
            return None
        head_line, _, body = data.partition(b"\n")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            head = json.loads(head_line)
            lines = tuple(body.split(b"\n")[:-1])
            known = (first, len(lines), hashlib.sha256(body).hexdigest())
            if (head["first"], head["count"], head["sha256"]) == known and lines:
                return LogObject(first=first, lines=lines, writer=str(head["writer"]))
        raise self._incomplete(
            key, first, "; remove that object and those after it to continue from there"
        )

    def put_piece(self, piece: LogObject) -> LogObject:
        """Write an object if its key is free; return the object that the key then holds."""
        for _ in range(_RELISTS):
            if self.objects.put_if_absent(piece_key(piece.first), piece.to_bytes()):
                return piece
            # The object may be our own, if the response to the first attempt was lost; the caller
            # checks that. It may also have been deleted in between: retry in that case.
            found = self.read_piece(piece.first)
            if found is not None:
                return found
        raise RunStoreError(f"{self.objects}/{piece_key(piece.first)} exists and cannot be read")

    def list_pieces(self, seq: int) -> list[int]:
        """Return the sorted first events of the objects that may contain ``seq`` or later ones."""
        # An object with `seq` begins at most PIECE_EVENTS earlier. Starting the listing there keeps
        # it short, however long the log is.
        before = max(0, seq - PIECE_EVENTS)
        found = (_PIECE_KEY.fullmatch(k) for k in self.objects.keys("log", after=piece_key(before)))
        return [int(match[1]) for match in found if match]

    def list_packs(self) -> list[tuple[int, int]]:
        """Return the first event and size of each pack, in order, larger packs first."""
        found = (_PACK_KEY.fullmatch(key) for key in self.objects.keys("packs"))
        pairs = [(int(m[1]), int(m[2]) - int(m[1]) + 1) for m in found if m]
        return sorted((p for p in pairs if p[1] in PACKS), key=lambda p: (p[0], -p[1]))

    def read_pack(self, first: int, size: int) -> list[bytes] | None:
        """Return the lines of a pack; None if it does not exist.

        Raises:
            RunStoreError: If it is truncated.
        """
        key = pack_key(first, size)
        data = self.objects.get(key)
        if data is None:
            return None
        try:
            # A small object can expand a thousandfold, and its writer may be hostile. Stop at the
            # limit, where `eof` is still False. (wbits=31 selects the gzip format.)
            unpacker = zlib.decompressobj(wbits=31)
            unpacked = unpacker.decompress(data, _MAX_PACK_BYTES)
            lines = unpacked.split(b"\n")[:-1] if unpacker.eof else []
        except zlib.error:
            lines = []
        if len(lines) != size:
            raise self._incomplete(key, first)
        return lines

    def _incomplete(self, key: str, first: int, hint: str = "") -> RunStoreError:
        return RunStoreError(
            f"{self.objects}/{key} is not a complete part of a log. The {first - 1} events before "
            f"it are complete and can be read{hint}"
        )

    def put_pack(self, first: int, lines: Sequence[bytes]) -> None:
        """Write a pack if it does not exist."""
        # Without a time stamp, all writers produce the same bytes, so any of them may win.
        data = gzip.compress(b"".join(line + b"\n" for line in lines), 3, mtime=0)
        self.objects.put_if_absent(pack_key(first, len(lines)), data)

    def read_from(self, seq: int) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield the log's parts, each with its first event, from the one that contains ``seq``.

        Raises:
            RunStoreError: If a part is missing or truncated, after yielding those before it.
        """
        # The writer packs while we read:
        #
        #   reader                                    writer
        #   list packs/ and log/
        #                                             put packs/...0001-...1000
        #                                             delete log/...0041 and others in it
        #   get log/...0041: missing, a gap
        #   list again: the pack has the events
        #
        # A gap that remains after several listings is real.
        at, num_tries = seq, 0
        while True:
            started_at = at
            for first, lines in self._read_listed(at):
                yield first, lines
                at = first + len(lines)
            if at > started_at:
                num_tries = 0
            newest = self.list_pieces(at)
            if not newest or newest[-1] < at:
                return  # the end of the log: no object begins after the last event that was read
            num_tries += 1
            if num_tries == _RELISTS:
                raise RunStoreError(
                    f"event {at} of the log is missing: {self.objects} contains neither "
                    f"{piece_key(at)} nor a pack with it, but events from {newest[-1]} on. The "
                    "events before the gap are complete"
                )

    def _read_listed(self, seq: int) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield the parts that are listed now, from ``seq`` up to the first gap."""
        packs = self.list_packs()
        pieces = self.list_pieces(seq)
        at = seq
        for first, size in packs:
            if first <= at < first + size:
                lines = self.read_pack(first, size)
                if lines is None:
                    return
                yield first, lines
                at = first + size
        with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="etrain-runs") as pool:
            # Of the objects that begin at or before the wanted event, only the last can contain it.
            begins = [first for first in pieces if first <= at][-1:]
            wanted = begins + [first for first in pieces if first > at]
            # Fetch in batches, so that a consumer that stops early does not fetch the whole log.
            for start in range(0, len(wanted), 8 * FETCH_THREADS):
                batch = wanted[start : start + 8 * FETCH_THREADS]
                for piece in pool.map(self.read_piece, batch):
                    if piece is None or piece.first > at:
                        return
                    if piece.last >= at:
                        yield piece.first, piece.lines
                        at = piece.last + 1

    def end(self) -> tuple[int, bytes]:
        """Return the last event's ``seq`` and line; 0 and ``b""`` if the log is empty."""
        packs = self.list_packs()
        pieces = self.list_pieces(packs[-1][0] if packs else 0)
        start = max([1, *pieces[-1:], *(first for first, _ in packs[-1:])])
        last: tuple[int, bytes] = (0, b"")
        for first, lines in self.read_from(start):
            last = (first + len(lines) - 1, lines[-1])
        return last
