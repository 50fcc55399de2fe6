"""Worker processes that outlive the scheduler which started them, for the next one to adopt.

A file a worker in the cluster's folder says which process it is and in which slot; it is written
as soon as the process is there and removed when its end was seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from dataclasses import dataclass, field
from typing import IO

from etrain_jupyter.process.cluster_dir import ClusterDir, stamp_of, write_private


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A worker process that another scheduler has started."""

    name: str
    slot: int
    """The slot's index."""
    pid: int
    stamp: str
    """Its start, see ``stamp_of``."""


@dataclass
class AdoptedProcess:
    """Somebody else's child, with as much of ``Popen`` as can be had of it."""

    pid: int
    stamp: str
    returncode: int | None = None
    """-1 once it has ended: only its parent is told more."""
    stdin: IO[bytes] | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Return ``returncode``, after a look whether the process still runs."""
        if self.returncode is None and stamp_of(self.pid) != self.stamp:
            self.returncode = -1
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended and its id may be another one's."""
        if self.poll() is None:
            os.kill(self.pid, signal.Signals(number))


class WorkerRecords:
    """What is written down of the worker processes of a cluster."""

    def __init__(self, cluster: ClusterDir) -> None:
        self._folder = cluster.path / "workers"
        self._held = cluster.path / "held"
        self._logs = cluster.log("head").parent

    def add(self, name: str, *, slot: int, pid: int) -> None:
        """Write down a process that has just been started."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        facts = {"slot": slot, "pid": pid, "stamp": stamp_of(pid) or ""}
        write_private(self._folder / f"{name}.json", json.dumps(facts))

    def remove(self, name: str) -> None:
        """Forget a process that has ended."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)

    def survivors(self) -> list[Survivor]:
        """Return those that still run, in the order in which they were started."""
        found = []
        for path in self._folder.glob("w*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                survivor = Survivor(name=path.stem, **json.loads(path.read_text()))
                if stamp_of(survivor.pid) == survivor.stamp:
                    found.append(survivor)
                else:
                    self.remove(survivor.name)
        return sorted(found, key=lambda survivor: _number_of(survivor.name))

    def num_named(self) -> int:
        """Return the highest number that a worker ever had: no name is used again."""
        numbers = [_number_of(path.stem) for path in self._logs.glob("w*.log")]
        return max(numbers, default=0)

    def note_held(self, count: int) -> None:
        """Write down how many workers somebody wants whatever the jobs need."""
        write_private(self._held, str(count))

    def num_held(self) -> int:
        """Return how many they were; 0 if nobody has asked."""
        try:
            return int(self._held.read_text())
        except (OSError, ValueError):
            return 0


def _number_of(name: str) -> int:
    found = re.fullmatch(r"w(\d+)", name)
    return int(found[1]) if found else 0
