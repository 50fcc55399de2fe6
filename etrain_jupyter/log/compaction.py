"""Write segments of a log in the background: ``python -m etrain_jupyter.log.compaction LOG``.

Compaction runs in a separate process, so that the scheduler stays responsive. The process may be
killed at any time. Another one is started when the log has grown by another segment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.segments import EVENTS_PER_SEGMENT, compact

NICENESS = 10
"""Niceness of the process, so that training and the scheduler have priority."""


class Compactor:
    """Start processes that write segments as a log grows, at most one at a time.

    Args:
        log_path: The log.
        work: Writes the segments; called in the thread ``etrain-compact-<job>``, which then ends.
    """

    def __init__(self, log_path: Path, work: Callable[[Path], None] | None = None) -> None:
        self._log_path = log_path
        self._work = work or compact_elsewhere
        self._thread: threading.Thread | None = None
        # Some segments may already exist; the first process checks which ones are missing.
        self._due = EVENTS_PER_SEGMENT

    def look(self, last_seq: int) -> None:
        """Start writing if the log is long enough."""
        # This is called for each batch of events, and most calls return here.
        if last_seq < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        # Advance now, not when the process exits, so that a failed process is not restarted at
        # once.
        self._due = (last_seq // EVENTS_PER_SEGMENT + 1) * EVENTS_PER_SEGMENT
        name = f"etrain-compact-{self._log_path.parent.name}"
        self._thread = threading.Thread(
            target=self._work, args=(self._log_path,), name=name, daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the process that was started last."""
        if self._thread is not None:
            self._thread.join()


def compact_elsewhere(log_path: Path) -> None:
    """Write a log's segments in another process and wait for it; a failure is harmless."""
    subprocess.run(
        [sys.executable, "-m", __name__, str(log_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def main() -> int:
    """Write the segments of the log named on the command line."""
    os.nice(NICENESS)
    try:
        compact(Path(sys.argv[1]))
    except (EtrainError, OSError) as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
