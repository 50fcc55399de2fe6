"""Break down each worker's time from the events, for ``job.phases()``.

A worker's efficiency is the ratio of its samples per second to those of a single worker. The
single-worker rate is measured while the job has one worker. If that never happens, it is estimated
from the worker's own times without communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.log.blocks import runs_of
from etrain_jupyter.log.events import Event, RankTimed

PARTS = ("data_s", "compute_s", "communication_s", "optimizer_s")
APART = ("evaluation_s", "checkpoint_s")
WITHIN = ("wait_s", "metrics_s")
"""Parts of ``communication_s`` and ``compute_s``."""


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

    Each record has ``worker``, ``rank`` (the newest), ``num_steps``, ``samples`` (those that this
    worker trained on), ``samples_per_s``, ``efficiency`` (1.0 is that of a single worker) and times
    in seconds: ``elapsed_s`` of all its steps, with its parts ``data_s``, ``compute_s``,
    ``communication_s`` and ``optimizer_s``, and separately ``evaluation_s`` and ``checkpoint_s``.
    ``wait_s`` is the part of ``communication_s`` in which the worker waited for a slower one, and
    ``metrics_s`` the part of ``compute_s`` in the cell's metrics; NaN on a GPU.
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
            "efficiency": _efficiency(spent, alone),
            **spent.seconds,
        }
        for worker, spent in workers.items()
    ]


def _efficiency(spent: _Spent, alone: _Spent) -> float:
    return _rate(spent.samples_per_s, alone.samples_per_s or spent.own_samples_per_s)


def _rate(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0
