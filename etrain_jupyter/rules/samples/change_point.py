"""Detect a lasting change of a noisy level within a few values, with Page's cumulative sums.

Each sum adds up how far the values are above (or below) the level, less an allowance, and never
falls below zero. So noise keeps it near zero, and a lasting change makes it grow with every value::

    level         0  0  0  0  0  0  3  3  3  3
    value         1 -1  0  4  0 -1  3  2  4  3      in standard deviations; 4 counts as 3
    sum (above)   0  0  0  2  1  0  2  3  5  7      over 6: the change began after the last 0

Source: E. S. Page, "Continuous Inspection Schemes", Biometrika 41 (1954), 100-115. The last zero of
a sum as the estimate of the time of the change: D. M. Hawkins, D. H. Olwell, "Cumulative Sum Charts
and Charting for Quality Improvement" (1998), chapter 1.
"""

from __future__ import annotations

ALLOWANCE = 1.0
"""Deviation that is not added up, in standard deviations. A change by twice this is detected
fastest."""
LIMIT = 6.0
"""Sum at which a change is detected, in standard deviations. With normal noise and a known level,
noise alone reaches it about once in 400,000 values (D. Siegmund's approximation, 1985)."""
MAX_DEVIATION = 3.0
"""Largest deviation of one value, in standard deviations. One slow step does not suffice."""


class ChangeDetector:
    """Two sums, for changes in either direction.

    >>> detector = ChangeDetector()
    >>> [detector.add(deviation) for deviation in (0.5, -1.0, 9.0, 0.0, 2.5, 3.0, 3.5)]
    [0, 0, 0, 0, 0, 0, 5]
    """

    def __init__(self) -> None:
        self._above = self._below = 0.0
        self._num_above = self._num_below = 0

    @property
    def num_suspect(self) -> int:
        """Number of the last values that may belong to a change; 0 without any sign of one."""
        return max(self._num_above, self._num_below)

    def add(self, deviation: float) -> int:
        """Add a value; return how many of the last values are at a new level, usually 0.

        Args:
            deviation: Difference from the level, in standard deviations.
        """
        deviation = min(max(deviation, -MAX_DEVIATION), MAX_DEVIATION)
        self._above = max(0.0, self._above + deviation - ALLOWANCE)
        self._below = max(0.0, self._below - deviation - ALLOWANCE)
        self._num_above = self._num_above + 1 if self._above else 0
        self._num_below = self._num_below + 1 if self._below else 0
        if self._above >= LIMIT:
            return self._num_above
        return self._num_below if self._below >= LIMIT else 0

    def reset(self) -> None:
        """Begin again, with values that have another level."""
        self._above = self._below = 0.0
        self._num_above = self._num_below = 0
