"""Records, log messages and requests of a rank's steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.trainer.boundary import BoundaryHooks
from etrain_jupyter.trainer.gradients.step import Step
from etrain_jupyter.trainer.gradients.step_header import RequestFlags, StepHeader
from etrain_jupyter.trainer.gradients.stopwatch import StepTimes
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.loop.evaluations import Evaluations
from etrain_jupyter.trainer.objective.measures import Means
from etrain_jupyter.trainer.schedule import Mark
from etrain_jupyter.trainer.state.train_state import TrainState


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


@dataclass(frozen=True, kw_only=True)
class StepRequests:
    """Sources of this rank's requests; read as late as possible, when the step header is sent."""

    state: TrainState
    change_pending: threading.Event
    """Set once this rank knows of a planned change."""
    evaluations: Evaluations
    hooks: BoundaryHooks

    def collect(self, group: RankGroup, span: StepRange) -> RequestFlags:
        """Return this rank's requests; only rank 0 requests evaluations and checkpoints."""
        is_rank_0 = group.rank == 0
        # The boundaries before and after the step in progress, which is not committed yet.
        before = Mark(self.state.step, self.state.position)
        after = Mark(self.state.step + 1, self.state.position + span.samples)
        # The decision depends on the sum of all headers, which is the same on all ranks. Any rank
        # may be the first to learn of a planned change, so each may request a stop. Only rank 0
        # makes the other requests: clocks differ between ranks, and only rank 0 knows how old the
        # newest checkpoint is.
        return RequestFlags(
            is_change_pending=self.change_pending.is_set(),
            is_eval_due=is_rank_0 and self.evaluations.every.is_time_over(time.monotonic()),
            is_save_due=is_rank_0 and self.hooks.wants_save(before, after),
        )
