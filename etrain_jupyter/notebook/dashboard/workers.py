"""Fold worker events into the table of workers, with what each worker waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etrain_jupyter.log.events import RankTimed, WorkerJoined
from etrain_jupyter.notebook.dashboard.snapshot import TimeSplit, WorkerRow

MAX_GONE = 6
"""Maximum number of rows for workers that left or were lost; the oldest rows are dropped."""
GONE = ("left", "lost")

MAX_ROWS = 100
"""Maximum number of rows in a snapshot. Each step changes the count in every row, which for
1,000 rows is 300 kB per second."""


# The states of a row, and the events that change them:
#
#   WorkerJoined -> starting -> WorkerWarmed -> warm -> GenerationFormed -> training
#   training  -> waiting (job paused or waiting) -> training (next generation)
#             -> leaving (preemption notice) -> left (WorkerLeft)
#             -> lost (WorkerLost)
#             -> done (the job has ended) -> left (the job was resumed)
MIN_SHARE = 0.2
"""Minimum share of the time for a worker to be shown as waiting."""

_BEFORE_TRAINING = {
    "starting": "its trainer to start",
    "warm": "the next generation",
    "leaving": "the next step boundary",
}


@dataclass(kw_only=True)
class TrackedWorker:
    """State of one worker; see ``WorkerRow`` for the fields that both have."""

    worker: str
    joined: WorkerJoined | None = None
    """None if the log does not contain the event."""
    state: str = "starting"
    note: str = ""
    rank: int | None = None
    trainer_pid: int | None = None
    steps_before: int = 0
    """Steps in which it took part before the current generation."""
    entered_at: int = 0
    """The job's count of committed steps at the start of the current generation."""
    timing: RankTimed | None = None
    """The newest report of its step times."""

    def leave_generation(self, num_steps: int, *, keep_rank: bool = False) -> None:
        """Stop counting steps for this worker."""
        if self.rank is not None:
            self.steps_before += num_steps - self.entered_at
            self.entered_at = num_steps
            self.rank = self.rank if keep_rank else None

    def to_row(self, num_steps: int) -> WorkerRow:
        """Return its row in the table once the job has committed ``num_steps``."""
        # Count steps as a difference, so that a step with 200 workers does not update 200 rows.
        current = num_steps - self.entered_at if self.rank is not None else 0
        joined = self.joined
        return WorkerRow(
            worker=self.worker,
            rank=None if self.state == "waiting" else self.rank,
            state=self.state,
            note=self.note,
            device=joined.device if joined else "",
            machine=joined.machine if joined else "",
            zone=joined.zone if joined else "",
            lifecycle=joined.lifecycle if joined else "",
            usd_per_h=joined.usd_per_h if joined else None,
            trainer_pid=self.trainer_pid,
            steps=self.steps_before + current,
            split=split_of(self.timing),
            waits_for=waiting_reason(self.state, self.note, self.timing),
        )


class WorkerTable:
    """All workers of a job, including those that left most recently.

    Attributes:
        num_steps: Number of steps that the job has committed so far.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._rows: dict[str, TrackedWorker] = {}

    def join(self, event: WorkerJoined) -> None:
        """Add a worker that the pool assigned to the job; it may have been there before."""
        # Remove the row first, so that the row of a worker that rejoins moves to the end.
        previous = self._rows.pop(event.worker, None)
        self._rows[event.worker] = TrackedWorker(
            worker=event.worker,
            joined=event,
            steps_before=previous.steps_before if previous else 0,
            timing=previous.timing if previous else None,
        )
        self._drop_oldest_gone()

    def warm(self, worker: str, trainer_pid: int) -> None:
        """Record that a worker's trainer is ready."""
        row = self._row(worker)
        row.trainer_pid = trainer_pid
        if row.state == "starting":
            row.state = "warm"

    def time(self, event: RankTimed) -> None:
        """Record the step times that a worker reports."""
        row = self._rows.get(event.worker)
        # A report without steps has only evaluation or checkpoint time, and no shares.
        if row is not None and event.num_steps:
            row.timing = event

    def form(self, ranks: Sequence[str], trainer_pids: Sequence[int]) -> list[str]:
        """Start a generation; return the workers that are new in it, in rank order."""
        # Workers of the previous generation. A paused worker keeps its rank, so it is not new.
        present = {row.worker for row in self._rows.values() if row.rank is not None}
        for row in self._rows.values():
            row.leave_generation(self.num_steps)
            # The worker is idle, unless the loop below adds it to the new generation.
            row.state = "warm" if row.state in ("training", "waiting") else row.state
        for rank, worker in enumerate(ranks):
            row = self._row(worker)
            row.rank, row.state, row.note = rank, "training", ""
            row.entered_at = self.num_steps
            # Another user may have written the log, with fewer process ids than ranks.
            if rank < len(trainer_pids):
                row.trainer_pid = trainer_pids[rank]
        return [worker for worker in ranks if worker not in present]

    def stall(self, why: str) -> None:
        """Mark training workers as waiting. They keep their rank, so a resume adds no newcomers."""
        for row in self._rows.values():
            if row.state == "training":
                row.state, row.note = "waiting", why

    def num_ranks(self) -> int:
        """Return the number of workers of the newest generation that are present."""
        return sum(row.rank is not None for row in self._rows.values())

    def num_training(self) -> int:
        """Return the number of workers that are training, including those about to leave."""
        return sum(row.rank is not None and row.state != "waiting" for row in self._rows.values())

    def mark(self, worker: str, state: str, note: str) -> None:
        """Record that a worker is leaving, has left or was lost."""
        row = self._row(worker)
        row.state, row.note = state, note
        # A worker that is about to leave still trains until the next step boundary.
        if state != "leaving":
            row.leave_generation(self.num_steps)
            self._drop_oldest_gone()

    def end(self) -> None:
        """Mark the remaining workers as done, because the job has ended."""
        for row in self._rows.values():
            row.leave_generation(self.num_steps, keep_rank=True)
            if row.state not in GONE:
                row.state, row.note = "done", ""

    def restart(self) -> None:
        """Mark all workers as left, because the job was resumed with new ones."""
        for row in self._rows.values():
            row.leave_generation(self.num_steps)
            if row.state != "lost":
                row.state, row.note = "left", "before the resume"
        self._drop_oldest_gone()

    def rows(self) -> tuple[WorkerRow, ...]:
        """Return the rows: ranks in order, then newcomers, then workers that are gone.

        Of more than ``MAX_ROWS`` workers, those that are not training come first, because a reader
        looks for them; the ranks with the highest numbers are left out.
        """
        shown = list(self._rows.values())
        if len(shown) > MAX_ROWS:
            shown.sort(key=lambda row: (row.state == "training", row.rank or 0))
            del shown[MAX_ROWS:]
        shown.sort(key=lambda row: (row.state in GONE, row.rank is None, row.rank or 0))
        return tuple(row.to_row(self.num_steps) for row in shown)

    @property
    def num(self) -> int:
        """Number of workers, including those that left most recently."""
        return len(self._rows)

    def _row(self, worker: str) -> TrackedWorker:
        return self._rows.setdefault(worker, TrackedWorker(worker=worker))

    def _drop_oldest_gone(self) -> None:
        # A spot job may lose hundreds of workers; the event list still has them.
        gone = [name for name, row in self._rows.items() if row.state in GONE]
        for name in gone[:-MAX_GONE]:
            del self._rows[name]


def split_of(timing: RankTimed | None) -> TimeSplit | None:
    """Return the shares of a worker's time and its throughput; None before its first report."""
    if timing is None or timing.elapsed_s <= 0:
        return None
    parts = {
        "data": timing.data_s,
        "compute": timing.compute_s,
        "communication": timing.communication_s,
        "optimizer": timing.optimizer_s,
    }
    # Separate clock readings can add up to slightly more than the elapsed time, but shares must not
    # exceed 1.
    whole = max(timing.elapsed_s, sum(parts.values()))
    shares = {name: spent / whole for name, spent in parts.items()}
    return TimeSplit(
        step=timing.step,
        num_steps=timing.num_steps,
        samples_per_s=timing.samples / timing.elapsed_s,
        shares=shares | {"other": max(0.0, 1.0 - sum(shares.values()))},  # time between the parts
    )


def waiting_reason(state: str, note: str, timing: RankTimed | None) -> str:
    """Return why a worker is not computing; empty if it is.

    >>> waiting_reason("warm", "", None)
    'the next generation'
    """
    if state == "waiting":
        return "the job to be resumed" if note == "paused" else "more workers"
    if state != "training":
        return _BEFORE_TRAINING.get(state, "")
    split = split_of(timing)
    if split is None:
        return ""
    # A rank that reaches the gradient exchange first waits there for the slowest rank, so
    # most of its communication time is waiting.
    data, communication = split.shares["data"], split.shares["communication"]
    if max(data, communication) < MIN_SHARE:
        return ""
    what, share = ("data", data) if data >= communication else ("other ranks", communication)
    return f"{what}, {share * 100:.0f} %"
