"""Progress of a long operation, as one line of text."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_EVERY_S = 0.2
_WIDTH = 30


class Progress:
    """Prints ``shuffling  [=====>     ]  12,000 of 60,000 rows  24 MB``, on one line.

    Args:
        title: The operation.
        total: Number of rows; None if unknown.
        out: Where to print; None to print nothing.
    """

    def __init__(self, title: str, total: int | None, out: TextIO | None = sys.stderr) -> None:
        self._title = title
        self._total = total
        self._out = out
        self._num_rows = 0
        self._num_bytes = 0
        self._printed_at = 0.0

    def add(self, num_rows: int, num_bytes: int) -> None:
        """Count rows."""
        self._num_rows += num_rows
        self._num_bytes += num_bytes
        if self._out is not None and time.monotonic() - self._printed_at >= _EVERY_S:
            self._print("\r")

    def finish(self) -> None:
        """Print the final state."""
        if self._out is not None:
            self._print("\n")

    def _print(self, end: str) -> None:
        assert self._out is not None
        self._printed_at = time.monotonic()
        rows = f"{self._num_rows:,} rows"
        bar = ""
        if self._total:
            done = min(_WIDTH, _WIDTH * self._num_rows // self._total)
            bar = f"[{'=' * done}{' ' * (_WIDTH - done)}]  "
            rows = f"{self._num_rows:,} of {self._total:,} rows"
        text = f"{self._title}  {bar}{rows}  {self._num_bytes / 1e6:,.0f} MB"
        self._out.write(f"\r{text}{end if end == chr(10) else ''}")
        self._out.flush()
