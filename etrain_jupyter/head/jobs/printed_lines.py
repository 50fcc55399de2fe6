"""A bound on the printed lines in a job's log: ranks that print in each step would fill a disk.

The first lines of a job are all logged. After that it is a number per second on average, whatever
the number of its trainers; how many were dropped is logged. Errors of the notebook's code, and the
last lines of a trainer that crashes, do not come this way.
"""

from __future__ import annotations

BURST = 20_000
"""Lines that are logged however fast they come, after a long quiet time too."""

PER_S = 5.0
"""Lines per second that are logged beyond these: some 100 MB of log a day."""

REPORT_S = 60.0
"""Least time between two reports of dropped lines, in seconds."""


class PrintedLines:
    """Decides which printed lines of a job are logged. Time is an argument.

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
        """Return whether a line that comes now is logged; else count it as dropped."""
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
        """Return how many lines were dropped since the last report, if one is due; else 0."""
        is_due = self._reported_at is None or now - self._reported_at >= REPORT_S
        if not self._num_dropped or not (is_due or is_last):
            return 0
        num, self._num_dropped = self._num_dropped, 0
        self._reported_at = now
        return num
