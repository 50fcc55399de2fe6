"""The trainers of a job, as an immutable mapping that also counts them.

The state machine runs after every report from each of the N ranks. Whatever it checks each time is
therefore counted here instead of being collected from the N members.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from etrain_jupyter.log.events import LeaveReason
from etrain_jupyter.rules.membership.stimuli import NO_PROGRESS, Progress, ProgressSeen

MemberPhase = Literal["starting", "warm", "ranked", "reported"]


@dataclass(frozen=True, kw_only=True)
class ProgressReading:
    """The newest reading of a trainer's progress page."""

    seen: ProgressSeen
    last_seen: float
    """When the coordinator received it."""
    moved_at: float
    """When the counters of collectives and beats last changed."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One trainer process of the job."""

    trainer: str
    worker: str
    order: int
    """Number of this trainer within the job, from 1. Older trainers get the lower ranks."""
    device: str = ""
    """The device as torch names it; empty until the trainer is warm."""
    gpu: str = ""
    """Identifier of the GPU; empty if there is none."""
    phase: MemberPhase = "starting"
    """``starting`` until it is warm, ``warm`` until it is admitted, ``ranked`` in the current
    generation, ``reported`` after it has left a generation, while it waits for the next."""
    since: float = 0.0
    """When it entered this phase."""
    progress: Progress = NO_PROGRESS
    leaving: LeaveReason | Literal[""] = ""
    """Why it leaves at the next step boundary; empty if it stays."""
    save_at: float = math.inf
    """Deadline for its last step, so that its state is durable before its machine is interrupted.
    Infinite if no interruption is planned, or its time is unknown."""
    leave_at: float = 0.0
    """A leaving member continues training until this time if the job has room for it; 0.0 if it
    leaves at the next step boundary in any case."""
    formed: bool = False
    """True if it has reported that it is stepping in the current generation."""
    steps_since: float = 0.0
    """When it first reported that; 0.0 before."""
    form_times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds it took to connect, to sync and to wrap the model."""
    signs: ProgressReading | None = None
    """None until its supervisor has reported progress."""
    is_warned_of: bool = False
    """True if the log already has a warning that it is stalled."""
    killed_at: float = 0.0
    """When its supervisor was instructed to kill it; 0.0 if it was not."""
    killed_why: str = ""


class Members(Mapping[str, Member]):
    """The members by trainer, oldest first."""

    __slots__ = ("_all", "_by_worker", "_counts")

    def __init__(self) -> None:
        self._all: dict[str, Member] = {}
        self._by_worker: dict[str, str] = {}  # name of the worker's oldest trainer
        self._counts: dict[str, int] = {}  # by ``_marks_of``

    def __getitem__(self, trainer: str) -> Member:
        return self._all[trainer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return f"Members({self._all!r})"

    # --- queries ---

    def in_phase(self, *phases: MemberPhase) -> list[Member]:
        """Return the members in one of these phases, oldest first."""
        if not self.num_in(*phases):
            return []
        return [m for m in self._all.values() if m.phase in phases]

    def num_in(self, *phases: MemberPhase) -> int:
        """Return the number of members in these phases."""
        return sum(self._counts.get(phase, 0) for phase in phases)

    def of_worker(self, worker: str) -> Member | None:
        """Return the worker's trainer, or None."""
        trainer = self._by_worker.get(worker)
        return None if trainer is None else self._all[trainer]

    @property
    def num_leaving(self) -> int:
        """Number of members that leave at the next step boundary."""
        return self._counts.get("leaving", 0)

    @property
    def num_killed(self) -> int:
        """Number of members whose supervisor was instructed to kill them."""
        return self._counts.get("killed", 0)

    @property
    def num_formed(self) -> int:
        """Number of ranks of the newest generation that have formed, including those that left."""
        return self._counts.get("formed", 0)

    # --- changes ---

    def with_member(self, member: Member) -> Members:
        """Return a copy with ``member``, which replaces any member of the same name."""
        changed = self._copy()
        old = self._all.get(member.trainer)
        changed._all[member.trainer] = member
        if old is None:
            newest = next(reversed(self._all.values()), None)
            # A restarted scheduler adopts trainers in any order.
            if newest is not None and member.order < newest.order:
                by_order = sorted(changed._all.values(), key=lambda m: m.order)
                changed._all = {m.trainer: m for m in by_order}
                changed._index()
            else:
                changed._by_worker = self._by_worker.copy()
                changed._by_worker.setdefault(member.worker, member.trainer)
        changed._count(old, member)
        return changed

    def without(self, trainer: str) -> Members:
        """Return a copy without this trainer."""
        old = self._all.get(trainer)
        if old is None:
            return self
        changed = self._copy()
        del changed._all[trainer]
        changed._index()
        changed._count(old, None)
        return changed

    def _copy(self) -> Members:
        copy = Members()
        # Copying references is fast: 5 us for 1,000 members. The other dicts are shared until they
        # change.
        copy._all, copy._by_worker, copy._counts = self._all.copy(), self._by_worker, self._counts
        return copy

    def _index(self) -> None:
        self._by_worker = {m.worker: m.trainer for m in reversed(self._all.values())}

    def _count(self, old: Member | None, new: Member | None) -> None:
        before, after = _marks_of(old), _marks_of(new)
        if before != after:
            self._counts = self._counts.copy()
            for marks, change in ((before, -1), (after, 1)):
                for mark in marks:
                    self._counts[mark] = self._counts.get(mark, 0) + change


def _marks_of(member: Member | None) -> tuple[str, ...]:
    # The names of the counts to which a member contributes.
    if member is None:
        return ()
    is_formed = member.formed and member.phase in ("ranked", "reported")
    marks = {"leaving": member.leaving, "killed": member.killed_at, "formed": is_formed}
    return (member.phase, *(mark for mark, is_set in marks.items() if is_set))


if TYPE_CHECKING:
    # The version below skips the initializer, and takes a third of the time. While a generation
    # forms, the state of a job with 1,000 ranks is replaced ten times per rank. With the original,
    # that took half the time of the scheduler's decisions. mypy checks names and types only for the
    # original.
    from dataclasses import replace as replace
else:

    def replace(instance: Any, /, **changes: Any) -> Any:
        """Return a copy of a dataclass with some fields changed.

        Args:
            instance: An instance of a class without slots and ``__post_init__``.
            **changes: New values of fields.

        Raises:
            TypeError: If the class lacks such a field.
        """
        values = instance.__dict__
        if not changes.keys() <= values.keys():
            unknown = ", ".join(sorted(changes.keys() - values.keys()))
            raise TypeError(f"{type(instance).__name__} has no field {unknown}")
        copy = object.__new__(type(instance))
        copy.__dict__.update(values, **changes)
        return copy
