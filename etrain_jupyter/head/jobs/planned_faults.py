"""Track a job's planned faults that have not fired, and which trainer injects each."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from etrain_jupyter.wire.messages import Fault

FATAL = frozenset({"kill", "segfault", "exit", "error", "stop", "hold_gil", "hang"})
"""Kinds that end the trainer, either directly or because it blocks the others."""

BY_COORDINATOR = frozenset({"notice", "kill_worker"})
"""Kinds that affect a worker, not its trainer; the coordinator injects them."""


class PlannedFaults:
    """A job's planned faults that have not fired yet."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._left = {fault["id"]: fault for fault in faults}
        # For faults that any trainer may inject while warming up: the chosen trainer, by fault id.
        self._given_to: dict[int, str] = {}

    @property
    def is_empty(self) -> bool:
        """True if all faults have fired."""
        return not self._left

    @property
    def left(self) -> tuple[int, ...]:
        """Ids of the faults that have not fired."""
        return tuple(self._left)

    def of_newcomer(self, trainer: str, *, among: Collection[str]) -> list[Fault]:
        """Return the faults that a trainer may inject before it becomes a rank.

        A fault without a rank is given to one trainer at a time. Otherwise two trainers that warm
        up at the same time would both inject it.

        Args:
            trainer: The trainer that is being launched.
            among: The job's trainers that have not ended.
        """
        # If a trainer ended before its fault fired, the next trainer gets the fault.
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
        """Return the faults that a rank may inject. A fault without a rank is given to one rank."""
        # The fault's id determines the rank, so that several such faults are spread over the ranks.
        return [
            fault
            for fault in self._of_trainers()
            if (fault["rank"] is not None or fault["id"] % world_size == rank)
            and not (fault["rank"] is None and fault["at"] == "warm")
        ]

    def _of_trainers(self) -> list[Fault]:
        return [fault for fault in self._left.values() if fault["kind"] not in BY_COORDINATOR]

    def fire(self, fault_id: int) -> Fault | None:
        """Remove a fault from the plan and return it; None if it has already fired."""
        return self._left.pop(fault_id, None)

    def due(self, step: int, world_size: int) -> list[Fault]:
        """Remove and return the coordinator's faults due at this step and world size."""
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
