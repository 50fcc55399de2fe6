"""Planned faults of a job: which ones have not fired yet, and which rank commits them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from etrain_jupyter.wire.messages import Fault

FATAL = frozenset({"kill", "segfault", "exit", "error", "stop", "hold_gil", "hang"})
"""Kinds that end the trainer, directly or because it blocks the others."""

BY_COORDINATOR = frozenset({"notice", "kill_worker"})
"""Kinds that happen to a worker, not to its trainer."""


class PlannedFaults:
    """The faults of a job's plan that have not fired yet."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._left = {fault["id"]: fault for fault in faults}
        self._given_to: dict[int, str] = {}
        """Trainers that commit the faults of any trainer that warms up, by the fault's id."""

    @property
    def is_empty(self) -> bool:
        """Whether all have fired."""
        return not self._left

    @property
    def left(self) -> tuple[int, ...]:
        """The ids of those that have not fired."""
        return tuple(self._left)

    def of_newcomer(self, trainer: str, *, among: Collection[str]) -> list[Fault]:
        """Return those that a trainer may commit before it is a rank.

        A fault of any trainer goes to one trainer at a time: of two that warm up together, both
        would commit it.

        Args:
            trainer: The trainer that is being launched.
            among: The trainers of the job that have not ended.
        """
        mine = []
        for fault in self._of_trainers():
            has_any_rank = fault["rank"] is None
            if has_any_rank and self._given_to.get(fault["id"]) in among:
                continue
            if has_any_rank and fault["at"] == "warm":
                self._given_to[fault["id"]] = trainer
            if not has_any_rank or fault["at"] == "warm":
                mine.append(fault)
        return mine

    def of_rank(self, rank: int, world_size: int) -> list[Fault]:
        """Return those that a rank may commit. A fault of any rank goes to one of them."""
        return [
            fault
            for fault in self._of_trainers()
            if (fault["rank"] is not None or fault["id"] % world_size == rank)
            and not (fault["rank"] is None and fault["at"] == "warm")
        ]

    def _of_trainers(self) -> list[Fault]:
        return [fault for fault in self._left.values() if fault["kind"] not in BY_COORDINATOR]

    def fire(self, fault_id: int) -> Fault | None:
        """Remove one from the plan and return it; None if it has fired before."""
        return self._left.pop(fault_id, None)

    def due(self, step: int, world_size: int) -> list[Fault]:
        """Remove and return the coordinator's faults that are due at this step and world size."""
        found = [
            fault
            for fault in self._left.values()
            if fault["kind"] in BY_COORDINATOR
            and fault["step"] <= step
            and (fault["rank"] or 0) < world_size
        ]
        for fault in found:
            del self._left[fault["id"]]
        return found
