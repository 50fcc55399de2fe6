"""Hooks that the training loop calls between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.state.train_state import Mark


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Describes the boundary after a committed step; passed to the loop's hooks."""

    group: RankGroup
    """The process group of the current generation."""
    step_s: float
    """Duration of the last step in seconds, excluding checkpoints and evaluations before it."""
    is_save_agreed: bool = False
    """True if all ranks agreed during the last step to write a checkpoint together."""


class BoundaryHooks:
    """Methods that the training loop calls in the main thread, at step boundaries unless noted.

    The default methods do nothing.
    """

    def wants_save(self, before: Mark, after: Mark) -> bool:
        """Return True if rank 0 requests a joint checkpoint of the state after a step.

        Called on rank 0, within the step. Has no side effects.
        """
        return False

    def after_step(self, boundary: Boundary) -> None:
        """Handle a committed step, for example by saving a checkpoint."""

    def after_eval(self, group: RankGroup) -> None:
        """Handle an evaluation, or the start of a generation whose state is already evaluated."""


NO_HOOKS = BoundaryHooks()
