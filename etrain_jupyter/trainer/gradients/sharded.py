"""``reproducible``: the same gradient to the last bit, however many ranks compute it.

A step has V shards (``elastic.shard_plan``). Each is a forward and backward pass of its own, with
chance, BatchNorm statistics and micro batches of its own, as if no other shard were there: a layer
that normalises sees one shard's samples, and running statistics move by the mean over the shards.
Gradients, moves and losses are added in the order of one tree over the shards.

The exchange of a bucket begins as soon as the last shard's backward pass is through with it.
"""

from __future__ import annotations

import torch
from torch import nn

from etrain_jupyter.rules.samples import batch_plan, shard_plan
from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.rules.samples.shard_plan import ShardPass, Subtree
from etrain_jupyter.trainer.gradients.bucket import make_buckets
from etrain_jupyter.trainer.gradients.bucket_sums import BucketSums
from etrain_jupyter.trainer.gradients.step import MicroBatch, Step, split_share
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.gradients.tree_sum import TreeSum, merge
from etrain_jupyter.trainer.group.process_group import Pending, RankGroup
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers


class ShardedGradients:
    """Gradients of one generation's ranks, in buffers that live as long as the generation.

    An aborted exchange may go on writing into them, so that no generation uses another's.

    Args:
        group: The generation's.
        model: The notebook's.
        moving: Its buffers that move.
        num_shards: V.
        global_batch_size: Samples of a full step.
        micro_batch_size: Most samples of one pass; None for no limit.
        num_passes: Fewest passes of a share, with one exchange after the last.
        watch: Told when nothing is left to compute.

    Raises:
        ConfigError: If there are more ranks than shards.
    """

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
        is_one_pass = num_passes == 1 and (micro_batch_size or largest) >= largest
        self._passes = shard_plan.plan_passes(self._subtrees, adds_in_place=is_one_pass)
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._buckets = make_buckets(trainable, shard_plan.num_slots(self._passes))
        self._sums = BucketSums(group, self._plan, self._buckets, self._passes[-1].merges)
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._sums.touch)  # type: ignore[no-untyped-call]
            for p in trainable
        ]
        # One row a shard of this rank: shape (shards, B).
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
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def parts(self, span: StepRange) -> list[MicroBatch]:
        """Return the parts of this rank's shards; a shard without samples has none."""
        plan = self._plan_of(span)
        return [part for p in self._passes for part in self._parts_of(plan, p.shard)]

    def _parts_of(self, plan: batch_plan.StepPlan, shard: int) -> list[MicroBatch]:
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
        """Pass this rank's shards one by one, and add them up with the other ranks'."""
        plan = self._plan_of(step.span)
        busy = [p for p in self._passes if plan.counts[p.shard]]
        self._sums.begin()
        self._moves.zero_()
        if not busy:
            self._start_small_sums(step)
        for p in self._passes:
            is_last = p is self._passes[-1]
            if plan.counts[p.shard]:
                self._run_shard(step, plan, p, is_last_busy=p is busy[-1], is_last=is_last)
            elif p.is_fresh:
                for bucket in self._buckets:
                    bucket.clear(p.slot)
            if not is_last:  # that is done with each bucket as it becomes ready
                for bucket in self._buckets:
                    bucket.merge(p.merges)
        if self._group.world_size > 1:
            self._watch.bucket_is_ready()
        self._sums.finish()
        step.header.wait()
        self._finish_moves(step)
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
        self._moving.put_back(step.buffers_before)
        step.seed(p.shard)
        num_parts = len(self._parts_of(plan, p.shard))
        for number in range(1, num_parts + 1):
            loss = step.run_part(self._model, slot=p.shard)
            if number == num_parts:
                self._keep_moves(step, p.shard, plan.counts[p.shard])
                if is_last_busy:
                    self._start_small_sums(step)
                self._sums.is_open = is_last
            loss.backward()  # type: ignore[no-untyped-call]
            self._group.raise_if_failed()
        for bucket in self._buckets:
            bucket.fill(p.slot)

    def _start_small_sums(self, step: Step) -> None:
        """Start what the last backward pass hides: the header's sum, and that of the moves."""
        step.start_header()
        first = self._subtrees[0].first
        for tree in self._subtrees:
            rows = list(self._moves[tree.first - first : tree.stop - first])
            merge(rows, shard_plan.shard_merges(tree))
        if self._move_sum is not None:
            self._moves_pending = self._group.start(self._move_sum.exchange)

    # --- buffers that move ---

    def _keep_moves(self, step: Step, shard: int, count: int) -> None:
        if self._moving.num_values:
            weight = count / step.span.samples
            moves_B = self._moving.moves_from(step.buffers_before, weight)
            self._moves[shard - self._subtrees[0].first] = moves_B

    def _finish_moves(self, step: Step) -> None:
        if self._moves_pending is not None:
            self._moves_pending.wait()
        if self._moving.num_values:
            self._moving.move(step.buffers_before, self._moves[0])
