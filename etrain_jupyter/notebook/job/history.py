"""The latest values of a job, the history of its steps in columns, and its workers' times.

Steps in blocks are folded by column, so a million steps take milliseconds. One thread adds events
while any other thread may read, so a lock protects the values.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, Self

from etrain_jupyter.display.numbers import dollars
from etrain_jupyter.log.blocks import StepRun, runs_of
from etrain_jupyter.log.columns import STEP_COLUMNS, History
from etrain_jupyter.log.events import (
    EvalCompleted,
    EvalScored,
    Event,
    ExhibitStored,
    JobRestored,
    JobStatusChanged,
    RankTimed,
    StepCompleted,
    event_from_dict,
)
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.untrusted import open_regular

__all__ = ["STEP_COLUMNS", "History", "LatestValues", "peek_log"]

NOT_FOLDABLE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
"""Exceptions raised by events with invalid values, since a log may come from another user."""
PEEK_BYTES = 64 * 1024
PEEK_MAX_BYTES = 4 * 1024 * 1024
"""Maximum number of bytes to search at the end of a log for a step or a status."""
PARTS = ("data_s", "compute_s", "communication_s", "optimizer_s")
APART = ("evaluation_s", "checkpoint_s")
WITHIN = ("wait_s", "metrics_s")
"""Parts of ``communication_s`` and ``compute_s``."""


class LatestValues(JobRecord):
    """A job's record and the history of its steps. One thread adds events; any thread may read."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._history = History()

    def add(self, events: Iterable[Event]) -> None:
        """Fold the next events of the log."""
        with self._lock:
            self.apply_all(events)

    def columns(self) -> dict[str, list[Any]]:
        """Return the history; see ``History.columns``."""
        with self._lock:
            return self._history.columns()

    def list_exhibits(self) -> list[ExhibitStored]:
        """Return the stored figures, texts and tables of the evaluations."""
        with self._lock:
            return [event for named in self.exhibits.values() for event in named.values()]

    def apply(self, event: Event) -> Self:
        """Add the next event of the log to the record and to the history."""
        match event:
            case StepCompleted():
                self._history.add_step(event)
            case EvalCompleted() | EvalScored():
                self._history.add_eval(event)
            case JobRestored():
                self._history.rewind_to(event.step)
        return super().apply(event)

    def apply_run(self, run: StepRun) -> Self:
        """Add a run of steps to the record and, column by column, to the history."""
        self._history.add_run(run)
        return super().apply_run(run)


def peek_log(path: Path) -> LatestValues:
    """Return a job's latest values after reading only the beginning and the end of its log.

    The events in between are not read, so a list of a hundred jobs costs a hundred short reads. A
    step near the end shows that the job was running, and how many workers it had.
    """
    # The parts of a long log that are read:
    #   |-- 64 kB --|           not read           |-- 64 kB, 256 kB, 1 MB or 4 MB --|
    #   submitted, planned (total steps)            the newest step or status
    view = LatestValues()
    try:
        with open_regular(path) as file:
            view.add(_events_in(file.read(PEEK_BYTES)))
            events, newest = _tail_of(file)
        view.add(events)
        if isinstance(newest, StepCompleted):
            # A step after the last status proves that the job is running, even if an earlier status
            # has not been read.
            view.status, view.reason = "running", ""
    except (OSError, *NOT_FOLDABLE):
        pass
    return view


def _tail_of(file: BinaryIO) -> tuple[list[Event], Event | None]:
    """Return the last events, and the newest step or status among them if there is one."""
    size = file.seek(0, SEEK_END)
    length = PEEK_BYTES
    while True:
        # The first PEEK_BYTES have been read already. A short log has nothing after them.
        start = max(PEEK_BYTES, size - length)
        file.seek(start)
        events = _events_in(file.read())
        shown = [e for e in events if isinstance(e, StepCompleted | JobStatusChanged)]
        if shown or start == PEEK_BYTES or length >= PEEK_MAX_BYTES:
            return events, shown[-1] if shown else None
        # Workers may have printed a lot since the last step, so search further back.
        length *= 4


def _events_in(data: bytes) -> list[Event]:
    # The first and last lines of a part are usually incomplete. Skip them, as well as lines written
    # by a newer version or another author.
    events = []
    for line in data.splitlines():
        try:
            events.append(event_from_dict(json.loads(line)))
        except (*NOT_FOLDABLE, RecursionError):
            continue
    return events


@dataclass
class _Spent:
    """Totals for one worker."""

    rank: int = 0
    num_steps: int = 0
    samples: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("elapsed_s", *PARTS, *APART, *WITHIN), 0.0)
    )

    def add(self, event: RankTimed) -> None:
        self.rank = event.rank
        self.num_steps += event.num_steps
        self.samples += event.samples
        for name in self.seconds:
            spent = getattr(event, name)
            self.seconds[name] += math.nan if spent is None else spent

    @property
    def samples_per_s(self) -> float:
        return _rate(self.samples, self.seconds["elapsed_s"])

    @property
    def own_samples_per_s(self) -> float:
        # The rate if the worker never waited for others.
        return _rate(self.samples, self.seconds["elapsed_s"] - self.seconds["communication_s"])


def phases_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return one record per worker, in the order in which the workers first appear.

    A worker's efficiency is the ratio of its samples per second to those of a single worker. The
    single-worker rate is measured while the job has one worker. If that never happens, it is
    estimated from the worker's own times without communication.

    Each record has ``worker``, ``rank`` (the newest), ``num_steps``, ``samples`` (those that this
    worker trained on), ``samples_per_s``, ``efficiency`` (1.0 for a single worker) and times
    in seconds: ``elapsed_s`` of all its steps, with its parts ``data_s``, ``compute_s``,
    ``communication_s`` and ``optimizer_s``, and separately ``evaluation_s`` and ``checkpoint_s``.
    ``wait_s`` is the part of ``communication_s`` in which the worker waited for a slower one, and
    ``metrics_s`` the part of ``compute_s`` spent in the cell's metrics (NaN on a GPU).
    """
    workers: dict[str, _Spent] = {}
    alone = _Spent()  # total of the times with a single worker, whichever it was
    for event in runs_of(events):  # steps arrive as runs and are skipped
        if isinstance(event, RankTimed):
            workers.setdefault(event.worker, _Spent()).add(event)
            if event.world_size == 1:
                alone.add(event)
    return [
        {
            "worker": worker,
            "rank": spent.rank,
            "num_steps": spent.num_steps,
            "samples": spent.samples,
            "samples_per_s": spent.samples_per_s,
            "efficiency": _rate(
                spent.samples_per_s, alone.samples_per_s or spent.own_samples_per_s
            ),
            **spent.seconds,
        }
        for worker, spent in workers.items()
    ]


def _rate(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class JobCost:
    """Cost of a job so far in US dollars, from its durable log."""

    spent_usd: float = 0.0
    on_demand_usd: float = 0.0
    """Cost of the same machine hours at on-demand prices."""
    wasted_usd: float = 0.0
    """The part of ``spent_usd`` for booting, warming up or draining after the first step."""
    num_interruptions: int = 0
    """Number of workers that were preempted or lost, with or without notice."""
    num_samples: int = 0
    """Number of samples trained on."""
    usd_by_type: Mapping[str, float] = field(default_factory=dict)
    """``spent_usd`` by machine type, where it is known."""
    samples_by_type: Mapping[str, float] = field(default_factory=dict)
    """Samples that the workers on each machine type trained on."""
    is_known: bool = True
    """True if the job's pool has prices."""

    @property
    def saved_usd(self) -> float:
        """Savings compared with on-demand prices; never negative."""
        return max(0.0, self.on_demand_usd - self.spent_usd)

    @property
    def wasted_usd_per_interruption(self) -> float:
        """Average waste per interruption; 0.0 if there were none."""
        return self.wasted_usd / self.num_interruptions if self.num_interruptions else 0.0

    @property
    def usd_per_1k_samples(self) -> float:
        """Cost of a thousand samples; 0.0 before the first sample."""
        return 1000 * self.spent_usd / self.num_samples if self.num_samples else 0.0

    @property
    def usd_per_1k_samples_by_type(self) -> dict[str, float]:
        """Cost of a thousand samples by machine type, including boots and idle time."""
        return {
            type: 1000 * usd / self.samples_by_type[type]
            for type, usd in sorted(self.usd_by_type.items())
            if self.samples_by_type.get(type)
        }

    def __str__(self) -> str:
        if not self.is_known:
            return "no cost: the machines of this job's pool have no prices"
        share = self.saved_usd / self.on_demand_usd if self.on_demand_usd else 0.0
        each = ""
        if self.num_interruptions:
            words = "interruption" if self.num_interruptions == 1 else "interruptions"
            mean = dollars(self.wasted_usd_per_interruption)
            each = f", {mean} on average over {self.num_interruptions} {words}"
        lines = {
            "spent": dollars(self.spent_usd),
            "saved": f"{dollars(self.saved_usd)} of {dollars(self.on_demand_usd)} on demand "
            f"({share:.0%})",
            "wasted": f"{dollars(self.wasted_usd)}{each}",
            "samples": f"{dollars(self.usd_per_1k_samples)} per 1,000",
        }
        text = "\n".join(f"{name:<9}{text}" for name, text in lines.items())
        # With one type, its cost is that of the job.
        return "\n".join([text, *self._lines_by_type()]) if len(self.usd_by_type) > 1 else text

    def _lines_by_type(self) -> list[str]:
        width = max(map(len, self.usd_by_type)) + 2
        return [
            f"{type:<{width}}{dollars(usd)}, {self.samples_by_type.get(type, 0.0):,.0f} samples"
            + (f", {dollars(each)} per 1,000" if each is not None else "")
            for type, usd in sorted(self.usd_by_type.items())
            for each in [self.usd_per_1k_samples_by_type.get(type)]
        ]


def cost_of(view: LatestValues) -> JobCost:
    """Compute the cost of a job from its folded events."""
    cost = view.cost
    return JobCost(
        spent_usd=cost.spent_usd if cost else 0.0,
        on_demand_usd=cost.on_demand_usd if cost else 0.0,
        wasted_usd=cost.wasted_usd if cost else 0.0,
        num_interruptions=view.num_preempted + view.num_lost,
        num_samples=view.samples,
        usd_by_type=cost.usd_by_type if cost else {},
        samples_by_type=cost.samples_by_type if cost else {},
        is_known=cost is not None,
    )
