"""The default: one share a rank, and DistributedDataParallel adds up while it differentiates."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from etrain_jupyter.rules.samples import batch_plan
from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.rules.samples.shard_plan import Merge
from etrain_jupyter.trainer.gradients.comm_hook import CommHook
from etrain_jupyter.trainer.gradients.step import MicroBatch, Step, split_share
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import Pending, RankGroup
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers

# torch 2.13 renamed the flag. Buffers are averaged by ``_start_moves`` instead.
_DDP_FLAGS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in _DDP_FLAGS
    else {"broadcast_buffers": False}
)


class AveragedGradients:
    """Gradients of one generation's ranks, summed in whatever order the ranks arrive in.

    Args:
        group: The generation's.
        model: The notebook's.
        moving: Its buffers that move.
        has_unused: Whether some parameters get no gradient in a pass.
        global_batch_size: Samples of a full step.
        micro_batch_size: Most samples of one pass; None for no limit.
        num_passes: Fewest passes of a share, with one exchange after the last.
        watch: Told when nothing is left to compute.
        compression: How gradients travel, see ``compression.compressed``.
        measures_noise: Whether each step shall tell ``mean_of_squares``.
    """

    num_slots = 1
    merges: tuple[Merge, ...] = ()

    def __init__(
        self,
        group: RankGroup,
        model: nn.Module,
        *,
        moving: RunningBuffers,
        has_unused: bool,
        global_batch_size: int,
        micro_batch_size: int | None,
        num_passes: int = 1,
        watch: Stopwatch | None = None,
        compression: str = "none",
        measures_noise: bool = False,
    ) -> None:
        self._group = group
        self._moving = moving
        self._global_batch_size = global_batch_size
        self._measures_noise = measures_noise and group.world_size > 1
        self._hook = CommHook(
            group,
            compression=compression,
            watch=watch or Stopwatch(),
            measures_squares=self._measures_noise,
        )
        self._micro_batch_size = micro_batch_size
        self._num_passes = num_passes
        self._min_share = min(2, max(1, global_batch_size // group.world_size))
        self._module = _wrap(model, group, has_unused, self._hook)
        self._num_steps = 0

    def parts(self, span: StepRange) -> list[MicroBatch]:
        """Return the parts of this rank's share; a rank without one gets the first of rank 0's.

        It passes somebody else's samples, to take part, and counts for nothing.
        """
        plan, rank = self._plan_of(span), self._group.rank
        owner = rank if plan.counts[rank] else 0
        start = plan.starts[owner]
        share = range(start, start + plan.counts[owner])
        parts = split_share(share, plan.num_micro_steps, stream=owner)
        return parts if owner == rank else parts[:1]

    def _plan_of(self, span: StepRange) -> batch_plan.StepPlan:
        return batch_plan.plan_step(
            count=span.samples,
            world_size=self._group.world_size,
            micro_batch_size=self._micro_batch_size,
            min_share=self._min_share,
            num_passes=self._num_passes,
        )

    def compute(self, step: Step) -> None:
        """Pass the parts of this rank's share; the last backward pass adds up over the ranks."""
        count = self._plan_of(step.span).counts[self._group.rank]
        self._group.contributes = count > 0
        slot = 0 if count else None
        self._agree_on_buckets()
        step.seed(self._group.rank)
        parts = self.parts(step.span)
        for _ in parts[:-1]:
            with self._no_sync():
                _differentiate(step.run_part(self._module, slot))
        loss = step.run_part(self._module, slot)
        step.start_header()
        moves = self._start_moves(step.buffers_before, count / step.span.samples)
        _differentiate(loss)
        self._group.settle()
        step.header.wait()
        if moves is not None:
            moves[1].wait()
            self._moving.move(step.buffers_before, moves[0])
        if self._measures_noise:
            self._measure_noise(step)

    def _measure_noise(self, step: Step) -> None:
        """Find the mean over the ranks of the square norms of their own mean gradients."""
        square = self._hook.take_square_norm()
        if step.span.samples != self._global_batch_size:
            return  # the shares of a small step are noisier, and perhaps uneven
        # A rank's gradient is its share of the step's; its mean is as many times as large as there
        # are ranks. So the mean of the squares is W * W / W times the sum of these.
        own = torch.tensor([square * self._group.world_size], dtype=torch.float64)
        self._group.all_reduce(own).wait()
        step.mean_of_squares = float(own)

    def _agree_on_buckets(self) -> None:
        """Let DDP do now what it would do in its second forward pass.

        It agrees on the order of the buckets by a broadcast that it waits for inside gloo. Here it
        is counted, so that a rank that hangs in its own code does not look like those that wait.
        Not in the exchange thread: abandoned there, the reducer would outlive its generation, and
        take its hooks off the parameters while the next one differentiates.
        """
        self._num_steps += 1
        if self._num_steps == 2 and isinstance(self._module, DistributedDataParallel):
            self._group.wait_for(self._module.reducer._rebuild_buckets)

    def _start_moves(
        self, before: list[torch.Tensor], weight: float
    ) -> tuple[torch.Tensor, Pending] | None:
        """Start to average how buffers (BatchNorm's statistics) moved: all ranks keep the same."""
        if not before or self._group.world_size == 1:
            return None
        moves_B = self._moving.moves_from(before, weight)
        return moves_B, self._group.all_reduce(moves_B)

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self._module, DistributedDataParallel):
            return self._module.no_sync()
        return contextlib.nullcontext()

    def close(self) -> None:
        """Take DDP off the model, now and in this thread.

        Its reducer takes its hooks off the parameters when it is freed. Left to chance (some
        exception refers to it), that may happen while the next generation differentiates.
        """
        if isinstance(self._module, DistributedDataParallel):
            del self._module.logger, self._module.reducer


def _wrap(model: nn.Module, group: RankGroup, has_unused: bool, hook: CommHook) -> nn.Module:
    if group.world_size == 1:
        return model
    module = DistributedDataParallel(
        model, init_sync=False, find_unused_parameters=has_unused, **_NO_BUFFER_SYNC
    )
    # A lambda, because torch insists that annotations be classes and ours are strings.
    module.register_comm_hook(None, lambda _, bucket: hook(bucket))
    return module


def _differentiate(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
