"""Faults described as data (kind, rank and step), so that a run can be repeated.

::

    plan = FaultPlan().kill(rank=1, step=3).notice(rank=0, step=7).hang(rank=2, step=9)
    job = submit_with_faults({"model": Net, ...}, plan)

Each fault happens once per job, in the first trainer of that rank to reach the place at the given
step or a later one.
"""

from __future__ import annotations

import difflib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etrain_jupyter.notebook.job.training_job import TrainingJob

PLACES = ("forward", "all_reduce", "commit", "form", "sync", "warm", "eval", "evaluated")
"""Places in the trainer where a fault can happen:

- In a step: ``forward`` (before the forward pass), ``all_reduce``, ``commit`` (before the update).
- Between generations: ``form`` (while one forms), ``sync`` (while the state is copied).
- Before the first step: ``warm`` (end of the warm-up; ``rank`` counts the job's trainers from 0).
- ``eval`` (in an evaluation), ``evaluated`` (before its result is reported or the weights saved).
"""

SHARD_PLACES = ("agree", "agreed", "updated")
"""Places in a step of a job with ``shard: optimizer`` and several ranks: before the ranks agree
that all have complete gradients; before the update; and after it, while the weights are exchanged,
which only three or more ranks do."""

AT_A_PLACE = ("kill", "segfault", "exit", "error", "stop", "hold_gil", "hang", "disconnect")
"""Faults in the trainer process."""
BY_COORDINATOR = ("notice", "kill_worker")
"""Faults that affect the rank's worker, once the step is committed."""
PLANTED = ("lose_sample", "repeat_sample", "diverge", "nan_loss")
"""Planted bugs that the audit or the step itself must detect."""
KINDS = (*AT_A_PLACE, *BY_COORDINATOR, *PLANTED)


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault of a plan."""

    kind: str
    """One of ``KINDS``."""
    rank: int | None
    """The affected rank; None for the first rank that reaches the place."""
    step: int
    """Number of the update, from 1; the fault happens at this update or the next possible one."""
    at: str = "forward"
    """One of ``PLACES`` or ``SHARD_PLACES``; ignored for faults that do not happen in a trainer."""
    notice_s: float = 120.0
    """Time between a notice and the end of the machine, in seconds."""

    def __post_init__(self) -> None:
        _check_word("kind", self.kind, KINDS)
        _check_word("place", self.at, (*PLACES, *SHARD_PLACES))
        if self.rank is not None and self.rank < 0:
            raise ValueError(f"{self.kind}: rank={self.rank} must be at least 0")
        if self.step < 0:
            raise ValueError(f"{self.kind}: step={self.step} must be at least 0")
        if self.notice_s < 0:
            raise ValueError(f"{self.kind}: notice_s={self.notice_s:g} must be at least 0")

    def to_code(self) -> str:
        """Return the call that adds this fault to a plan."""
        arguments = [f"rank={self.rank}", f"step={self.step}"]
        if self.kind in AT_A_PLACE and self.at != "forward":
            arguments.append(f'at="{self.at}"')
        if self.kind == "notice" and self.notice_s != 120.0:
            arguments.append(f"notice_s={self.notice_s:g}")
        return f"{self.kind}({', '.join(arguments)})"


@dataclass(frozen=True)
class FaultPlan:
    """An immutable set of faults. Each method returns a plan with one more fault."""

    faults: tuple[PlannedFault, ...] = ()

    def kill(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Kill the rank's trainer with SIGKILL."""
        return self.add("kill", rank=rank, step=step, at=at)

    def segfault(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Crash the trainer with an invalid memory access."""
        return self.add("segfault", rank=rank, step=step, at=at)

    def exit(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Exit with ``os._exit``, without an error message."""
        return self.add("exit", rank=rank, step=step, at=at)

    def error(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Raise an exception in the framework."""
        return self.add("error", rank=rank, step=step, at=at)

    def stop(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Suspend the trainer with SIGSTOP: no thread runs, and its connections stay open."""
        return self.add("stop", rank=rank, step=step, at=at)

    def hold_gil(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Hold the interpreter's lock forever: no thread runs Python."""
        return self.add("hold_gil", rank=rank, step=step, at=at)

    def hang(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Block the trainer's main thread forever, while other threads run."""
        return self.add("hang", rank=rank, step=step, at=at)

    def disconnect(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Close the trainer's connections to the other ranks; the process keeps running."""
        return self.add("disconnect", rank=rank, step=step, at=at)

    def notice(self, *, rank: int | None, step: int, notice_s: float = 120.0) -> FaultPlan:
        """Preempt the rank's worker, with a notice."""
        return self.add("notice", rank=rank, step=step, notice_s=notice_s)

    def kill_worker(self, *, rank: int | None, step: int) -> FaultPlan:
        """Kill the rank's whole worker, like a power failure."""
        return self.add("kill_worker", rank=rank, step=step)

    def lose_sample(self, *, rank: int | None, step: int) -> FaultPlan:
        """Skip a sample in a step: a planted bug."""
        return self.add("lose_sample", rank=rank, step=step)

    def repeat_sample(self, *, rank: int | None, step: int) -> FaultPlan:
        """Train on one sample twice and skip another: a planted bug."""
        return self.add("repeat_sample", rank=rank, step=step)

    def diverge(self, *, rank: int | None, step: int) -> FaultPlan:
        """Change one weight on one rank only: a planted bug."""
        return self.add("diverge", rank=rank, step=step)

    def nan_loss(self, *, rank: int | None, step: int) -> FaultPlan:
        """Return NaN as the rank's share of a step's loss."""
        return self.add("nan_loss", rank=rank, step=step)

    def add(self, kind: str, **values: Any) -> FaultPlan:
        """Add a fault by the name of its kind.

        Raises:
            ValueError: If the kind or place is unknown, or a number is negative.
        """
        return FaultPlan((*self.faults, PlannedFault(kind=kind, **values)))

    def to_list(self) -> list[dict[str, Any]]:
        """Return the faults as dictionaries for the coordinator; ``id`` counts from 1."""
        return [
            {"id": number, "kind": f.kind, "rank": f.rank, "step": f.step, "at": f.at}
            | ({"notice_s": f.notice_s} if f.kind == "notice" else {})
            for number, f in enumerate(self.faults, start=1)
        ]

    def to_code(self) -> str:
        """Return the Python expression for this plan.

        >>> FaultPlan().kill(rank=1, step=3).hang(rank=0, step=9, at="commit").to_code()
        'FaultPlan().kill(rank=1, step=3).hang(rank=0, step=9, at="commit")'
        """
        return ".".join(["FaultPlan()", *(fault.to_code() for fault in self.faults)])

    def __str__(self) -> str:
        return self.to_code()

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        num_steps: int,
        num_ranks: int = 4,
        max_faults: int = 5,
        kinds: Sequence[str] = (*AT_A_PLACE, *BY_COORDINATOR),
        places: Sequence[str] = PLACES,
    ) -> FaultPlan:
        """Generate a plan, reproducibly.

        Args:
            seed: Random seed.
            num_steps: Steps of the job; faults are spread over all of them.
            num_ranks: Faults affect ranks below this number. A fault for a rank that never exists
                does not happen.
            max_faults: The plan has between 2 and this many faults.
            kinds: Kinds to choose from.
            places: Places to choose from.
        """
        rng = random.Random(f"fault plan {seed}")
        plan = cls()
        # The order of the draws is part of the plan. Changing it gives each seed a different plan.
        for _ in range(rng.randint(min(2, max_faults), max_faults)):
            kind = rng.choice(list(kinds))
            step = rng.randint(1, num_steps)
            if kind in AT_A_PLACE:
                place = rng.choice(list(places))
                # "warm" is before the first step. "form" and "sync" need a generation that forms at
                # or after `step`, often because of another fault, so choose an earlier step.
                step = {"warm": 0, "form": step // 2, "sync": step // 2}.get(place, step)
                plan = plan.add(kind, rank=rng.randrange(num_ranks), step=step, at=place)
            elif kind == "notice":
                # Some machines end before their notice period is over.
                notice_s = rng.choice([0.0, 0.2, 120.0])
                plan = plan.notice(rank=rng.randrange(num_ranks), step=step, notice_s=notice_s)
            else:
                plan = plan.add(kind, rank=rng.randrange(num_ranks), step=step)
        return plan


def submit_with_faults(
    body: Mapping[str, Any], plan: FaultPlan, *, names: Mapping[str, Any] | None = None
) -> TrainingJob:
    """Submit a job with faults; otherwise like ``etrain_jupyter.distributed``.

    Args:
        body: The keys of the cell's body.
        plan: The faults. They are not part of the job's configuration.
        names: Namespace for resolving references; by default the caller's.
    """
    from etrain_jupyter import launch
    from etrain_jupyter.config import parse_mapping
    from etrain_jupyter.notebook.job.open_jobs import submit_job

    # As in a cell: expressions in the body may use names from the calling function.
    if names is None:
        caller = sys._getframe(1)
        names = {**caller.f_globals, **caller.f_locals}
    job = launch.plan_job(parse_mapping(dict(body), names), names)
    job.print_warnings()
    # Submit like %%distributed does after planning, but with the faults.
    return submit_job(
        job.config,
        job.bundle,
        address=job.start_pool(),
        store=job.runs,
        cell=job.cell,
        faults=plan.to_list(),
    )


def _check_word(what: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Use one of: {', '.join(known)}."
        raise ValueError(f"The fault's {what} {word!r} is unknown. {hint}")
