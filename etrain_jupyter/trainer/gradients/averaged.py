"""Default gradients: one share per rank, summed by DistributedDataParallel in the backward pass."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from etrain_jupyter.rules.samples import batch_plan
from etrain_jupyter.rules.samples.balance import Balance
from etrain_jupyter.rules.samples.batch_plan import PassSamples, split_share
from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.rules.samples.shard_plan import Merge
from etrain_jupyter.trainer.feature import Step
from etrain_jupyter.trainer.group.process_group import Pending, RankGroup
from etrain_jupyter.trainer.seeds import seed_all
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.sync_batchnorm import SyncedNorms
from etrain_jupyter.trainer.times import Stopwatch

# Disables DDP's own synchronization of buffers, because ``_start_moves`` averages them. torch 2.13
# renamed the flag.
_DDP_FLAGS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in _DDP_FLAGS
    else {"broadcast_buffers": False}
)


MAX_SHARES = 16
"""Number of plans kept for steps of different sizes or speeds."""


class _Share(NamedTuple):
    """The shares of a step of one size."""

    counts: tuple[int, ...]
    """Samples of each rank."""
    parts: list[PassSamples]
    """Passes of this rank, the borrowed ones last."""
    num_own: int
    """Number of passes that count."""


class AveragedGradients:
    """Gradients of one generation, summed in the order in which the ranks arrive.

    Each rank's loss is scaled to its share of the step's mean loss. So the gradient is a sum over
    the ranks rather than a mean of means, and shares may be uneven.

    Args:
        has_unused: True if some parameters get no gradient in a pass.
        global_batch_size: Samples of a full step.
        micro_batch_size: Maximum number of samples per pass; None for no limit.
        num_passes: Minimum number of passes per share, with one exchange after the last pass.
        compression: Compression of the gradients; see ``compression.compressed``.
        measures_noise: Set ``mean_of_squares`` in each full step.
        by_speed: Share the samples by the measured speeds of the ranks.
        norms: The BatchNorm layers to synchronize; None without ``sync_batchnorm``.
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
        by_speed: bool = False,
        norms: SyncedNorms | None = None,
    ) -> None:
        self._group = group
        self._moving = moving
        self._norms = norms
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
        # BatchNorm rejects a single sample, so a share has at least two where possible.
        self._min_share = min(2, max(1, global_batch_size // group.world_size))
        self.balance = (
            Balance(group.world_size, batch_size=global_batch_size, min_share=self._min_share)
            if by_speed and group.world_size > 1
            else None
        )
        self._module = _wrap(model, group, has_unused, self._hook)
        # Synchronized BatchNorm, unused parameters and PowerSGD start sums of their own during a
        # pass, in the training thread. The exchange thread may be in the middle of the header, so
        # the ranks would start the sums in different orders.
        self.overlaps_device = norms is None and not has_unused and compression != "powersgd"
        self._num_steps = 0
        self._shares: dict[tuple[int, tuple[float, ...] | None], _Share] = {}

    def counts(self, span: StepRange) -> tuple[int, ...]:
        """Return the number of samples of each rank."""
        return self._share_of(span).counts

    def parts(self, span: StepRange) -> list[PassSamples]:
        """Return the micro-batches of this rank's share, and those that it borrows.

        A rank without samples runs the first micro-batch of rank 0, because DDP needs a backward
        pass on every rank. With synchronized BatchNorm, every rank runs as many passes as the rank
        with the largest share. Borrowed passes do not count.
        """
        return self._share_of(span).parts

    def _share_of(self, span: StepRange) -> _Share:
        # Nearly all steps have the same size.
        key = span.samples, self.balance.speeds if self.balance is not None else None
        if (share := self._shares.get(key)) is None:
            if len(self._shares) >= MAX_SHARES:
                self._shares.clear()
            share = self._shares[key] = self._plan_share(*key)
        return share

    def _plan_share(self, count: int, speeds: tuple[float, ...] | None) -> _Share:
        plan = batch_plan.plan_step(
            count=count,
            world_size=self._group.world_size,
            micro_batch_size=self._micro_batch_size,
            min_share=self._min_share,
            num_passes=self._num_passes,
            speeds=speeds,
        )
        own = self._parts_of(plan, self._group.rank)
        is_equal = self._norms is not None
        if own and not is_equal:
            return _Share(plan.counts, own, len(own))
        # Borrow from the rank with the largest share; if the shares are even, from rank 0.
        most = self._parts_of(plan, plan.counts.index(max(plan.counts)))
        parts = own + most[len(own) : len(most) if is_equal else 1]
        return _Share(plan.counts, parts, len(own))

    def _parts_of(self, plan: batch_plan.StepPlan, rank: int) -> list[PassSamples]:
        start = plan.starts[rank]
        share = range(start, start + plan.counts[rank])
        num_parts = plan.num_micro_steps
        if self.balance is not None and self._norms is None:
            # A slow rank with a small share needs fewer passes than the others. Passes of a few
            # samples would make it even slower. (Synchronized BatchNorm needs the same number on
            # all ranks.)
            num_parts = batch_plan.count_passes(
                len(share),
                micro_batch_size=self._micro_batch_size,
                min_share=self._min_share,
                num_passes=self._num_passes,
            )
        return split_share(share, num_parts, stream=rank)

    def compute(self, step: Step) -> None:
        """Run this rank's micro-batches; the last backward pass sums over the ranks."""
        # With two micro-batches per share:
        #
        #     pass 1   forward   backward, without sums
        #     pass 2   forward   header starts   backward: DDP sums each bucket as it is ready
        #     then     wait for the buckets, then for the header, then for the running buffers
        #
        # On a GPU, this thread only queues the passes, and the exchange thread waits for the
        # values of the header and of the running buffers.
        counts, parts, num_own = self._share_of(step.span)
        count = counts[self._group.rank]
        self._group.contributes = count > 0
        self._agree_on_buckets()
        seed_all(step.job_seed, step=step.number, rank=self._group.rank)
        with contextlib.ExitStack() as stack:
            if self._norms is not None:
                stack.enter_context(self._norms.over(self._group, step.watch))
            for number in range(len(parts) - 1):
                # DDP sums only in the last backward pass: one exchange per step.
                with self._no_sync():
                    self._forward(step, number < num_own).backward()  # type: ignore[no-untyped-call]
            loss = self._forward(step, len(parts) <= num_own)
            self._complete(step, loss, count / step.span.samples)
        if self._measures_noise:
            self._measure_noise(step)

    def _forward(self, step: Step, is_own: bool) -> torch.Tensor:
        if self._norms is not None:
            self._norms.counts = is_own
        loss = step.run_part(self._module, 0 if is_own else None)
        # A rank may add the gradients of a borrowed pass to those of its own passes.
        return loss if is_own else loss * 0.0

    def _complete(self, step: Step, loss: torch.Tensor, weight: float) -> None:
        """Run the last backward pass, and wait for all sums."""
        # Start the header after the last forward pass, because it contains that pass's loss. Its
        # communication overlaps with the backward pass.
        step.start_header()
        moves = self._start_moves(step, weight)
        loss.backward()  # type: ignore[no-untyped-call]
        # Wait for the gradients first, because a failed sum must raise here, before anything uses
        # the header.
        self._group.settle()
        step.header.wait()
        if moves is not None:
            moves[1].wait()
            self._moving.move(step.buffers_before, moves[0])

    def _measure_noise(self, step: Step) -> None:
        """Compute the squared norm of each rank's mean gradient, averaged over the ranks."""
        square = self._hook.take_square_norm()
        if step.span.samples != self._global_batch_size:
            return  # the shares of a small step are noisier
        # A rank's gradient g is its share of the step's. With n of the N samples, its mean
        # gradient is g * N / n. The mean of the squares, weighted by n / N, is
        # sum(n / N * (g * N / n)**2) = sum(N / n * g**2). Its expectation for W ranks,
        # |G|**2 + W * sigma**2 / N, does not depend on how the samples are shared.
        own = torch.tensor([square * step.span.samples / max(1, step.num_own)], dtype=torch.float64)
        self._group.all_reduce(own).wait()
        step.mean_of_squares = float(own)

    def _agree_on_buckets(self) -> None:
        # DDP rebuilds its buckets in its second forward pass. The ranks agree on the bucket order
        # in a broadcast that blocks inside gloo. Count the broadcast as a collective, so that a
        # rank that hangs in the notebook's code can be distinguished from the ranks that wait for
        # it.
        #
        # The broadcast must not run in the exchange thread. If the call were abandoned there, the
        # reducer would outlive its generation and remove its hooks from the parameters during a
        # backward pass of the next one.
        self._num_steps += 1
        if self._num_steps == 2 and isinstance(self._module, DistributedDataParallel):
            self._group.wait_for(self._module.reducer._rebuild_buckets)

    def _start_moves(self, step: Step, weight: float) -> tuple[torch.Tensor, Pending] | None:
        if not step.buffers_before or self._group.world_size == 1:
            return None
        # A rank without samples has weight 0: changes by its borrowed micro-batch do not count.
        moves_B = self._moving.moves_from(step.buffers_before, weight)
        copies = step.header.copies
        if copies is None:
            moves_B = moves_B.cpu()
            return moves_B, self._group.all_reduce(moves_B)
        moves_B = copies.start(moves_B)
        return moves_B, self._group.all_reduce_after(copies.moment(), moves_B)

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self._module, DistributedDataParallel):
            return self._module.no_sync()
        return contextlib.nullcontext()

    def close(self) -> None:
        """Remove DDP from the model immediately, in the calling thread."""
        # The reducer removes its hooks from the parameters when it is freed. An exception may keep
        # the reducer alive until a backward pass of the next generation.
        if isinstance(self._module, DistributedDataParallel):
            del self._module.logger, self._module.reducer


def _wrap(model: nn.Module, group: RankGroup, has_unused: bool, hook: CommHook) -> nn.Module:
    if group.world_size == 1:
        return model
    # ``init_sync`` is off because all ranks already have the same state, and the broadcasts in the
    # constructor could not be aborted.
    #
    # With gradients as views of the buckets, DDP does not copy each sum back into a second set of
    # tensors, which the end of the step would free and the next step allocate again.
    module = DistributedDataParallel(
        model,
        init_sync=False,
        find_unused_parameters=has_unused,
        gradient_as_bucket_view=True,
        **_NO_BUFFER_SYNC,
    )
    # A lambda has no annotations. torch requires annotations to be classes, but ours are strings.
    module.register_comm_hook(None, lambda _, bucket: hook(bucket))
    return module


class CommHook:
    """Measure and send buckets of gradients.

    Args:
        compression: ``none``, ``bf16``, ``fp16`` or ``powersgd``.
        watch: Records when a bucket is ready; after the last bucket the backward pass is complete.
        measures_squares: Measure the squared norm of this rank's own gradient.
    """

    def __init__(
        self, group: RankGroup, *, compression: str, watch: Stopwatch, measures_squares: bool
    ) -> None:
        self._send: Callable[[Any], torch.futures.Future[torch.Tensor]] = group.ddp_hook
        if compression != "none":
            from etrain_jupyter.trainer.gradients.compression import compressed

            self._send = compressed(group, compression)
        self._watch = watch
        self._measures_squares = measures_squares
        self._squares: list[torch.Tensor] = []

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Start summing a bucket over the ranks."""
        if self._measures_squares:
            # Measure this before the sum overwrites this rank's gradient in place.
            self._squares.append(_square(bucket.buffer()))
        self._watch.bucket_is_ready()
        return self._send(bucket)

    def take_square_norm(self) -> float:
        """Return the squared norm over the buckets since the last call."""
        squares, self._squares = self._squares, []
        return _sum(squares)


def square_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Return the squared norm of tensors, taken as one vector."""
    return _sum([_square(tensor) for tensor in tensors])


def _square(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    # In fp16, the square of 256 overflows, so the norm is computed in float32.
    norm: torch.Tensor = torch.linalg.vector_norm(values.float())
    return norm.double().square()


def _sum(squares: list[torch.Tensor]) -> float:
    return float(torch.stack(squares).sum()) if squares else 0.0
