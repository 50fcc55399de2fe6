"""The event list and the markers of the charts.

Both have a limit. The log lines of a stack dump, one per frame, become one entry.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from etrain_jupyter.display.numbers import counted
from etrain_jupyter.log.events import (
    STACKS_HEADER,
    CheckpointCommitted,
    Event,
    JobStatusChanged,
    LogLine,
)
from etrain_jupyter.log.startup import Startup
from etrain_jupyter.notebook.dashboard.event_text import (
    Line,
    describe,
    first_step_line,
    marker_of,
)
from etrain_jupyter.notebook.dashboard.snapshot import EventLine, Marker, Snapshot

CellNumbers = Callable[[], Mapping[str, int]]
"""Returns the execution count of each of the notebook's cells by the file name of its code."""

MAX_ENTRIES = 120
MAX_ALARMS = 80
"""Warnings and errors have a separate limit, so that many other events do not displace them."""
MAX_MARKERS = 300
MAX_CHECKPOINT_MARKERS = 60


class EventList:
    """The newest entries of the event list, and the newest markers of the charts.

    Attributes:
        version: Incremented with each marker and each new or changed entry.
    """

    def __init__(self, cell_numbers: CellNumbers) -> None:
        self.version = 0
        self._cell_numbers = cell_numbers
        self._dumps = StackDumps()
        self._num_entries = self._num_markers = 0
        # Bounded queues, which are merged by id when they are shown.
        self._calm: deque[EventLine] = deque(maxlen=MAX_ENTRIES)
        self._alarms: deque[EventLine] = deque(maxlen=MAX_ALARMS)
        self._marked: deque[Marker] = deque(maxlen=MAX_MARKERS)
        self._checkpoints: deque[Marker] = deque(maxlen=MAX_CHECKPOINT_MARKERS)

    def add(self, event: Event, state: Snapshot, *, is_starting: bool) -> None:
        """List and mark the next event.

        Args:
            event: The event.
            state: State of the job after the event.
            is_starting: True until the first step of an attempt.
        """
        if marker := marker_of(event):
            step = event.step if isinstance(event, CheckpointCommitted) else state.step
            self.mark(event, step, *marker)
        # A stack dump arrives as one log line per frame. Its first line makes an entry, and each
        # further line changes the text of that entry.
        dump = self._dumps.add(event) if isinstance(event, LogLine) else None
        if dump is None:
            line = _line_of(event, state, is_starting=is_starting)
            if line is not None:
                self._append(event, line)
        elif dump.seq == event.seq:
            self._append(event, dump.describe(self._cell_numbers()))
        else:
            self._amend(dump.seq, dump.describe(self._cell_numbers()).text)

    def add_first_step(self, event: Event, startup: Startup) -> None:
        """List the duration of each stage of the start-up, which this event ends."""
        stages = {s.name: s.took_s for s in startup.stages() if s.took_s is not None}
        if stages:
            self._append(event, first_step_line(stages))

    def mark(self, event: Event, step: int, kind: str, text: str) -> None:
        """Mark an event at a step."""
        self._num_markers += 1
        self.version += 1
        markers = self._checkpoints if kind == "checkpoint" else self._marked
        markers.append(
            Marker(
                id=self._num_markers,
                seq=event.seq,
                step=step,
                time=event.time,
                kind=kind,
                text=text,
            )
        )

    def entries(self) -> tuple[EventLine, ...]:
        """Return the entries, oldest first."""
        # Sort by id, not by seq, which is 0 for events outside the log.
        return tuple(sorted([*self._calm, *self._alarms], key=lambda entry: entry.id))

    def markers(self) -> tuple[Marker, ...]:
        """Return the markers, ordered by their events."""
        return tuple(sorted([*self._marked, *self._checkpoints], key=lambda marker: marker.id))

    def _append(self, event: Event, line: Line) -> None:
        # Events that are not in the log have no number, so several of them share ``seq`` 0.
        self._num_entries += 1
        self.version += 1
        entries = self._alarms if line.level in ("warning", "error") else self._calm
        entries.append(
            EventLine(
                id=self._num_entries,
                seq=event.seq,
                time=event.time,
                kind=event.kind,
                level=line.level,
                text=line.text,
            )
        )

    def _amend(self, seq: int, text: str) -> None:
        # The limit may have dropped the entry since the event arrived.
        for entries in (self._calm, self._alarms):
            for index, entry in enumerate(entries):
                if entry.seq == seq:
                    entries[index] = replace(entry, text=text)
                    self.version += 1
                    return


def _line_of(event: Event, state: Snapshot, *, is_starting: bool) -> Line | None:
    line = describe(event)
    if line is None or not isinstance(event, JobStatusChanged):
        return line
    # Each job waits for its first workers. That is a warning only if one was lost.
    if event.status == "waiting" and is_starting and not state.num_lost:
        return replace(line, level="info")
    # The entry of the error is above it.
    if state.error is not None and event.reason == state.error.error:
        return replace(line, text=event.status.capitalize())
    return line


# --- stack dumps ----------------------------------------------------------------------------------

QUIET_S = 5.0
"""Seconds without a new line after which a dump counts as complete; it has no end marker."""
# The lines that Python's faulthandler writes, for example:
#
#   Fatal Python error: Segmentation fault
#
#   Current thread 0x00007f... (most recent call first):
#     File "/tmp/ipykernel_7/12.py", line 3 in forward
#
_FATAL = re.compile(r"Fatal Python error: (?P<what>.*)")
# No comma before "in", unlike in a traceback.
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_THREAD = re.compile(r"(?P<is_current>Current t|T)hread 0x.*\(most recent call first\):")
_OTHER = re.compile(r"|  \.\.\.|  <.*>|Python runtime state: .*|Extension modules: .*|<.*>")
_CELL = re.compile(r".*[/\\]ipykernel_\d+[/\\][^/\\]*")


@dataclass(frozen=True, kw_only=True)
class _Frame:
    file: str
    line: str
    name: str


@dataclass(kw_only=True)
class Dump:
    """One dump, possibly incomplete."""

    worker: str
    header: str
    seq: int
    """Sequence number of its first event."""
    updated_at: float
    """Time of its newest line."""
    threads: list[list[_Frame]] = field(default_factory=list)
    """The frames of each thread, innermost first; the current thread is first."""
    is_in_current: bool = False

    def take(self, text: str) -> bool:
        """Add the next line; return False if it does not belong to a dump."""
        if found := _THREAD.fullmatch(text):
            self.is_in_current = found["is_current"] != "T"
            # faulthandler lists the current thread at any position among the others. Put it first.
            self.threads.insert(0 if self.is_in_current else len(self.threads), [])
        elif found := _FRAME.fullmatch(text):
            # A frame without a thread above it does not belong to this dump.
            if not self.threads:
                return False
            thread = self.threads[0 if self.is_in_current else -1]
            thread.append(_Frame(file=found["file"], line=found["line"], name=found["name"]))
        else:
            return _OTHER.fullmatch(text) is not None
        return True

    def describe(self, numbers: Mapping[str, int]) -> Line:
        """Return the dump as one line, which names the innermost frame in the notebook's code."""
        fatal = _FATAL.match(self.header)
        level = "error" if fatal else "warning"
        frames = [frame for thread in self.threads for frame in thread]
        if not frames:
            return Line(text=f"{self.worker}: {self.header}", level=level)
        at = next((f for f in frames if _is_of_notebook(f.file, numbers)), frames[0])
        what = f"crashed ({fatal['what']}) at" if fatal else "was at"
        where = f"{_source_of(at.file, numbers)}, line {at.line} in {at.name}"
        # The line in the notebook alone may not explain a hang, so also name the library call in
        # progress.
        innermost = next(thread for thread in self.threads if at in thread)[0]
        if innermost != at and not _is_of_notebook(innermost.file, numbers):
            where += f", inside {innermost.name} of {PurePath(innermost.file).name}"
        count = f"{counted(len(frames), 'frame')} of {counted(len(self.threads), 'thread')}"
        return Line(text=f"{self.worker} {what} {where} ({count}: %etrain logs)", level=level)


class StackDumps:
    """Find dumps among log lines. Dumps of several workers may be interleaved."""

    def __init__(self) -> None:
        self._open: dict[str, Dump] = {}

    def add(self, event: LogLine) -> Dump | None:
        """Return the dump that a line starts or belongs to; None for any other line."""
        if event.text == STACKS_HEADER or _FATAL.match(event.text):
            dump = Dump(
                worker=event.worker, header=event.text, seq=event.seq, updated_at=event.time
            )
            self._open[event.worker] = dump
            return dump
        last = self._open.get(event.worker)
        # Lines that other threads print in between do not end the dump.
        if last is None or event.time > last.updated_at + QUIET_S or not last.take(event.text):
            return None
        last.updated_at = event.time
        return last


def _is_of_notebook(file: str, numbers: Mapping[str, int]) -> bool:
    return file in numbers or _CELL.fullmatch(file) is not None


def _source_of(file: str, numbers: Mapping[str, int]) -> str:
    if file in numbers:
        return f"Cell In[{numbers[file]}]"
    # After a restart, the kernel does not know the cell numbers from before.
    return "a cell" if _CELL.fullmatch(file) else PurePath(file).name
