"""Gradients for ``reproducible``: bit-identical on any number of ranks.

A step has V shards (``rules.samples.shard_plan``). Each shard has its own forward and backward
pass, with its own random numbers, BatchNorm statistics and micro-batches, as if it were alone: a
normalization layer sees the samples of one shard, and running statistics change by the mean over
the shards. Gradients, changes of buffers, and losses are summed in the order of one tree over the
shards, which depends only on V::

    rank 0: shards 0, 1   (0 + 1) \
                                   + exchange -> the sum, on all ranks
    rank 1: shards 2, 3   (2 + 3) /

The exchange of a bucket starts as soon as the backward pass of the rank's last shard completes it.
"""

from __future__ import annotations

import torch
from torch import nn

from etrain_jupyter.rules.samples import batch_plan, shard_plan
from etrain_jupyter.rules.samples.balance import Balance
from etrain_jupyter.rules.samples.batch_plan import PassSamples, split_share
from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.rules.samples.shard_plan import ShardPass, Subtree
from etrain_jupyter.trainer.feature import Step
from etrain_jupyter.trainer.gradients.bucket import make_buckets
from etrain_jupyter.trainer.gradients.bucket_sums import BucketSums
from etrain_jupyter.trainer.gradients.tree_sum import TreeSum, merge
from etrain_jupyter.trainer.group.process_group import Pending, RankGroup
from etrain_jupyter.trainer.seeds import seed_all
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.times import Stopwatch


class ShardedGradients:
    """Gradients of one generation, in buffers that are freed with the generation.

    Args:
        num_shards: V.
        global_batch_size: Samples of a full step.
        micro_batch_size: Maximum number of samples per pass; None for no limit.
        num_passes: Minimum number of passes per shard.

    Raises:
        ConfigError: If there are more ranks than shards.
    """

    balance: Balance | None = None
    """None, because the shards do not depend on the ranks' speeds."""
    overlaps_device = False
    """False, because each shard's changes to the running buffers are copied to the host anyway."""

    def __init__(
        self,
        group: RankGroup,
        model: nn.Module,
        *,
        moving: RunningBuffers,
        num_shards: int,
        global_batch_size: int,
        micro_batch_size: int | None,
        num_passes: int = 1,
        watch: Stopwatch | None = None,
    ) -> None:
        self._group = group
        self._model = model
        self._moving = moving
        self._micro_batch_size = micro_batch_size
        self._num_passes = num_passes
        self._watch = watch or Stopwatch()
        self._min_share = min(2, max(1, global_batch_size // num_shards))
        self._plan = shard_plan.plan_shards(num_shards=num_shards, world_size=group.world_size)
        self.num_slots = num_shards
        self.merges = shard_plan.shard_merges(Subtree(0, num_shards))
        largest = -(-global_batch_size // num_shards)
        self._subtrees = self._plan.subtrees[group.rank]
        # With one micro-batch per shard, autograd may add to the previous shard's sum. With
        # several, (a + b1) + b2 would not be bit-identical to a + (b1 + b2).
        is_one_pass = num_passes == 1 and (micro_batch_size or largest) >= largest
        self._passes = shard_plan.plan_passes(self._subtrees, adds_in_place=is_one_pass)
        trainable = [p for p in model.parameters() if p.requires_grad]
        # The buffers are allocated for each generation, because an aborted exchange may still write
        # into the old ones.
        self._buckets = make_buckets(trainable, shard_plan.num_slots(self._passes))
        self._sums = BucketSums(group, self._plan, self._buckets, self._passes[-1].merges)
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._sums.touch)  # type: ignore[no-untyped-call]
            for p in trainable
        ]
        # One row per shard of this rank, shape (shards, B).
        self._moves = torch.zeros(len(self._passes), moving.num_values, dtype=torch.float64)
        self._move_sum = self._make_move_sum()
        self._moves_pending: Pending | None = None

    def _make_move_sum(self) -> TreeSum | None:
        if self._group.world_size == 1 or not self._moving.num_values:
            return None
        first = self._subtrees[0].first
        partials = [self._moves[tree.first - first] for tree in self._subtrees]
        return TreeSum(self._group, self._plan, partials, tag=self._sums.num_tags)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def counts(self, span: StepRange) -> tuple[int, ...]:
        """Return the number of samples of each shard."""
        return self._plan_of(span).counts

    def parts(self, span: StepRange) -> list[PassSamples]:
        """Return the micro-batches of this rank's shards; a shard without samples has none."""
        plan = self._plan_of(span)
        return [part for p in self._passes for part in self._parts_of(plan, p.shard)]

    def _parts_of(self, plan: batch_plan.StepPlan, shard: int) -> list[PassSamples]:
        start = plan.starts[shard]
        share = range(start, start + plan.counts[shard])
        return split_share(share, plan.num_micro_steps, stream=shard)

    def _plan_of(self, span: StepRange) -> batch_plan.StepPlan:
        return batch_plan.plan_step(
            count=span.samples,
            world_size=self._plan.num_shards,
            micro_batch_size=self._micro_batch_size,
            min_share=self._min_share,
            num_passes=self._num_passes,
        )

    def compute(self, step: Step) -> None:
        """Run this rank's shards one by one, and sum the gradients over the ranks."""
        plan = self._plan_of(step.span)
        busy = [p for p in self._passes if plan.counts[p.shard]]
        self._sums.begin()
        self._moves.zero_()
        # A small step may leave no samples for this rank. The rank then runs no pass, but the other
        # ranks wait for its header and its zeros.
        if not busy:
            self._start_small_sums(step)
        for p in self._passes:
            is_last = p is self._passes[-1]
            # A small last step leaves some shards without samples, which contribute exact zeros.
            if plan.counts[p.shard]:
                self._run_shard(step, plan, p, is_last_busy=p is busy[-1], is_last=is_last)
            elif p.is_fresh:
                for bucket in self._buckets:
                    bucket.clear(p.slot)
            if not is_last:  # the last shard merges each bucket as soon as it is ready
                for bucket in self._buckets:
                    bucket.merge(p.merges)
        # From here on, time is spent waiting for sums.
        if self._group.world_size > 1:
            self._watch.bucket_is_ready()
        self._sums.finish()
        step.header.wait()
        if self._moves_pending is not None:
            self._moves_pending.wait()
        if self._moving.num_values:
            self._moving.move(step.buffers_before, self._moves[0])
        for bucket in self._buckets:
            bucket.publish()

    def _run_shard(
        self,
        step: Step,
        plan: batch_plan.StepPlan,
        p: ShardPass,
        *,
        is_last_busy: bool,
        is_last: bool,
    ) -> None:
        self._sums.collect(p)
        # Each shard starts from the same statistics, as if it were alone.
        self._moving.put_back(step.buffers_before)
        seed_all(step.job_seed, step=step.number, rank=p.shard)
        num_parts = len(self._parts_of(plan, p.shard))
        for number in range(1, num_parts + 1):
            loss = step.run_part(self._model, slot=p.shard)
            # The last backward pass of the shard completes its sum. For the last shard with
            # samples, the pass also overlaps with the exchange of the header and the buffers.
            if number == num_parts:
                if self._moving.num_values:
                    weight = plan.counts[p.shard] / step.span.samples
                    moves_B = self._moving.moves_from(step.buffers_before, weight)
                    self._moves[p.shard - self._subtrees[0].first] = moves_B
                if is_last_busy:
                    self._start_small_sums(step)
                self._sums.is_open = is_last
            loss.backward()  # type: ignore[no-untyped-call]
            # Detect a failed exchange here rather than after the remaining passes.
            self._group.raise_if_failed()
        for bucket in self._buckets:
            bucket.fill(p.slot)

    def _start_small_sums(self, step: Step) -> None:
        # Sum the header and the changes of the running buffers: first this rank's subtrees, then
        # the tree over the ranks.
        step.start_header()
        first = self._subtrees[0].first
        for tree in self._subtrees:
            rows = list(self._moves[tree.first - first : tree.stop - first])
            merge(rows, shard_plan.shard_merges(tree))
        if self._move_sum is not None:
            self._moves_pending = self._group.start(self._move_sum.exchange)
