"""The log of steps that every peer's ranks write, and what can be counted in it.

A rank appends one line of JSON when it begins a step and one when the step is committed or undone,
to a file of its own that survives its death. An *attempt* is one process group's life: all ranks of
a group write the same one. Nobody is asked afterwards what happened: the lines tell it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

BEGUN, COMMITTED, UNDONE = "begun", "committed", "undone"


class StepLog:
    """What one rank writes; every line is in the file before the next thing happens."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}-{time.time_ns()}.jsonl"
        self._file: TextIO = self._path.open("a", encoding="utf-8", buffering=1)
        self.attempt, self.rank, self.world_size = 0, 0, 0

    def enter(self, *, attempt: int, rank: int, world_size: int) -> None:
        """Say which group the next lines belong to."""
        self.attempt, self.rank, self.world_size = attempt, rank, world_size

    def write(self, what: str, step: int, *, indices: Iterable[int] = ()) -> None:
        """Append one line; ``indices`` are the samples that this rank trained in the step."""
        samples = list(indices)
        line = {
            "what": what,
            "time": time.time(),
            "attempt": self.attempt,
            "step": step,
            "rank": self.rank,
            "world_size": self.world_size,
            "pid": os.getpid(),
            "samples": len(samples),
            "checksum": sum(samples),
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Write no more; a rank that dies without it loses nothing."""
        self._file.close()


@dataclass
class Execution:
    """One step in one attempt, put together from the lines of its ranks."""

    attempt: int
    step: int
    begun_at: float
    committed_at: float | None = None
    """When the first rank had it; None if it was cut short or undone."""
    num_commits: int = 0
    """Ranks that have written that it is committed."""
    world_size: int = 0
    samples: int = 0
    checksum: int = 0
    """Sum of the indices of the samples that all ranks together trained."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process ids by rank, of those that began it."""


class History:
    """All lines of a run so far; ``add`` takes more.

    What is asked again and again while a run goes on is kept up to date rather than searched for:
    who watches shares the cores with those that train.

    Attributes:
        executions: By attempt and step.
        newest_step: The highest step that was ever committed; 0 before the first.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.executions: dict[tuple[int, int], Execution] = {}
        self.newest_step = 0
        self._begins: dict[int, float] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one rank's line, in any order."""
        key = (line["attempt"], line["step"])
        done = self.executions.setdefault(key, Execution(*key, begun_at=line["time"]))
        done.begun_at = min(done.begun_at, line["time"])
        done.world_size = max(done.world_size, line["world_size"])
        done.pids[line["rank"]] = line["pid"]
        begin = self._begins.get(done.attempt, line["time"])
        self._begins[done.attempt] = min(begin, line["time"])
        if line["what"] == COMMITTED:
            self.newest_step = max(self.newest_step, done.step)
            done.committed_at = min(done.committed_at or line["time"], line["time"])
            done.num_commits += 1
            done.samples += line["samples"]
            done.checksum += line["checksum"]

    @property
    def num_executed(self) -> int:
        """Steps begun, counted once for each attempt: one that was cut short cost time, too."""
        return len(self.executions)

    def committed(self, attempt: int | None = None) -> list[Execution]:
        """The committed steps, of one attempt or of all, by time."""
        found = [
            done
            for done in self.executions.values()
            if done.committed_at is not None and attempt in (None, done.attempt)
        ]
        return sorted(found, key=committed_at)

    def newest_attempt(self) -> int | None:
        """The attempt that began last; None before the first step."""
        begins = self._begins
        return max(begins, key=lambda attempt: begins[attempt]) if begins else None

    def surviving(self) -> dict[int, Execution]:
        """The execution of each step that led to the newest weights: the last one committed."""
        return {done.step: done for done in self.committed()}

    def wasted_steps(self, target: int) -> int:
        """Ray's metric: steps executed beyond those that were wanted."""
        return self.num_executed - target


def committed_at(done: Execution) -> float:
    """When a step was committed; only for those that were."""
    assert done.committed_at is not None
    return done.committed_at


def sample_losses(history: History, expected: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Count what the weights at the end lack, and what they have too often.

    Args:
        history: The run.
        expected: Number and index sum of the samples of each step up to the target.

    Returns:
        Samples lost; steps whose samples are not the ones that were due although none is missing.
    """
    surviving = history.surviving()
    lost = wrong = 0
    for step, (samples, checksum) in expected.items():
        done = surviving.get(step)
        missing = samples - (done.samples if done else 0)
        lost += max(0, missing)
        wrong += missing < 0 or (missing == 0 and done is not None and done.checksum != checksum)
    return lost, wrong


@dataclass(frozen=True, kw_only=True)
class Change:
    """From one attempt to the next: how long no step was committed."""

    before: int
    """World size of the attempt that ended."""
    after: int
    """Most ranks that took part in a step of the next one: who heals joins a step later."""
    gap_s: float
    """From its last committed step to the next attempt's first."""
    ordinary_s: float
    """Median step of the attempt that ended; 0 if it had too few."""
    steps_again: int
    """Committed steps that had to be made again."""


def changes(history: History) -> list[Change]:
    """Every change of membership that a run has gone through, in order."""
    by_attempt: dict[int, list[Execution]] = {}
    for done in history.committed():
        by_attempt.setdefault(done.attempt, []).append(done)
    found = []
    for old, new in itertools.pairwise(by_attempt.values()):
        found.append(
            Change(
                before=old[-1].world_size,
                after=max(done.world_size for done in new),
                gap_s=committed_at(new[0]) - committed_at(old[-1]),
                ordinary_s=ordinary_step(old),
                steps_again=max(0, old[-1].step + 1 - new[0].step),
            )
        )
    return found


def ordinary_step(steps: list[Execution]) -> float:
    """Median time between committed steps; 0 if there are not two."""
    gaps = sorted(committed_at(b) - committed_at(a) for a, b in itertools.pairwise(steps))
    return gaps[len(gaps) // 2] if gaps else 0.0


class LogReader:
    """Follows the files of a folder: each ``read`` adds the lines that are new."""

    def __init__(self, folder: Path) -> None:
        self.history = History()
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> History:
        """Return the history with all whole lines in it."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._offsets[path] = self._offsets.get(path, 0) + end
            for line in data[:end].splitlines():
                self.history.add(json.loads(line))
        return self.history
