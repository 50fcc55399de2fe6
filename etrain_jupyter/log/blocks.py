"""Columnar storage of steps, for logs with a million steps: in memory, in segments, and in folds.

A step takes about 90 bytes in columns, compared with more than 1,000 as an object. A ``Block`` is a
contiguous part of a log: its steps as columns, and the other events between them as JSON lines. It
reproduces its events exactly, because a step that does not fit into the columns (for example
because a number is too large) is also kept as a line.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.log.events import Event, StepCompleted, event_from_dict

Column: TypeAlias = NDArray[Any]

# Step fields that are not columns: a block stores job, position and metrics separately.
_NOT_COLUMNS = frozenset({"job_id", "seq", "metrics"})

_DTYPES: dict[str, Any] = {"int": np.int64, "float": np.float64, "bool": np.bool_}
_INT_TYPES = (np.int8, np.int16, np.int32, np.int64)
FORGOTTEN = "..."
"""Placeholder for the text of a log line that is not kept in memory; it is still in the job's
log."""

_LOG_LINE = b'{"event":"LogLine"'
_FORGOTTEN_BEGIN = b"{ "  # start of a line without its text; not counted as a log line again
_FEW_ROWS = 8  # a shorter run of rows is cheaper as events than as columns

encode_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@functools.cache
def step_columns() -> dict[str, type]:
    """Return the fields of a step that are columns, with their types."""
    types = {"int": int, "float": float, "bool": bool}
    fields = dataclasses.fields(StepCompleted)
    return {f.name: types[str(f.type)] for f in fields if f.name not in _NOT_COLUMNS}


@dataclass(frozen=True, kw_only=True)
class Block:
    """Events ``first_seq`` to ``last_seq`` of one job's log."""

    job_id: str
    first_seq: int
    num_events: int
    places: Column
    """Position of each step, relative to ``first_seq``; the other positions are ``others``."""
    columns: Mapping[str, Column]
    """The fields of the steps, by name."""
    metric_sets: tuple[tuple[str, ...], ...]
    """The distinct combinations of metrics measured by steps in this block."""
    metric_set: Column
    """Index into ``metric_sets`` for each step."""
    metrics: Mapping[str, Column]
    """Values by metric; NaN for steps without this metric."""
    others: tuple[bytes, ...]
    """The other events, as lines of the log, in order."""

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event."""
        return self.first_seq + self.num_events - 1

    @functools.cached_property
    def num_lines(self) -> int:
        """Number of log lines whose texts are kept."""
        return sum(map(_is_log_line, self.others))

    def without_texts(self) -> Block:
        """Return the block without the texts of its log lines, which take most of its memory."""
        if not self.num_lines:
            return self
        # All lines share one object without a sequence number; ``_other`` derives the number.
        first = next(line for line in self.others if _is_log_line(line))
        values = json.loads(first) | {"worker": "", "text": FORGOTTEN, "seq": 0}
        stub = _FORGOTTEN_BEGIN + encode_json(values)[1:].encode("utf-8", "surrogatepass")
        others = tuple(stub if _is_log_line(line) else line for line in self.others)
        return dataclasses.replace(self, others=others)

    def events(self, start: int = 0, stop: int | None = None) -> Iterator[Event]:
        """Rebuild the events from position ``start`` up to, but excluding, ``stop``."""
        # place   0      1     2     3      4        places = [1, 2, 4]
        #         other  step  step  other  step     at place 3 two steps precede: others[3 - 2]
        stop = self.num_events if stop is None else min(stop, self.num_events)
        row, end = (int(found) for found in np.searchsorted(self.places, (start, stop)))
        steps = self._steps(row, end)
        places = iter(self.places[row:end].tolist())
        due = next(places, stop)
        for place in range(start, stop):
            if place == due:
                yield next(steps)
                row, due = row + 1, next(places, stop)
            else:
                yield self._other(place - row, row)

    def runs(self) -> Iterator[Event | StepRun]:
        """Return the same events, with consecutive similar steps as one ``StepRun``."""
        row = other = 0
        bounds = self._run_ends()
        for end in [*bounds, len(self.places)]:
            if row < end:
                before = int(self.places[row]) - row  # other events before this run
                yield from (self._other(number, row) for number in range(other, before))
                other = before
                yield from self._run(row, end)
            row = end
        yield from (self._other(number, row) for number in range(other, len(self.others)))

    def _other(self, number: int, num_steps: int) -> Event:
        """Rebuild one of ``others``, which comes after ``num_steps`` steps."""
        event = event_from_dict(json.loads(self.others[number]))
        return event if event.seq else event.with_seq(self.first_seq + number + num_steps)

    def _run(self, start: int, end: int) -> Iterator[Event | StepRun]:
        if end - start < _FEW_ROWS:
            yield from self._steps(start, end)
        else:
            yield StepRun(block=self, start=start, end=end)

    def _run_ends(self) -> list[int]:
        # A run must not hide anything that a fold needs. It therefore ends at another event, at a
        # repeated step, and where a value changes that a panel or an audit checks.
        if len(self.places) < 2:
            return []
        columns = self.columns
        is_end = np.diff(self.places) != 1
        is_end |= np.diff(columns["step"].astype(np.int64)) <= 0  # int8 would overflow
        for name in ("generation", "world_size", "ranks_agree", "skipped"):
            is_end |= columns[name][1:] != columns[name][:-1]
        is_end |= self.metric_set[1:] != self.metric_set[:-1]
        ends: list[int] = (np.flatnonzero(is_end) + 1).tolist()
        return ends

    def _steps(self, start: int, end: int) -> Iterator[StepCompleted]:
        # ``tolist`` gives native Python numbers, and is faster than element access.
        names = list(self.columns)
        rows = zip(*(self.columns[name][start:end].tolist() for name in names), strict=True)
        places = self.places[start:end].tolist()
        sets = self.metric_set[start:end].tolist()
        values = {name: column[start:end].tolist() for name, column in self.metrics.items()}
        for i, row in enumerate(rows):
            event = object.__new__(StepCompleted)  # fast, as in ``event_from_dict``
            vars(event).update(zip(names, row, strict=True))
            vars(event).update(
                job_id=self.job_id,
                seq=self.first_seq + places[i],
                metrics={name: values[name][i] for name in self.metric_sets[sets[i]]},
            )
            yield event


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """Consecutive steps of one generation in a log, each later than the previous one.

    They have the same world size and the same metrics, so a fold that keeps only the newest values
    needs only the ``first`` and the ``last``.
    """

    block: Block
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def first(self) -> StepCompleted:
        """The first step, as an event."""
        return next(self.block._steps(self.start, self.start + 1))

    @property
    def last(self) -> StepCompleted:
        """The last step, as an event."""
        return next(self.block._steps(self.end - 1, self.end))

    @property
    def last_seq(self) -> int:
        """Sequence number of the last step."""
        return self.block.first_seq + int(self.block.places[self.end - 1])

    @property
    def first_seq(self) -> int:
        """Sequence number of the first step."""
        return self.block.first_seq + int(self.block.places[self.start])

    def inner(self) -> StepRun:
        """Return the steps between the first and the last."""
        return StepRun(block=self.block, start=self.start + 1, end=self.end - 1)

    def column(self, name: str) -> Column:
        """Return one field of the steps, shape ``(len,)``."""
        return self.block.columns[name][self.start : self.end]

    def metrics(self) -> dict[str, Column]:
        """Return the metrics of the steps, shape ``(len,)`` each."""
        names = self.block.metric_sets[int(self.block.metric_set[self.start])]
        return {name: self.block.metrics[name][self.start : self.end] for name in names}

    def events(self) -> Iterator[StepCompleted]:
        """Rebuild the steps as events."""
        return self.block._steps(self.start, self.end)


def pack(events: Sequence[Event], lines: Mapping[int, bytes] | None = None) -> Block:
    """Pack events into a block of columns.

    Args:
        events: The events; at least one, with consecutive ``seq``.
        lines: Lines to keep as they are, by position, because this version does not know all of
            their fields.

    Raises:
        ValueError: If the sequence numbers have a gap.
    """
    lines = lines or {}
    first = events[0].seq
    job_id = next((e.job_id for e in events if isinstance(e, StepCompleted)), events[0].job_id)
    places: list[int] = []
    steps: list[dict[str, Any]] = []
    others: list[bytes] = []
    for place, event in enumerate(events):
        if event.seq != first + place:
            raise ValueError(f"event {event.seq} instead of {first + place}")
        if place in lines:
            others.append(lines[place])
        elif isinstance(event, StepCompleted) and event.job_id == job_id and _fits(event):
            places.append(place)
            steps.append(vars(event))
        else:
            # Text in memory may contain surrogates, which are escaped in the log file.
            others.append(encode_json(event.to_json_dict()).encode("utf-8", "surrogatepass"))
    # Most steps measure the same metrics, so each combination is stored only once.
    sets: dict[tuple[str, ...], int] = {}
    metric_set = [sets.setdefault(tuple(step["metrics"]), len(sets)) for step in steps]
    return Block(
        job_id=job_id,
        first_seq=first,
        num_events=len(events),
        places=_narrow(np.array(places, np.int64)),
        columns={name: _column([step[name] for step in steps]) for name in step_columns()}
        if steps
        else empty_columns(),
        metric_sets=tuple(sets),
        metric_set=_narrow(np.array(metric_set, np.int64)),
        metrics={
            name: np.array([step["metrics"].get(name, np.nan) for step in steps], np.float64)
            for name in dict.fromkeys(name for names in sets for name in names)
        },
        others=tuple(others),
    )


def empty_columns() -> dict[str, Column]:
    """Return empty columns."""
    return {name: np.empty(0, _DTYPES[kind.__name__]) for name, kind in step_columns().items()}


def _is_log_line(line: bytes) -> bool:
    return line.startswith(_LOG_LINE)


def _fits(event: StepCompleted) -> bool:
    values = vars(event)
    for name, kind in step_columns().items():
        value = values[name]
        if type(value) is not kind:  # a loss of 1 would be read back as 1.0
            return False
        if isinstance(value, int) and not -(2**63) <= value < 2**63:  # outside the range of int64
            return False
    return all(type(v) is float and type(k) is str for k, v in event.metrics.items())


def _column(values: list[Any]) -> Column:
    column = np.array(values, _DTYPES[type(values[0]).__name__])
    return _narrow(column) if column.dtype == np.int64 else column


def _narrow(column: Column) -> Column:
    # Use the smallest integer type that can hold all values.
    if not len(column):
        return column.astype(np.int8)
    low, high = int(column.min()), int(column.max())
    for kind in _INT_TYPES:
        bounds = np.iinfo(kind)
        if bounds.min <= low and high <= bounds.max:
            return column.astype(kind)
    return column


class Events(Sequence[Event]):
    """A job's events in order: decoded when read, packed into blocks in memory.

    One thread extends it; another thread that reads at the same time must take a ``copy``.
    """

    PACK_AT = 8192
    """Number of consecutive events that are packed into a block; fewer remain objects."""

    def __init__(self, events: Sequence[Event] = ()) -> None:
        # Tuples that are replaced as a whole, so readers and copies can keep using the old ones.
        self._blocks: tuple[Block, ...] = ()
        self._starts: tuple[int, ...] = ()  # number of events before each block
        self._num_packed = 0  # events in blocks
        self._tail: list[Event] = []  # the newest events
        self._num_searched = 0  # blocks that ``forget_lines`` has searched
        self._lock = threading.Lock()
        self.extend(events)

    def copy(self) -> Events:
        """Return a copy of the events so far; it shares the blocks, which never change."""
        other = Events()
        with self._lock:
            other._blocks, other._starts = self._blocks, self._starts
            other._num_packed, other._tail = self._num_packed, list(self._tail)
        return other

    def extend(self, events: Sequence[Event]) -> None:
        """Append the next events."""
        if isinstance(events, Events):
            for block in events._blocks:
                self.add_block(block)
            events = events._tail
        with self._lock:
            self._tail.extend(events)
            # At least PACK_AT events remain objects, because the newest events are read most often.
            while len(self._tail) >= 2 * self.PACK_AT and _is_dense(self._tail[: self.PACK_AT]):
                self._push(pack(self._tail[: self.PACK_AT]))
                del self._tail[: self.PACK_AT]

    def add_block(self, block: Block) -> None:
        """Append a block."""
        with self._lock:
            # A block has no gaps, so a tail with gaps cannot be packed. To keep the order, append
            # to it.
            if self._tail and not _is_dense(self._tail):
                self._tail.extend(block.events())
                return
            if self._tail:
                self._push(pack(self._tail))
                self._tail = []
            self._push(block)

    def forget_lines(self, keep: int) -> None:
        """Drop the texts of all but the newest log lines; at least ``keep`` texts are kept.

        A line without its text takes 8 bytes instead of 250.
        """
        with self._lock:
            if len(self._blocks) == self._num_searched:
                return  # no new block since the last search
            blocks, num_lines = list(self._blocks), 0
            for number in reversed(range(len(blocks))):
                if num_lines >= keep:
                    blocks[number] = blocks[number].without_texts()
                num_lines += blocks[number].num_lines
            self._blocks, self._num_searched = tuple(blocks), len(blocks)

    def runs(self) -> Iterator[Event | StepRun]:
        """Return all events, with steps in blocks as runs."""
        blocks, tail = self._blocks, list(self._tail)
        for block in blocks:
            yield from block.runs()
        yield from tail

    def is_dense_from(self, seq: int) -> bool:
        """Return whether the events are numbered consecutively from ``seq``."""
        for block in self._blocks:
            if block.first_seq != seq:
                return False
            seq = block.last_seq + 1
        return all(event.seq == seq + i for i, event in enumerate(self._tail))

    def after(self, seq: int) -> Events:
        """Return the events after ``seq``."""
        rest = Events()
        for block in self._blocks:
            if block.first_seq > seq:
                rest.add_block(block)  # after the remainder of the previous block
            elif block.last_seq > seq:
                rest.extend(list(block.events(seq + 1 - block.first_seq)))
        rest.extend([event for event in self._tail if event.seq > seq])
        return rest

    def _push(self, block: Block) -> None:
        self._blocks = (*self._blocks, block)
        self._starts = (*self._starts, self._num_packed)
        self._num_packed += block.num_events

    def __len__(self) -> int:
        return self._num_packed + len(self._tail)

    def __iter__(self) -> Iterator[Event]:
        for block in self._blocks:
            yield from block.events()
        yield from self._tail

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, stride = index.indices(len(self))
            if stride != 1:
                return [self[i] for i in range(start, stop, stride)]
            return list(self._between(start, stop))
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        if place >= self._num_packed:
            return self._tail[place - self._num_packed]
        number = bisect.bisect_right(self._starts, place) - 1
        place -= self._starts[number]
        return next(self._blocks[number].events(place, place + 1))

    def _between(self, start: int, stop: int) -> Iterator[Event]:
        for before, block in zip(self._starts, self._blocks, strict=True):
            first, end = max(0, start - before), stop - before
            if first < min(end, block.num_events):
                yield from block.events(first, end)
        before = self._num_packed
        yield from self._tail[max(0, start - before) : max(0, stop - before)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # it grows


def runs_of(events: Any) -> Iterator[Event | StepRun]:
    """Return events for a fold: steps in blocks as runs, all others one by one."""
    yield from events.runs() if isinstance(events, Events) else events


def _is_dense(events: Sequence[Event]) -> bool:
    first = events[0].seq
    return first > 0 and all(event.seq == first + i for i, event in enumerate(events))
