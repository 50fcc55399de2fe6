"""A step whose mean loss was NaN or infinite, and the message about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NanLoss:
    """A step that all ranks discarded before its update because the loss was not finite."""

    step: int
    loss: float
    """The mean over the ranks: NaN, or infinite."""
    sources: tuple[tuple[int, str], ...] = ()
    """Rank and worker of each rank that has reported a non-finite loss on its own samples."""

    def to_text(self, saved_step: int) -> str:
        """Describe what happened, where, and which state remains.

        Args:
            saved_step: The newest durable checkpoint; below 0 if there is none.

        >>> NanLoss(step=12, loss=float("nan"), sources=((1, "w1"),)).to_text(8)
        'the loss of step 12 is nan on rank 1 (w1); no rank updated its weights, which are those \
of step 11; the newest checkpoint is of step 8'
        """
        # All ranks report the mean, but only the ranks that caused it report themselves as sources,
        # and these may be lost.
        named = [f"rank {rank} ({worker})" for rank, worker in self.sources]
        where = f" on {', '.join(named)}" if named else " (the ranks that computed it were lost)"
        newest = f"the newest checkpoint is of step {saved_step}"
        return (
            f"the loss of step {self.step} is {self.loss}{where}; no rank updated its weights, "
            f"which are those of step {self.step - 1}; "
            f"{newest if saved_step >= 0 else 'there is no checkpoint yet'}"
        )
