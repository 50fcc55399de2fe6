"""What a rank tells the log of its steps: records, and remarks in words."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from etrain_jupyter.trainer.gradients.step import Step
from etrain_jupyter.trainer.gradients.stopwatch import StepTimes
from etrain_jupyter.trainer.objective.measures import Means


def step_record(
    step: Step, means: Means, *, lr: float, elapsed_s: float, times: StepTimes, is_skipped: bool
) -> dict[str, Any]:
    """Return the fields of ``events.StepCompleted`` of a step that is committed."""
    header, span = step.header, step.span
    return {
        "generation": step.group.generation,
        "step": step.number,
        "epoch": span.epoch,
        "first": span.first,
        "samples": header.num_samples,
        "sample_checksum": header.checksum,
        "loss": means.loss,
        "lr": lr,
        "world_size": step.group.world_size,
        "samples_per_s": span.samples / elapsed_s,
        **{name: round(seconds, 6) for name, seconds in asdict(times).items()},
        "metrics": means.metrics,
        "ranks_agree": header.ranks_agree,
        "skipped": is_skipped,
        "time": time.time(),
    }


def words_of_skip(step: int, means: Means, loss_scale: float) -> str:
    """Return why no rank updated its weights in a step."""
    why, then = "gradients overflowed in fp16", f"the loss scale is {loss_scale:g} now"
    if not means.weight:
        why, then = "weight is 0 for every batch", "its loss, a mean over nothing, is NaN"
    return f"step {step}: {why}, so no rank updated its weights; {then}"


def words_of_shrinking(
    step: int, *, rank: int, size: int | None, in_step: bool, is_torn: bool
) -> str:
    """Return what follows from memory that ran out.

    Args:
        step: The last one that is committed.
        rank: Where it ran out.
        size: Of the micro batches from now on.
        in_step: Whether a step was being made, not an evaluation.
        is_torn: Whether it was in the update itself.
    """
    begun = f"step {step + 1}" if in_step else f"the evaluation of step {step}"
    where, what = "", f"a new generation goes on from step {step}, and nothing is lost"
    if is_torn:
        where = ", in the update"
        what = "its weights are dropped, and those of the others or a checkpoint taken"
    return (
        f"rank {rank} ran out of memory in {begun}{where}: its micro batches go down to {size}; "
        f"{what}"
    )
