"""Lines that trainers print: limit those in the log, and format the last ones of a crashed trainer.

A job's first lines are all logged. After that, the average number of lines logged per second is
limited, regardless of the number of trainers, so that they do not fill the disk. The number of
dropped lines is logged, too. Errors in the notebook's code, and a crashed trainer's last lines, are
logged separately and never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from etrain_jupyter.bundle.sources import CellSource, is_of_this_package
from etrain_jupyter.log.events import STACKS_HEADER

MAX_LINES = 10

_FATAL = re.compile(r"Fatal Python error: (?P<what>.*)")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')

BURST = 20_000
"""Number of lines logged without a rate limit, at the start and after a long quiet period."""

PER_S = 5.0
"""Average number of lines logged per second after the burst: about 100 MB of log a day."""

REPORT_S = 60.0
"""Minimum interval in seconds between reports of dropped lines."""


def last_words(worker: str, lines: Iterable[str], cells: Mapping[str, CellSource]) -> str:
    """Return the end of a trainer's output; empty if it printed nothing.

    Python's report on a crash or hang is reduced to the thread that crashed, or the main thread.
    Its frames are in traceback order, starting with the first one in the notebook.
    """
    # faulthandler's output, after the lines printed by the notebook's code:
    #
    #     Fatal Python error: Segmentation fault
    #
    #     Thread 0x00007f... (most recent call first):
    #       ...
    #     Current thread 0x00007f... (most recent call first):
    #       File "ipykernel_1/2.py", line 7 in forward       innermost first
    #       File ".../etrain_jupyter/...", line 80 in run         our own code: omit the rest
    printed = list(lines)
    begins = [i for i, text in enumerate(printed) if text == STACKS_HEADER or _FATAL.match(text)]
    report = max(begins, default=None)
    before = [text for text in printed[:report] if text.strip()][-MAX_LINES:]
    parts = [f"{worker} printed last:", *(f"  {text}" for text in before)] if before else []
    if report is not None:
        found = _FATAL.match(printed[report])
        frames = _frames(printed[report:], cells)
        if found:
            parts.append(f"{worker} crashed: {found['what']}")
        elif frames:
            parts.append(f"{worker} was doing:")
        parts += frames
    return "\n".join(parts)


def _frames(report: list[str], cells: Mapping[str, CellSource]) -> list[str]:
    start = next((i for i, text in enumerate(report) if text.startswith("Current thread")), None)
    if start is None:
        return []
    found = []
    for text in report[start + 1 :]:
        frame = _FRAME.match(text)
        if frame is None or is_of_this_package(frame["file"]):
            break
        cell = cells.get(frame["file"])
        place = cell.label if cell else f'File "{frame["file"]}"'
        found.append(f"  {place}, line {frame['line']}, in {frame['name']}")
    return found[::-1][-MAX_LINES:]


class PrintedLines:
    """Choose which of a job's printed lines to log. Callers pass in the current time.

    >>> lines = PrintedLines(burst=2, per_s=1.0)
    >>> [lines.take(now=0.0) for _ in range(4)], lines.take(now=1.0)
    ([True, True, False, False], True)
    >>> lines.report(now=100.0), lines.report(now=100.0)
    (2, 0)
    """

    def __init__(self, *, burst: int = BURST, per_s: float = PER_S) -> None:
        self._burst, self._per_s = burst, per_s
        self._left = float(burst)
        self._taken_at: float | None = None
        self._num_dropped = 0
        self._reported_at: float | None = None

    def take(self, now: float) -> bool:
        """Return whether to log a line that arrives now; otherwise count it as dropped."""
        # Token bucket: refill for the time that has passed, up to the burst.
        if self._taken_at is not None:
            passed_s = max(0.0, now - self._taken_at)
            self._left = min(self._burst, self._left + self._per_s * passed_s)
        self._taken_at = now
        if self._left < 1.0:
            self._num_dropped += 1
            return False
        self._left -= 1.0
        return True

    def report(self, now: float, *, is_last: bool = False) -> int:
        """Return the number of lines dropped since the last report if a report is due, or 0."""
        is_due = self._reported_at is None or now - self._reported_at >= REPORT_S
        if not self._num_dropped or not (is_due or is_last):
            return 0
        num, self._num_dropped = self._num_dropped, 0
        self._reported_at = now
        return num
