"""Step log that the ranks of every peer write, and the figures derived from it.

A rank appends a line of JSON when it begins a step and another when the step is committed or
undone. Each rank has its own file, which survives a kill. An *attempt* is the lifetime of one
process group: all ranks of a group write the same attempt number. All figures are computed from
these lines; no process has to report anything at the end.
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
    """Step log of one rank. Each line is flushed to its file before training continues."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}-{time.time_ns()}.jsonl"
        self._file: TextIO = self._path.open("a", encoding="utf-8", buffering=1)
        self.attempt, self.rank, self.world_size = 0, 0, 0

    def enter(self, *, attempt: int, rank: int, world_size: int) -> None:
        """Set the process group of the following lines."""
        self.attempt, self.rank, self.world_size = attempt, rank, world_size

    def write(self, what: str, step: int, *, indices: Iterable[int] = ()) -> None:
        """Append one line. ``indices`` are the samples that this rank trained in the step."""
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
        """Close the file. A rank that is killed without closing it loses no lines."""
        self._file.close()


@dataclass
class Execution:
    """One step in one attempt, combined from the lines of its ranks."""

    attempt: int
    step: int
    begun_at: float
    committed_at: float | None = None
    """Time of the first rank's commit. None if the step was interrupted or undone."""
    num_commits: int = 0
    """Number of ranks that have logged the commit."""
    world_size: int = 0
    samples: int = 0
    checksum: int = 0
    """Sum of the indices of all samples that the ranks trained in this step."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process ids of the ranks that began the step, by rank."""


class History:
    """Executions of all steps of a run so far, updated line by line.

    Values that the benchmarks poll during a run are updated incrementally, because the benchmark
    process shares the cores with the training processes.

    Attributes:
        executions: Executions by attempt and step.
        newest_step: Highest committed step; 0 before the first commit.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.executions: dict[tuple[int, int], Execution] = {}
        self.newest_step = 0
        self._begins: dict[int, float] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of any rank. The order of the lines does not matter."""
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
        """Number of steps begun, once per attempt. Interrupted steps count: they cost time, too."""
        return len(self.executions)

    def committed(self, attempt: int | None = None) -> list[Execution]:
        """Return the committed steps of one attempt, or of all attempts, sorted by commit time."""
        found = [
            done
            for done in self.executions.values()
            if done.committed_at is not None and attempt in (None, done.attempt)
        ]
        return sorted(found, key=committed_at)

    def newest_attempt(self) -> int | None:
        """Return the attempt that began last, or None before the first step."""
        begins = self._begins
        return max(begins, key=lambda attempt: begins[attempt]) if begins else None

    def surviving(self) -> dict[int, Execution]:
        """Return the last committed execution of each step, which the newest weights contain."""
        return {done.step: done for done in self.committed()}

    def wasted_steps(self, target: int) -> int:
        """Return Ray's metric: executed steps minus required steps."""
        return self.num_executed - target


def committed_at(done: Execution) -> float:
    """Return the commit time of a committed step."""
    assert done.committed_at is not None
    return done.committed_at


def sample_losses(history: History, expected: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Count missing samples and steps with wrong samples in the final weights.

    Args:
        history: History of the run.
        expected: Number and index sum of the samples of each step up to the target.

    Returns:
        The number of lost samples, and the number of steps with enough samples, but not the
        expected ones.
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
    """Change from one attempt to the next, and the time without a committed step."""

    before: int
    """World size of the previous attempt."""
    after: int
    """Maximum world size over the steps of the next attempt: a healing rank joins a step later."""
    gap_s: float
    """Seconds from the last commit of the previous attempt to the first commit of the next one."""
    ordinary_s: float
    """Median step of the previous attempt, in seconds; 0 if it had too few steps."""
    steps_again: int
    """Number of committed steps that the next attempt repeated."""


def changes(history: History) -> list[Change]:
    """Return every change of membership of a run, in order."""
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
    """Return the median time between committed steps, or 0 for fewer than two steps."""
    gaps = sorted(committed_at(b) - committed_at(a) for a, b in itertools.pairwise(steps))
    return gaps[len(gaps) // 2] if gaps else 0.0


class LogReader:
    """Incremental reader of the step logs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.history = History()
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> History:
        """Add all new complete lines to the history and return it."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._offsets[path] = self._offsets.get(path, 0) + end
            for line in data[:end].splitlines():
                self.history.add(json.loads(line))
        return self.history
