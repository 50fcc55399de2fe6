"""The worker table: who takes part, as which rank, since when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.log.events import RankTimed, WorkerJoined
from etrain_jupyter.notebook.dashboard.waiting import split_of, what_it_waits_for

MAX_GONE = 6
"""Workers that went away stay in the table until so many others followed them."""


@dataclass(kw_only=True)
class WorkerRow:
    """One worker as the table shows it."""

    worker: str
    device: str = ""
    address: str = ""
    machine: str = ""
    """Type of its machine, and where and how it was had; empty where the pool knows none."""
    zone: str = ""
    lifecycle: str = ""
    usd_per_h: float | None = None
    """What it cost an hour when it joined."""
    state: str = "starting"
    """``starting``, ``warm``, ``training``, ``waiting`` (for a pause to end), ``leaving``,
    ``left``, ``lost`` or ``done``.
    """
    note: str = ""
    """Why, in a few words; empty where the state says it all."""
    rank: int | None = None
    trainer_pid: int | None = None
    steps_before: int = 0
    """Steps that it took part in before the present generation."""
    entered_at: int = 0
    """The job's count of committed steps when the present generation began."""
    timing: RankTimed | None = None
    """What its latest steps took, as far as it has told."""


class WorkerTable:
    """Folds what happens to workers."""

    def __init__(self) -> None:
        self._rows: dict[str, WorkerRow] = {}

    def join(self, event: WorkerJoined) -> None:
        """A worker was given to the job, perhaps not for the first time."""
        before = self._rows.pop(event.worker, None)
        row = WorkerRow(
            worker=event.worker,
            device=event.device,
            address=event.address,
            machine=event.machine,
            zone=event.zone,
            lifecycle=event.lifecycle,
            usd_per_h=event.usd_per_h,
        )
        row.steps_before = before.steps_before if before else 0
        row.timing = before.timing if before else None
        self._rows[event.worker] = row
        self._drop_oldest_gone()

    def warm(self, worker: str, trainer_pid: int) -> None:
        """Its trainer is ready."""
        row = self._row(worker)
        row.trainer_pid = trainer_pid
        if row.state == "starting":
            row.state = "warm"

    def time(self, event: RankTimed) -> None:
        """A worker told what its latest steps took."""
        row = self._rows.get(event.worker)
        if row is not None and event.num_steps:
            row.timing = event

    def form(self, ranks: Sequence[str], trainer_pids: Sequence[int], num_steps: int) -> list[str]:
        """A generation formed; return the newcomers in rank order."""
        present = {row.worker for row in self._rows.values() if row.rank is not None}
        for row in self._rows.values():
            self._leave_generation(row, num_steps)
            row.state = "warm" if row.state in ("training", "waiting") else row.state
        for rank, worker in enumerate(ranks):
            row = self._row(worker)
            row.rank, row.state, row.note, row.entered_at = rank, "training", "", num_steps
            if rank < len(trainer_pids):
                row.trainer_pid = trainer_pids[rank]
        return [worker for worker in ranks if worker not in present]

    def stand_still(self, why: str) -> None:
        """Nobody steps for now; the ranks keep their state and count as present later on."""
        for row in self._rows.values():
            if row.state == "training":
                row.state, row.note = "waiting", why

    def num_ranks(self) -> int:
        """Return how many of the latest generation are there."""
        return sum(row.rank is not None for row in self._rows.values())

    def num_training(self) -> int:
        """Return how many train, those that are about to leave included."""
        return sum(row.rank is not None and row.state != "waiting" for row in self._rows.values())

    def mark(self, worker: str, state: str, note: str, num_steps: int) -> None:
        """A worker is leaving, left or was lost."""
        row = self._row(worker)
        row.state, row.note = state, note
        if state != "leaving":
            self._leave_generation(row, num_steps)
            self._drop_oldest_gone()

    def end(self, num_steps: int) -> None:
        """The job is over: nobody trains any more."""
        for row in self._rows.values():
            self._leave_generation(row, num_steps, keep_rank=True)
            if row.state not in ("left", "lost"):
                row.state, row.note = "done", ""

    def begin_anew(self, num_steps: int) -> None:
        """The job was resumed: whoever was there before is not any more."""
        for row in self._rows.values():
            self._leave_generation(row, num_steps)
            if row.state != "lost":
                row.state, row.note = "left", "before the resume"
        self._drop_oldest_gone()

    def to_list(self, num_steps: int) -> list[dict[str, Any]]:
        """Return the rows, ranks first in order, then newcomers, then those that went away."""
        gone = ("left", "lost")
        rows = sorted(
            self._rows.values(),
            key=lambda row: (row.state in gone, row.rank is None, row.rank or 0),
        )
        return [self._to_dict(row, num_steps) for row in rows]

    def _row(self, worker: str) -> WorkerRow:
        return self._rows.setdefault(worker, WorkerRow(worker=worker))

    @staticmethod
    def _leave_generation(row: WorkerRow, num_steps: int, *, keep_rank: bool = False) -> None:
        if row.rank is not None:
            row.steps_before += num_steps - row.entered_at
            row.entered_at = num_steps
            row.rank = row.rank if keep_rank else None

    def _drop_oldest_gone(self) -> None:
        gone = [name for name, row in self._rows.items() if row.state in ("left", "lost")]
        for name in gone[:-MAX_GONE]:
            del self._rows[name]

    @staticmethod
    def _to_dict(row: WorkerRow, num_steps: int) -> dict[str, Any]:
        current = num_steps - row.entered_at if row.rank is not None else 0
        return {
            "worker": row.worker,
            "rank": None if row.state == "waiting" else row.rank,
            "state": row.state,
            "note": row.note,
            "device": row.device,
            "machine": row.machine,
            "zone": row.zone,
            "lifecycle": row.lifecycle,
            "usd_per_h": row.usd_per_h,
            "trainer_pid": row.trainer_pid,
            "steps": row.steps_before + current,
            "split": split_of(row.timing),
            "waits_for": what_it_waits_for(row.state, row.note, row.timing),
        }
