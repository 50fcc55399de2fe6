"""Combine the log lines of a stack dump, one per frame, into one entry of the event list."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from etrain_jupyter.display.numbers import counted
from etrain_jupyter.log.events import STACKS_HEADER, LogLine
from etrain_jupyter.notebook.dashboard.event_text import Line

CellNumbers = Callable[[], Mapping[str, int]]
"""Returns the execution count of each of the notebook's cells by the file name of its code."""

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
        place = f"{_place(at.file, numbers)}, line {at.line} in {at.name}"
        # The line in the notebook alone may not explain a hang, so also name the library call in
        # progress.
        innermost = next(thread for thread in self.threads if at in thread)[0]
        if innermost != at and not _is_of_notebook(innermost.file, numbers):
            place += f", inside {innermost.name} of {PurePath(innermost.file).name}"
        count = f"{counted(len(frames), 'frame')} of {counted(len(self.threads), 'thread')}"
        return Line(text=f"{self.worker} {what} {place} ({count}: %etrain logs)", level=level)


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


def _place(file: str, numbers: Mapping[str, int]) -> str:
    if file in numbers:
        return f"Cell In[{numbers[file]}]"
    # After a restart, the kernel does not know the cell numbers from before.
    return "a cell" if _CELL.fullmatch(file) else PurePath(file).name
