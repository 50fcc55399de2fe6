"""Hooks that the training loop calls between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.schedule import Mark


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Describes the boundary after a committed step; the loop passes it to its hooks."""

    group: RankGroup
    """The process group of the current generation."""
    step_s: float
    """Duration of the last step in seconds, excluding checkpoints and evaluations before it."""
    is_save_agreed: bool = False
    """True if all ranks agreed during the last step to write a checkpoint together."""


class BoundaryHooks(Protocol):
    """Methods that the training loop calls in the main thread, at step boundaries unless noted."""

    def wants_save(self, before: Mark, after: Mark) -> bool:
        """Return True if rank 0 requests a joint checkpoint of the state after a step.

        Called on rank 0, within the step. Has no side effects.
        """
        ...

    def after_step(self, boundary: Boundary) -> None:
        """Handle a committed step, for example by saving a checkpoint."""
        ...

    def after_eval(self, group: RankGroup) -> None:
        """Handle an evaluation, or the start of a generation whose state has been evaluated."""
        ...


class NoHooks:
    """No-op hooks; a base class for hooks that implement only some of the methods."""

    def wants_save(self, before: Mark, after: Mark) -> bool:
        """Return False: nothing is saved."""
        return False

    def after_step(self, boundary: Boundary) -> None:
        """Do nothing."""

    def after_eval(self, group: RankGroup) -> None:
        """Do nothing."""


NO_HOOKS = NoHooks()
