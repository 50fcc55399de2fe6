"""Records and log messages of a rank's steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from etrain_jupyter.trainer.gradients.step import Step
from etrain_jupyter.trainer.gradients.step_header import StepHeader
from etrain_jupyter.trainer.gradients.stopwatch import StepTimes
from etrain_jupyter.trainer.objective.measures import Means


def step_record(
    step: Step, means: Means, *, lr: float, elapsed_s: float, times: StepTimes, is_skipped: bool
) -> dict[str, Any]:
    """Return the fields of ``events.StepCompleted`` for a committed step."""
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


def skip_message(step: int, means: Means, loss_scale: float) -> str:
    """Return the log message for a step in which no rank updated its weights."""
    why, then = "gradients overflowed in fp16", f"the loss scale is now {loss_scale:g}"
    if not means.weight:
        why, then = "weight is 0 for every batch", "its loss, a mean over nothing, is NaN"
    return f"step {step}: {why}, so no rank updated its weights; {then}"


def shares_message(step: int, counts: Sequence[int], header: StepHeader) -> str:
    """Return the log message for new shares of the samples."""
    costs_ms = ", ".join(f"{1e3 * cost:.3g}" if cost else "unknown" for cost in header.costs_s)
    return (
        f"step {step}: from the next step on, the ranks train on {', '.join(map(str, counts))} "
        f"samples each, by their measured times per sample (ms): {costs_ms}"
    )


def out_of_memory_message(
    step: int, *, rank: int, size: int | None, in_step: bool, is_torn: bool
) -> str:
    """Return the log message for a rank that ran out of memory.

    Args:
        step: The last committed step.
        rank: The rank that ran out of memory.
        size: Size of its micro-batches from now on.
        in_step: True if memory ran out in a step, False in an evaluation.
        is_torn: True if memory ran out during the optimizer's update.
    """
    begun = f"step {step + 1}" if in_step else f"the evaluation of step {step}"
    where, what = "", f"a new generation continues from step {step}, and nothing is lost"
    if is_torn:
        where = ", in the update"
        what = "its weights are dropped and replaced by another rank's or a checkpoint's"
    return (
        f"rank {rank} ran out of memory in {begun}{where}: its micro-batches are reduced to "
        f"{size}; {what}"
    )
