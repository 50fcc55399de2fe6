"""Read recorded spot markets from files.

======================  ============================================================================
format                  one line, or the file
======================  ============================================================================
``seconds,capacity``    our own CSV with a header; optional columns ``zone`` and ``spot_usd``
Bamboo                  ``480000,add,node1``: milliseconds, ``add`` or ``remove``, node
Parcae, counts          ``60000,19``: milliseconds, machines
Parcae, events          ``[0, "add", {"nodes": ["node-0", ...]}]``, one JSON list a line
polled                  ``2021-12-10, 13:07:45, 80``: date, time, machines
SkyPilot spot-traces    ``{"metadata": {"gap_seconds": 300}, "data": [16, 16, 12, ...]}``
======================  ============================================================================

A polled file may have gaps: hours in which nothing was recorded. Our own CSV marks a gap by an
empty capacity. The caller chooses what to assume there.
"""

from __future__ import annotations

import csv
import json
import random
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from etrain_jupyter.errors import TraceError
from etrain_jupyter.plugins.ec2.ledger import Point
from etrain_jupyter.plugins.planner.simulation.trace import Slot, SpotTrace

ZONE = "zone-a"
"""Zone of a trace that names none."""
MAX_BYTES = 200_000_000
SUFFIXES = (".csv", ".json", ".txt")
LEAST_GAP_S = 1800.0
GAP_BY_MEDIAN = 10.0
"""A polled file has a gap where the interval is this many times the median interval."""
PARCAE_TICK_S = 60.0
"""Interval of Parcae's event files, which have no entry for their end."""

Gaps = Literal["error", "hold", "cut"]
"""Assumption about a gap: refuse the trace, capacity as before the gap, or leave the time out."""
GAPS: tuple[Gaps, ...] = ("error", "hold", "cut")

HEADER = ("seconds", "zone", "capacity", "spot_usd")
_POLLED = re.compile(r"(\d{4}-\d\d-\d\d), *(\d\d:\d\d:\d\d), *(\d+)")


@dataclass
class _Count:
    """Capacity of a zone from a time on; None if it is unknown."""

    at_s: float
    zone: str
    capacity: int | None


@dataclass
class _Recording:
    """Contents of a file: counts, or machines by name."""

    end_s: float = 0.0
    counts: list[_Count] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    is_capacity: bool = False
    """True if the counts are EC2's capacity; otherwise each decrease is an interruption."""
    prices: dict[str, list[Point]] = field(default_factory=dict)


def read_trace(path: str | Path, *, gaps: Gaps = "error") -> SpotTrace:
    """Read a trace in any known format.

    Args:
        path: The file.
        gaps: Assumption about times at which nothing was recorded.

    Raises:
        TraceError: If the file is missing, has an unknown format or an invalid line, or has gaps
            with ``gaps="error"``.
    """
    path = Path(path)
    lines = _read_lines(path)
    recording = _reader_of(lines, path)(lines, path)
    recording = _without_gaps(recording, path, gaps)
    recording.slots += _slots_of(recording)
    start_s = min((slot.since_s for slot in recording.slots), default=0.0)
    if recording.counts:
        start_s = min(one.at_s for one in recording.counts)
    length_s = recording.end_s - start_s
    if length_s <= 0 or not recording.slots:
        raise TraceError(
            f"The trace {path} contains no machine over any time, so nothing was simulated.",
            hint="a trace needs at least two times, and a capacity above 0 at one of them",
        )
    moved = (
        replace(one, since_s=one.since_s - start_s, until_s=one.until_s - start_s)
        for one in recording.slots
        if one.until_s > one.since_s
    )
    return SpotTrace(
        name=path.stem,
        length_s=length_s,
        slots=tuple(sorted(moved, key=lambda slot: (slot.since_s, slot.zone, slot.until_s))),
        prices={
            zone: tuple((at - start_s, usd) for at, usd in points)
            for zone, points in recording.prices.items()
        },
    )


def _read_lines(path: Path) -> list[str]:
    hint = "%etrain simulate --trace FILE; docs: how-to/simulate-a-policy"
    try:
        if path.is_dir():
            raise TraceError(f"{path} is a folder, so nothing was simulated.", hint=hint)
        if path.stat().st_size > MAX_BYTES:
            raise TraceError(f"{path} is larger than {MAX_BYTES:,} bytes. Nothing was read.")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES)
        there = f" Its folder contains {', '.join(near[:8])}." if near else ""
        raise TraceError(
            f"The trace {path} does not exist, so nothing was simulated.{there}", hint=hint
        ) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise TraceError(
            f"The trace {path} cannot be read: {exc}. Nothing was simulated.", hint=hint
        ) from exc
    lines = text.splitlines()
    if not _numbered(lines):
        raise TraceError(f"The trace {path} is empty, so nothing was simulated.", hint=hint)
    return lines


def _numbered(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Return the lines that are not empty, with their numbers."""
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


_Reader = Callable[[Sequence[str], Path], _Recording]


def _reader_of(lines: Sequence[str], path: Path) -> _Reader:
    first = _numbered(lines)[0][1]
    if first.startswith("{"):
        return _read_skypilot
    if first.startswith("["):
        return _read_parcae_events
    if _POLLED.fullmatch(first):
        return _read_polled
    if re.fullmatch(r"\d+,(add|remove),.+", first):
        return _read_bamboo
    if re.fullmatch(r"\d+,\d+", first):
        return _read_parcae_counts
    columns = [word.strip() for word in first.split(",")]
    if {"seconds", "capacity"} <= set(columns) <= set(HEADER):
        return _read_own
    raise TraceError(
        f"The format of the trace {path} is unknown: it starts with {first[:60]!r}. Nothing was "
        "simulated.",
        hint=f"write a CSV file with the header {','.join(HEADER)}; zone and spot_usd are optional",
    )


# --- formats ---


def _read_own(lines: Sequence[str], path: Path) -> _Recording:
    rows = csv.DictReader(lines, skipinitialspace=True)
    recording = _Recording(is_capacity=True)
    last_s = 0.0
    for row in rows:
        number = rows.line_num
        at = _number(row.get("seconds"), path, number, "seconds")
        if at < last_s:
            raise _invalid(
                path, number, f"seconds {at:g} is before {last_s:g} of the line above", "sort them"
            )
        last_s = at
        zone = (row.get("zone") or ZONE).strip() or ZONE
        text = (row.get("capacity") or "").strip()
        capacity = None
        if text:
            value = _number(text, path, number, "capacity")
            if value != int(value) or value < 0:
                raise _invalid(path, number, f"capacity {text} is not a whole number of 0 or more")
            capacity = int(value)
        recording.counts.append(_Count(at_s=at, zone=zone, capacity=capacity))
        if (row.get("spot_usd") or "").strip():
            usd = _number(row["spot_usd"], path, number, "spot_usd")
            recording.prices.setdefault(zone, []).append((at, usd))
    recording.end_s = last_s
    return recording


def _read_bamboo(lines: Sequence[str], path: Path) -> _Recording:
    def events() -> Iterator[tuple[float, str, Sequence[str]]]:
        for number, line in _numbered(lines):
            parts = [part.strip() for part in line.split(",")]
            if len(parts) != 3 or parts[1] not in ("add", "remove"):
                raise _invalid(path, number, f"{line[:60]!r} is not milliseconds,add|remove,node")
            yield _number(parts[0], path, number, "milliseconds") / 1e3, parts[1], parts[2:]

    return _of_events(events())


def _read_parcae_events(lines: Sequence[str], path: Path) -> _Recording:
    def events() -> Iterator[tuple[float, str, Sequence[str]]]:
        for number, line in _numbered(lines):
            try:
                at, kind, more = json.loads(line)
                yield float(at) / 1e3, str(kind), [str(name) for name in more["nodes"]]
            except (ValueError, TypeError, KeyError) as exc:
                raise _invalid(
                    path, number, f'{line[:60]!r} is not [ms, "add", {{"nodes": [...]}}]'
                ) from exc

    return _of_events(events(), more_s=PARCAE_TICK_S)


def _of_events(
    events: Iterable[tuple[float, str, Sequence[str]]], *, more_s: float = 0.0
) -> _Recording:
    since: dict[str, float] = {}
    recording = _Recording()
    for at, kind, names in events:
        for name in names:
            if kind == "add":
                since.setdefault(name, at)
            # Other kinds repeat the state without a change.
            elif kind == "remove" and name in since:
                recording.slots.append(Slot(zone=ZONE, since_s=since.pop(name), until_s=at))
        recording.end_s = max(recording.end_s, at)
    recording.end_s += more_s
    recording.slots += [
        Slot(zone=ZONE, since_s=at, until_s=recording.end_s) for at in since.values()
    ]
    return recording


def _read_parcae_counts(lines: Sequence[str], path: Path) -> _Recording:
    counts = []
    for number, line in _numbered(lines):
        at, _, count = line.partition(",")
        at_s = _number(at, path, number, "milliseconds") / 1e3
        machines = int(_number(count, path, number, "machines"))
        counts.append(_Count(at_s=at_s, zone=ZONE, capacity=machines))
    counts.sort(key=lambda one: one.at_s)
    return _Recording(end_s=counts[-1].at_s, counts=counts)


def _read_polled(lines: Sequence[str], path: Path) -> _Recording:
    counts: list[_Count] = []
    for number, line in _numbered(lines):
        match = _POLLED.fullmatch(line)
        if match is None:
            raise _invalid(path, number, f"{line[:60]!r} is not date, time, machines")
        at = datetime.fromisoformat(f"{match[1]} {match[2]}+00:00").timestamp()
        # Some pollers repeat a count with times in the future. A later line replaces them.
        while counts and counts[-1].at_s >= at:
            counts.pop()
        counts.append(_Count(at_s=at, zone=ZONE, capacity=int(match[3])))
    times = [one.at_s for one in counts]
    between = [b - a for a, b in pairwise(times)]
    usual = statistics.median(between) if between else 0.0
    marked: list[_Count] = []
    for one in counts:
        # Assume that the last count was valid for one more interval.
        if marked and one.at_s - marked[-1].at_s > max(LEAST_GAP_S, GAP_BY_MEDIAN * usual):
            marked.append(_Count(at_s=marked[-1].at_s + usual, zone=ZONE, capacity=None))
        marked.append(one)
    return _Recording(end_s=times[-1], counts=marked)


def _read_skypilot(lines: Sequence[str], path: Path) -> _Recording:
    try:
        data: Any = json.loads("\n".join(lines))
        step_s = float(data["metadata"]["gap_seconds"])
        values = [None if value is None else int(value) for value in data["data"]]
    except (ValueError, TypeError, KeyError) as exc:
        raise TraceError(
            f"The trace {path} is JSON, but not of SkyPilot's spot-traces ({exc!r}). Nothing was "
            "simulated.",
            hint='it needs {"metadata": {"gap_seconds": 300}, "data": [16, 12, ...]}',
        ) from exc
    counts = [
        _Count(at_s=number * step_s, zone=ZONE, capacity=value)
        for number, value in enumerate(values)
    ]
    return _Recording(end_s=len(values) * step_s, counts=counts, is_capacity=True)


# --- gaps ---


def _without_gaps(recording: _Recording, path: Path, gaps: Gaps) -> _Recording:
    found = _gaps_of(recording)
    if not found:
        return recording
    if gaps == "error":
        first, last = found[0]
        total_h = sum(b - a for a, b in found) / 3600
        number = "1 gap" if len(found) == 1 else f"{len(found)} gaps"
        origin = recording.counts[0].at_s
        hours = (recording.end_s - origin) / 3600
        raise TraceError(
            f"The trace {path} has {number}, {total_h:.1f} h of {hours:.1f} h: the "
            f"first is from {(first - origin) / 3600:.2f} h to {(last - origin) / 3600:.2f} h. "
            "Nothing was simulated.",
            hint="--gaps hold assumes the capacity before each gap; --gaps cut leaves the gaps out",
        )
    known = [one for one in recording.counts if one.capacity is not None]
    if gaps == "hold":
        return replace(recording, counts=known)

    def moved(at: float) -> float:
        return at - sum(min(at, b) - a for a, b in found if at > a)

    return replace(
        recording,
        end_s=moved(recording.end_s),
        counts=[_Count(at_s=moved(c.at_s), zone=c.zone, capacity=c.capacity) for c in known],
        prices={
            zone: [(moved(at), usd) for at, usd in points]
            for zone, points in recording.prices.items()
        },
    )


def _gaps_of(recording: _Recording) -> list[tuple[float, float]]:
    """Return the times at which the capacity of any zone is unknown, merged."""
    spans: list[tuple[float, float]] = []
    open_since: dict[str, float] = {}
    for one in recording.counts:
        if one.capacity is None:
            open_since.setdefault(one.zone, one.at_s)
        elif one.zone in open_since:
            spans.append((open_since.pop(one.zone), one.at_s))
    spans += [(since, recording.end_s) for since in open_since.values()]
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def _slots_of(recording: _Recording) -> list[Slot]:
    """Return machines for counts.

    When a count falls, the machines of the highest ranks end if the counts are EC2's capacity;
    otherwise, randomly chosen machines end.
    """
    # Counts do not say which machines EC2 reclaimed. A fixed seed gives the same trace each time.
    rng = random.Random(0)
    alive: dict[str, list[float]] = {}
    slots: list[Slot] = []

    def end(zone: str, number: int, at: float) -> None:
        rank = number if recording.is_capacity else None
        since = alive[zone].pop(number)
        if at > since:
            slots.append(Slot(zone=zone, since_s=since, until_s=at, rank=rank))

    for one in recording.counts:
        here = alive.setdefault(one.zone, [])
        capacity = one.capacity or 0
        while len(here) > capacity:
            last = len(here) - 1
            end(one.zone, last if recording.is_capacity else rng.randrange(last + 1), one.at_s)
        here += [one.at_s] * (capacity - len(here))
    for zone, here in alive.items():
        while here:
            end(zone, len(here) - 1, recording.end_s)
    return slots


# --- errors ---


def _number(text: str | None, path: Path, line: int, what: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise _invalid(path, line, f"{what} {text!r} is not a number of 0 or more")
    return value


def _invalid(path: Path, line: int, why: str, hint: str = "") -> TraceError:
    return TraceError(f"Line {line} of the trace {path}: {why}. Nothing was simulated.", hint=hint)
