"""Faults as data: which rank suffers what, at which step, so that a run can be repeated.

::

    plan = FaultPlan().kill(rank=1, step=3).notice(rank=0, step=7).hang(rank=2, step=9)
    job = submit_with_faults({"model": Net, ...}, plan)

Each fault is committed once in a job, by the first trainer that comes to its place with its rank,
at its step or the first later one that such a rank reaches.
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
"""Where a trainer may be when it happens. In a step: before its forward pass, while its averages
are under way, before its update. Between generations: while one forms, while the state is copied.
Before the first: at the end of the warm-up, where ``rank`` counts the job's trainers from 0. And
within an evaluation, and after one, before anybody is told of it or its weights are saved."""

AT_A_PLACE = ("kill", "segfault", "exit", "error", "stop", "hold_gil", "hang", "disconnect")
"""Kinds that a trainer commits."""
BY_COORDINATOR = ("notice", "kill_worker")
"""Kinds that befall the worker of a rank once the step is committed."""
PLANTED = ("lose_sample", "repeat_sample", "diverge", "nan_loss")
"""Bugs on purpose, for the audit or the step itself to find."""
KINDS = (*AT_A_PLACE, *BY_COORDINATOR, *PLANTED)


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault of a plan."""

    kind: str
    """One of ``KINDS``."""
    rank: int | None
    """Whose fault; None for whichever rank is there first."""
    step: int
    """Updates are counted from 1; this one is being made, or the first one after it."""
    at: str = "forward"
    """One of ``PLACES``; of no meaning for kinds that a trainer does not commit."""
    notice_s: float = 120.0
    """How long after a notice the machine is taken."""

    def __post_init__(self) -> None:
        _check_word("kind of fault", self.kind, KINDS)
        _check_word("place", self.at, PLACES)
        if self.rank is not None and self.rank < 0:
            raise ValueError(f"{self.kind}: rank={self.rank} must not be below 0")
        if self.step < 0:
            raise ValueError(f"{self.kind}: step={self.step} must not be below 0")
        if self.notice_s < 0:
            raise ValueError(f"{self.kind}: notice_s={self.notice_s:g} must not be below 0")

    def to_code(self) -> str:
        """Return the call that adds it to a plan."""
        words = [f"rank={self.rank}", f"step={self.step}"]
        if self.kind in AT_A_PLACE and self.at != "forward":
            words.append(f'at="{self.at}"')
        if self.kind == "notice" and self.notice_s != 120.0:
            words.append(f"notice_s={self.notice_s:g}")
        return f"{self.kind}({', '.join(words)})"


@dataclass(frozen=True)
class FaultPlan:
    """Faults to come, in any order. Every method returns a longer plan; a plan never changes."""

    faults: tuple[PlannedFault, ...] = ()

    def kill(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """End the trainer with SIGKILL."""
        return self.add("kill", rank=rank, step=step, at=at)

    def segfault(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """End it by a read of memory that is not there."""
        return self.add("segfault", rank=rank, step=step, at=at)

    def exit(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """End it by ``os._exit``, without a word."""
        return self.add("exit", rank=rank, step=step, at=at)

    def error(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Raise an exception in the framework."""
        return self.add("error", rank=rank, step=step, at=at)

    def stop(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Stop it with SIGSTOP: nothing of it runs, and no connection is closed."""
        return self.add("stop", rank=rank, step=step, at=at)

    def hold_gil(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Hold the interpreter's lock for ever: none of its threads runs Python any more."""
        return self.add("hold_gil", rank=rank, step=step, at=at)

    def hang(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Let its main thread sleep for ever, while the others go on."""
        return self.add("hang", rank=rank, step=step, at=at)

    def disconnect(self, *, rank: int | None, step: int, at: str = "forward") -> FaultPlan:
        """Break its connections to the other ranks; it lives."""
        return self.add("disconnect", rank=rank, step=step, at=at)

    def notice(self, *, rank: int | None, step: int, notice_s: float = 120.0) -> FaultPlan:
        """Preempt its worker: with a notice, then for real."""
        return self.add("notice", rank=rank, step=step, notice_s=notice_s)

    def kill_worker(self, *, rank: int | None, step: int) -> FaultPlan:
        """Kill its whole worker, as a machine does that loses its power."""
        return self.add("kill_worker", rank=rank, step=step)

    def lose_sample(self, *, rank: int | None, step: int) -> FaultPlan:
        """Leave a sample out of a step: a bug on purpose."""
        return self.add("lose_sample", rank=rank, step=step)

    def repeat_sample(self, *, rank: int | None, step: int) -> FaultPlan:
        """Train a sample twice, in place of another one: a bug on purpose."""
        return self.add("repeat_sample", rank=rank, step=step)

    def diverge(self, *, rank: int | None, step: int) -> FaultPlan:
        """Change one weight on one rank alone: a bug on purpose."""
        return self.add("diverge", rank=rank, step=step)

    def nan_loss(self, *, rank: int | None, step: int) -> FaultPlan:
        """Let its share of a step's loss be NaN."""
        return self.add("nan_loss", rank=rank, step=step)

    def add(self, kind: str, **values: Any) -> FaultPlan:
        """Add a fault by the name of its kind.

        Raises:
            ValueError: If there is no such kind or place, or a number is below 0.
        """
        return FaultPlan((*self.faults, PlannedFault(kind=kind, **values)))

    def to_list(self) -> list[dict[str, Any]]:
        """Return the wire form: plain dicts, numbered."""
        return [
            {"id": number, "kind": f.kind, "rank": f.rank, "step": f.step, "at": f.at}
            | ({"notice_s": f.notice_s} if f.kind == "notice" else {})
            for number, f in enumerate(self.faults, start=1)
        ]

    def to_code(self) -> str:
        """Return the expression that makes this plan again.

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
        """Make a plan that is the same each time for the same arguments.

        Args:
            seed: Any number.
            num_steps: Steps of the job; faults come in all of them.
            num_ranks: Faults befall ranks below this; one that never exists commits none.
            max_faults: From 2 to this many.
            kinds: What may happen.
            places: Where it may happen.
        """
        chance = random.Random(f"fault plan {seed}")
        plan = cls()
        for _ in range(chance.randint(min(2, max_faults), max_faults)):
            kind = chance.choice(list(kinds))
            step = chance.randint(1, num_steps)
            if kind in AT_A_PLACE:
                place = chance.choice(list(places))
                # What happens between steps needs some of the job after it.
                step = {"warm": 0, "form": step // 2, "sync": step // 2}.get(place, step)
                plan = plan.add(kind, rank=chance.randrange(num_ranks), step=step, at=place)
            elif kind == "notice":
                # Some machines are gone before the notice is over.
                notice_s = chance.choice([0.0, 0.2, 120.0])
                plan = plan.notice(rank=chance.randrange(num_ranks), step=step, notice_s=notice_s)
            else:
                plan = plan.add(kind, rank=chance.randrange(num_ranks), step=step)
        return plan


def submit_with_faults(
    body: Mapping[str, Any], plan: FaultPlan, *, names: Mapping[str, Any] | None = None
) -> TrainingJob:
    """Submit a job to which faults will happen; like ``etrain_jupyter.distributed`` otherwise.

    Args:
        body: The keys of the cell's body.
        plan: What will happen. It is no part of the job's configuration.
        names: What references are expressions over; by default the caller's names.
    """
    from etrain_jupyter import launch
    from etrain_jupyter.config import parse_mapping
    from etrain_jupyter.notebook.job.open_jobs import submit_job

    if names is None:
        caller = sys._getframe(1)
        names = {**caller.f_globals, **caller.f_locals}
    job = launch.plan_job(parse_mapping(dict(body), names), names)
    job.print_warnings()
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
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"no {what} {word!r}; {hint}")
