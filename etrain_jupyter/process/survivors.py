"""Worker processes that outlive their scheduler and are adopted by the next one.

Each worker process has a file in the cluster's folder with its pid and slot. The file is written
as soon as the process exists, and deleted when its exit is detected.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from dataclasses import dataclass, field
from typing import IO

from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.processes import stamp_of


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """Worker process started by a previous scheduler and still running."""

    name: str
    slot: int
    """Index of the worker's slot."""
    pid: int
    stamp: str
    """Distinguishes the process from later ones with its pid; see ``stamp_of``."""


@dataclass
class AdoptedProcess:
    """Process that is not our child, with the parts of the ``Popen`` interface that still work."""

    pid: int
    stamp: str
    returncode: int | None = None
    """-1 once the process has exited: only its parent receives the exit code."""
    stdin: IO[bytes] | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Check whether the process is running, and return ``returncode``."""
        if self.returncode is None and stamp_of(self.pid) != self.stamp:
            self.returncode = -1
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has exited and its pid may have been reused."""
        # The process is not our child, so at any time the keeper may reap it and its pid may be
        # reused. The check makes it unlikely that the signal reaches another process.
        if self.poll() is None:
            os.kill(self.pid, signal.Signals(number))


class WorkerRecords:
    """Files that record the worker processes of a cluster."""

    def __init__(self, cluster: ClusterDir) -> None:
        self._folder = cluster.path / "workers"
        self._held = cluster.path / "held"
        self._logs = cluster.log("head").parent

    def add(self, name: str, *, slot: int, pid: int) -> None:
        """Record a newly started process."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        facts = {"slot": slot, "pid": pid, "stamp": stamp_of(pid) or ""}
        write_private(self._folder / f"{name}.json", json.dumps(facts))

    def remove(self, name: str) -> None:
        """Delete the record of a process that has exited."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)

    def survivors(self) -> list[Survivor]:
        """Return the recorded processes that are still running, in the order they were started."""
        found = []
        for path in self._folder.glob("w*.json"):
            # A file may vanish, or may have the fields of another version. In that case, its worker
            # is not adopted.
            with contextlib.suppress(OSError, ValueError, TypeError):
                survivor = Survivor(name=path.stem, **json.loads(path.read_text()))
                if stamp_of(survivor.pid) == survivor.stamp:
                    found.append(survivor)
                else:
                    self.remove(survivor.name)
        return sorted(found, key=lambda survivor: _number_of(survivor.name))

    def num_named(self) -> int:
        """Return the highest number in any worker's name so far; names are never reused."""
        # Get the names from the logs, because records are deleted when their processes exit.
        numbers = [_number_of(path.stem) for path in self._logs.glob("w*.log")]
        return max(numbers, default=0)

    def note_held(self, count: int) -> None:
        """Record the number of workers to keep regardless of demand."""
        write_private(self._held, str(count))

    def num_held(self) -> int:
        """Return the number recorded by ``note_held``, 0 by default."""
        try:
            return int(self._held.read_text())
        except (OSError, ValueError):
            return 0


def _number_of(name: str) -> int:
    found = re.fullmatch(r"w(\d+)", name)
    return int(found[1]) if found else 0
