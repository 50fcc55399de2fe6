"""Time for which this thread was ready to run but had no core, as Linux reports it."""

from __future__ import annotations

import threading
from pathlib import Path

_TASKS = Path("/proc/self/task")


class CoreWait:
    """Measures the wait of the current thread for a core.

    A thread that computes waits for a core if the machine has more busy threads than cores. A
    thread that sleeps, or waits for data or for another rank, does not.
    """

    def __init__(self) -> None:
        self._since = _read()

    def take(self) -> float | None:
        """Return the seconds since the last call; None if the system does not report them."""
        before, self._since = self._since, _read()
        # The first call after a move to another thread has nothing to compare with.
        if before is None or self._since is None or before[0] != self._since[0]:
            return None
        return max(0.0, self._since[1] - before[1])


def _read() -> tuple[int, float] | None:
    """Return this thread and its total wait in seconds; None if the system does not report it."""
    # Nanoseconds on a core, nanoseconds of waiting for one, number of times on a core. Other
    # systems, and some containers, do not have the file.
    thread = threading.get_native_id()
    try:
        text = (_TASKS / str(thread) / "schedstat").read_text(encoding="ascii")
        return thread, int(text.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
