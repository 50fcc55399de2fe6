"""Exchange each bucket as soon as the last backward pass has completed it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from etrain_jupyter.rules.samples.shard_plan import Merge, ShardPass, ShardPlan
from etrain_jupyter.trainer.gradients.bucket import GradientBucket
from etrain_jupyter.trainer.gradients.tree_sum import TreeSum
from etrain_jupyter.trainer.group.process_group import CommunicationError, Pending, RankGroup
from etrain_jupyter.trainer.references import WorkloadError


class BucketSums:
    """Sum buckets over the ranks, in the same order on all ranks, as early as possible.

    The exchange runs in the generation's exchange thread. Buckets on a GPU go through host memory,
    because the exchange uses gloo.

    Args:
        plan: Distribution of the shards over the ranks.
        buckets: The buckets, in the order in which backward passes complete them.
        last_merges: Merges that remain to be done after the rank's last shard.
    """

    def __init__(
        self,
        group: RankGroup,
        plan: ShardPlan,
        buckets: list[GradientBucket],
        last_merges: Sequence[Merge],
    ) -> None:
        self._group = group
        self._buckets = buckets
        self._last_merges = last_merges
        self._places: dict[torch.Tensor, tuple[int, int]] = {
            p: (i, j) for i, bucket in enumerate(buckets) for j, p in enumerate(bucket.parameters)
        }
        self._slot = 0
        """Slot of the sum that gradients are added to."""
        self._touched: set[torch.Tensor] = set()
        self._missing: list[set[torch.Tensor]] = []
        self._pending: list[Pending] = []
        self._num_started = 0
        self.is_open = False
        """True during the last backward pass of the step, which completes the buckets."""
        self.num_tags = 0
        """Number of message tags that the sums use; tags start from 0."""
        self._add_up = [self._sum_of(bucket, plan) for bucket in buckets]

    def _sum_of(self, bucket: GradientBucket, plan: ShardPlan) -> Callable[[], None]:
        if self._group.world_size == 1:
            return _nothing
        partials = list(bucket.sums_SN[: len(plan.subtrees[self._group.rank])])
        # On a CPU, these are the partial sums themselves; on a GPU, they are staging buffers.
        on_cpu = [partial.cpu() for partial in partials]
        tree_sum = TreeSum(self._group, plan, on_cpu, tag=self.num_tags)
        self.num_tags += tree_sum.num_tags
        if partials[0].device.type == "cpu":
            return tree_sum.exchange

        def exchange() -> None:
            for staged, partial in zip(on_cpu, partials, strict=True):
                staged.copy_(partial)
            tree_sum.exchange()
            partials[0].copy_(on_cpu[0])

        return exchange

    # A step with two buckets, on a rank with two shards:
    #
    #     pass of shard 0   gradients -> sums             not exchanged: shard 1 adds to them
    #     pass of shard 1   bucket 0 complete -> exchange starts
    #                       bucket 1 complete -> exchange starts
    #     finish            wait for both
    def begin(self) -> None:
        """Begin a step."""
        self._touched = set()
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._pending = []
        self._num_started = 0
        self.is_open = False

    def collect(self, p: ShardPass) -> None:
        """Direct the gradients of a shard's backward passes into its sum."""
        self._slot = p.slot
        for bucket in self._buckets:
            bucket.begin(p.slot, is_fresh=p.is_fresh)

    def touch(self, parameter: torch.Tensor) -> None:
        """Record that a backward pass has added to a parameter's gradient; called as a torch hook.

        Raises:
            WorkloadError: If the gradient has already been sent.
        """
        self._touched.add(parameter)
        index, place = self._places[parameter]
        self._buckets[index].take(self._slot, place)
        if not self.is_open:
            return
        # The bucket is already being sent. With reentrant checkpointing, backward passes run within
        # the backward pass, and a parameter gets its gradient in parts.
        if index < self._num_started:
            raise WorkloadError(
                f"a parameter of shape {tuple(parameter.shape)} gets gradients twice in one "
                "backward pass, which cannot be summed reproducibly. If the model recomputes "
                "activations, write checkpoint(..., use_reentrant=False)."
            )
        self._missing[index].discard(parameter)
        # torch may replace an exception that a hook raises, so ``finish`` raises the error about a
        # lost peer.
        with contextlib.suppress(CommunicationError):
            # Start the exchanges in order, because all ranks must exchange the buckets in the same
            # sequence.
            while self._num_started < len(self._missing) and not self._missing[self._num_started]:
                self._start_next()

    def _start_next(self) -> None:
        index = self._num_started
        self._num_started += 1
        bucket, add_up = self._buckets[index], self._add_up[index]
        # A copy, because the work runs later, in another thread.
        touched = frozenset(self._touched.intersection(bucket.parameters))

        def work() -> None:
            bucket.merge(self._last_merges)
            bucket.set_flags(touched)
            add_up()
            self._group.beat()

        if self._group.world_size == 1:
            work()
        else:
            self._pending.append(self._group.start(work))

    def finish(self) -> None:
        """Exchange the remaining buckets, and wait for all of them."""
        # A bucket remains if one of its parameters got no gradient in the last pass.
        self.is_open = False
        while self._num_started < len(self._buckets):
            self._start_next()
        for pending in self._pending:
            pending.wait()


def _nothing() -> None:
    pass  # a single rank has the total already
