"""Hooks that the training loop calls between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.schedule import Mark


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The boundary after a committed step, as the loop reports it to its hooks."""

    group: RankGroup
    """The process group of the current generation."""
    step_s: float
    """Duration of the last step in seconds, excluding checkpoints and evaluations before it."""
    is_save_agreed: bool = False
    """True if all ranks have agreed, in the last step, to write a checkpoint together."""


class BoundaryHooks(Protocol):
    """Methods that a training loop calls at the boundaries of a generation, in its main thread."""

    def wants_save(self, before: Mark, after: Mark) -> bool:
        """Return True if rank 0 wants all ranks to write a checkpoint of the state after a step.

        Called on rank 0, within the step. Has no side effects.
        """
        ...

    def after_step(self, boundary: Boundary) -> None:
        """Handle a committed step, for example by saving a checkpoint."""
        ...

    def after_eval(self, group: RankGroup) -> None:
        """Handle an evaluation, or the start of a generation whose state is already evaluated."""
        ...


class NoHooks:
    """Hooks that do nothing; a base class for hooks that need only some of the methods."""

    def wants_save(self, before: Mark, after: Mark) -> bool:
        """Return False: nothing is saved."""
        return False

    def after_step(self, boundary: Boundary) -> None:
        """Do nothing."""

    def after_eval(self, group: RankGroup) -> None:
        """Do nothing."""


NO_HOOKS = NoHooks()
