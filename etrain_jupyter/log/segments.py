"""Store finished parts of a log as columns in separate files, so that a long log loads in a second.

::

    events.jsonl                                   every event, one per line; always kept
    events.segments/000000000001-000000020000.npz  lines 1 to 20,000 as columns
                    000000020001-000000040000.npz  ...

A segment is a copy that may be deleted at any time. It is written once and never changes. It
records the position of its lines in the log and a checksum of the last line. If these do not match,
the lines are read instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.blocks import Block, Events, pack, step_columns
from etrain_jupyter.log.event_log import LogReader, parse_lines
from etrain_jupyter.log.events import Event, StepCompleted
from etrain_jupyter.untrusted import create_file, open_regular

EVENTS_PER_SEGMENT = 20_000
"""The part of a log after its last segment is shorter than a segment, so it is read in a few tenths
of a second."""
FORMAT = 1
_READ_EVENTS = 5_000
_ABANDONED_AFTER_S = (
    3600.0  # an unfinished segment this old is abandoned: writing one takes a second
)
# Exceptions raised when a damaged segment is opened or read.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, IndexError),
    *(MemoryError, OverflowError, RecursionError, zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True, kw_only=True)
class SegmentLocation:
    """Position of a segment's lines in the log."""

    begin: int
    """Byte offset of the first line."""
    end: int
    """Byte offset of the end of the last line."""
    last_line: int
    """CRC-32 of the last line, with which the segment is matched to this log."""


def segments_of(log_path: Path) -> Path:
    """Return the folder of a log's segments."""
    return log_path.with_suffix(".segments")


def read_log(path: str | os.PathLike[str], *, since: int = 0) -> Events:
    """Return the events of a log with ``seq > since``, from its segments and then its lines.

    A last line that a crash has truncated is skipped; a missing file counts as empty.

    Raises:
        EtrainError: If a complete line outside all segments is not an event: the file is damaged.
    """
    log_path, events = Path(path), Events()
    # lines 1 to 20,000    20,001 to 40,000    40,001 ...          since=25,000:
    #       skipped        from its segment    read as lines       ``after`` drops 20,001 to 25,000
    offset = num_lines = 0
    for block, place in finished_segments(log_path, since=since):
        if block is not None:
            events.add_block(block)
        offset, num_lines = place.end, num_lines + EVENTS_PER_SEGMENT
    reader = LogReader(log_path, offset=offset, lines=num_lines)
    while news := reader.read(_READ_EVENTS):
        events.extend(news)
    return events.after(since) if since else events


def finished_segments(
    log_path: Path, *, since: int = 0
) -> Iterator[tuple[Block | None, SegmentLocation]]:
    """Yield a log's segments with their positions, up to the first missing or unusable one.

    For segments without events after ``since``, the block is omitted.
    """
    end = first = 0
    while True:
        # Open by name instead of listing the folder, because segments after a missing one are not
        # used.
        path = segments_of(log_path) / _name_of(first + 1)
        try:
            with _open_segment(path) as file:
                place = _place_in(file, first + 1)
                if place.begin != end or not _is_in_log(place, log_path):
                    return
                last = first + EVENTS_PER_SEGMENT
                block = _block_in(file) if last > since else None
        except _UNREADABLE:
            return
        yield block, place
        first, end = last, place.end


def compact(log_path: Path) -> int:
    """Write the missing segments of a log; return how many were written.

    The process may be killed at any time, and several processes may call this at the same time.

    Raises:
        EtrainError: If a line is not an event, or if a segment does not reproduce its lines.
    """
    num_done = num_new = end = 0
    for _, place in finished_segments(log_path, since=1 << 62):  # only positions, no blocks
        num_done, end = num_done + 1, place.end
    while True:
        reader = LogReader(log_path, offset=end, lines=(num_done + num_new) * EVENTS_PER_SEGMENT)
        # A durable segment must not contain lines that a machine crash could remove.
        _sync(log_path)
        begin, first = reader.position[0], reader.position[1] + 1
        lines = reader.read_lines(EVENTS_PER_SEGMENT)
        if len(lines) < EVENTS_PER_SEGMENT:
            return num_new
        end = reader.position[0]
        events = parse_lines(lines, log_path, first)
        block = pack(events, _lines_to_keep(lines, events))
        place = SegmentLocation(begin=begin, end=end, last_line=zlib.crc32(lines[-1]))
        _write(segments_of(log_path) / _name_of(first), block, place, events)
        num_new += 1


def _lines_to_keep(lines: list[bytes], events: list[Event]) -> dict[int, bytes]:
    # Keep other events, and steps with fields from a newer version, because columns would drop
    # these fields.
    known = {"event", "job_id", "seq", "metrics", *step_columns()}
    return {
        place: line
        for place, (line, event) in enumerate(zip(lines, events, strict=True))
        if not isinstance(event, StepCompleted) or not json.loads(line).keys() <= known
    }


def _write(path: Path, block: Block, place: SegmentLocation, events: list[Event]) -> None:
    # write under a hidden name -> fsync -> read back and compare -> rename -> fsync the folder
    # If the process is killed before the rename, the hidden file remains until
    # ``_remove_abandoned``. Processes that write at the same time write the same events, so it does
    # not matter which one renames last.
    path.parent.mkdir(exist_ok=True)
    _remove_abandoned(path.parent)
    hidden = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        with create_file(hidden) as file:
            np.savez(file, **_arrays_of(block, place))
            file.flush()
            os.fsync(file.fileno())
        with _open_segment(hidden) as written:
            is_same = _place_in(written, block.first_seq) == place
            if not is_same or not _reproduces(_block_in(written), events):
                raise EtrainError(
                    f"{path} would not reproduce its lines, so it was not written. "
                    "The log is complete without it."
                )
        hidden.rename(path)
        _sync(path.parent)
    finally:
        hidden.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    # Files left by killed writers. Recent ones may belong to a running process.
    for left in folder.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it first
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
                left.unlink()


@contextlib.contextmanager
def _open_segment(path: Path) -> Iterator[Any]:
    # Open the file here, because numpy would leave an invalid file open. Never unpickle, because a
    # log may come from any user.
    with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
        # Segments are never compressed. Reject compressed files, because they may expand to any
        # size.
        if any(one.compress_type != zipfile.ZIP_STORED for one in arrays.zip.infolist()):
            raise ValueError(f"{path} is compressed")
        yield arrays


def _reproduces(block: Block, events: list[Event]) -> bool:
    # Compare by ``repr``, because NaN is not equal to itself.
    pairs = zip(block.events(), events, strict=True)
    return block.num_events == len(events) and all(repr(one) == repr(two) for one, two in pairs)


def _arrays_of(block: Block, place: SegmentLocation) -> dict[str, Any]:
    facts = {
        "format": FORMAT,
        "job_id": block.job_id,
        "first_seq": block.first_seq,
        "num_events": block.num_events,
        "metric_sets": block.metric_sets,
        "metrics": list(block.metrics),
        **vars(place),
    }
    return {
        "facts": _as_bytes(json.dumps(facts).encode()),
        "others": _as_bytes(b"\n".join(block.others)),
        "places": block.places,
        "metric_set": block.metric_set,
        **{f"column.{name}": column for name, column in block.columns.items()},
        # Metrics are stored by number, because a metric may have any name.
        **{f"metric.{i}": column for i, column in enumerate(block.metrics.values())},
    }


def _facts_in(file: Any) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(file["facts"].tobytes())
    if facts["format"] != FORMAT:
        raise ValueError(f"unknown segment format {facts['format']}")
    return facts


def _place_in(file: Any, first_seq: int) -> SegmentLocation:
    facts = _facts_in(file)
    if (facts["first_seq"], facts["num_events"]) != (first_seq, EVENTS_PER_SEGMENT):
        raise ValueError(f"it has {facts['num_events']} events from {facts['first_seq']} on")
    return SegmentLocation(begin=facts["begin"], end=facts["end"], last_line=facts["last_line"])


def _block_in(file: Any) -> Block:
    facts = _facts_in(file)
    others = file["others"].tobytes()
    return Block(
        job_id=facts["job_id"],
        first_seq=facts["first_seq"],
        num_events=facts["num_events"],
        places=file["places"],
        columns={name: file[f"column.{name}"] for name in step_columns()},
        metric_sets=tuple(map(tuple, facts["metric_sets"])),
        metric_set=file["metric_set"],
        metrics={name: file[f"metric.{i}"] for i, name in enumerate(facts["metrics"])},
        others=tuple(others.split(b"\n")) if others else (),
    )


def _is_in_log(place: SegmentLocation, log_path: Path) -> bool:
    # Checking the last line suffices, because the log is append-only.
    with open_regular(log_path) as file:
        start = max(0, place.begin, place.end - _MAX_TAIL_BYTES)
        file.seek(start)
        data = file.read(place.end - start)
    if len(data) < place.end - start or not data.endswith(b"\n"):
        return False
    last = data[data.rfind(b"\n", 0, -1) + 1 : -1]
    return zlib.crc32(last) == place.last_line


# Number of bytes in which to search for the last line. If that line is longer (for example a
# traceback), the lines are read instead of the segment.
_MAX_TAIL_BYTES = 4 * 1024 * 1024


def _name_of(first_seq: int) -> str:
    return f"{first_seq:012d}-{first_seq + EVENTS_PER_SEGMENT - 1:012d}.npz"


def _as_bytes(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


def _sync(path: Path) -> None:
    # Make a file, or the names in a folder, durable. A missing path is ignored.
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
