"""Evaluate the whole evaluation set once across all ranks, or stop at a planned change.

Shapes: ``M`` means (loss first, see ``objective.measures``), ``S`` slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.rules.samples.batch_plan import share_range
from etrain_jupyter.rules.samples.shard_plan import Subtree, shard_merges
from etrain_jupyter.trainer.data import Share
from etrain_jupyter.trainer.gradients.step_header import stack_means
from etrain_jupyter.trainer.gradients.tree_sum import merge
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.micro_batch import MicroBatch
from etrain_jupyter.trainer.objective.one_pass import eval_mode
from etrain_jupyter.trainer.objective.whole_set import SlotStates
from etrain_jupyter.trainer.schedule import WorkPlan
from etrain_jupyter.trainer.seeds import seed_all, seed_of
from etrain_jupyter.trainer.workload import Workload


class EvaluationResult(NamedTuple):
    """Result of an evaluation, the same on all ranks."""

    num_samples: int
    loss: float
    metrics: dict[str, float]
    """Metrics of single batches, then metrics over the whole set."""


class _Batch(NamedTuple):
    slot: int
    samples: range


class Evaluation:
    """Evaluates each sample on exactly one rank.

    With ``reproducible``, the set is split into V shards that are added up in a fixed order, so the
    means are bit for bit the same on any number of ranks. Otherwise, each rank adds up one share.
    """

    def __init__(
        self, workload: Workload, config: TrainConfig, plan: WorkPlan, micro: MicroBatch
    ) -> None:
        self._workload = workload
        self._seed = config.seed
        self._num_samples = plan.num_eval
        self._micro = micro
        self._most = plan.global_batch_size
        self._num_shards = config.num_shards()

    @property
    def _batch_size(self) -> int:
        return self._micro.size or self._most

    def run(
        self,
        group: RankGroup,
        *,
        step: int,
        is_pending: Callable[[], bool],
        at_batch: Callable[[], None],
    ) -> EvaluationResult | None:
        """Evaluate the current weights; return None if a planned change interrupts it."""
        # A planned change may stop an evaluation, but all ranks must stop after the same batch. A
        # rank that stopped alone would leave the others blocked in a collective. So the ranks sum a
        # flag with every batch, and read the sum one batch later, when it has arrived and can be
        # read without waiting:
        #
        #     turn        1                2                           3
        #     each rank   sends, batch 1   reads 1, sends 2, batch 2   reads 2, sends 3, batch 3
        #
        # All ranks take the same number of turns, even those with fewer batches.
        num_slots = self._num_shards or 1
        num_columns = 1 + self._workload.measures.num_columns
        # Column 0 counts samples; the others hold shares of the means: shape (S, 1 + M).
        sums_SM = torch.zeros(num_slots, num_columns, dtype=torch.float64)
        states = self._make_states(group)
        pending, sending = torch.zeros(1), None
        batches = self._batches_of(group.rank, group.world_size)
        passes = self._passes(batches, step, sums_SM, states)
        with eval_mode(self._workload.model), torch.no_grad():
            for _ in range(self._num_turns(group, len(batches))):
                if sending is not None:
                    sending.wait()
                if pending > 0:
                    return None
                pending = torch.tensor([float(is_pending())])
                sending = group.all_reduce(pending)
                at_batch()
                next(passes, None)  # this rank may have fewer batches than turns
                # A batch may take a long time, so do not start another batch in an aborted
                # generation.
                group.raise_if_failed()
        if sending is not None:
            sending.wait()  # no collective may be in flight when the generation ends
        # With shards, only one rank fills each slot and the others add zeros, so the sum is exact.
        group.all_reduce(sums_SM).wait()
        if self._num_shards is not None:
            merge(list(sums_SM), shard_merges(Subtree(0, num_slots)))
        count, *columns = sums_SM[0].tolist()
        means = self._workload.measures.means(columns)
        return EvaluationResult(int(count), means.loss, {**means.metrics, **states.compute(group)})

    def _make_states(self, group: RankGroup) -> SlotStates:
        is_sharded = self._num_shards is not None
        return SlotStates(
            self._workload.whole_set,
            self._workload.device,
            num_slots=self._num_shards or group.world_size,
            first=0 if is_sharded else group.rank,
        )

    def _passes(
        self, batches: list[_Batch], step: int, sums_SM: torch.Tensor, states: SlotStates
    ) -> Iterator[None]:
        # A generator, so that the caller can exchange the flag between two batches.
        assert self._workload.eval is not None
        shares = (
            Share(list(samples), seed_of(self._seed, "eval", step, samples.start))
            for _, samples in batches
        )
        fetched = self._workload.eval.batches(shares)
        for (slot, samples), (indices, batch) in zip(batches, fetched, strict=True):
            # Seeded by the position in the set, so that the numbers do not depend on the rank.
            seed_all(self._seed, step=step, rank=samples.start)
            passed = self._workload.forward(
                self._workload.module, batch, len(indices), self._num_samples
            )
            sums_SM[slot, 0] += len(indices)
            sums_SM[slot, 1:] += stack_means(passed.loss, passed.shares)
            states.update(slot, passed.output, passed.target)
            yield

    def _slots_of(self, rank: int, world_size: int) -> list[_Batch]:
        if self._num_shards is None:
            return [_Batch(0, share_range(self._num_samples, rank, world_size))]
        # The slot is the shard's number, so its samples do not depend on the world size.
        return [
            _Batch(shard, share_range(self._num_samples, shard, self._num_shards))
            for shard in share_range(self._num_shards, rank, world_size)
        ]

    def _batches_of(self, rank: int, world_size: int) -> list[_Batch]:
        size = self._batch_size
        return [
            _Batch(slot, samples[first : first + size])
            for slot, samples in self._slots_of(rank, world_size)
            for first in range(0, len(samples), size)
        ]

    def _num_turns(self, group: RankGroup, num_batches: int) -> int:
        # With ``batch.micro: auto`` each rank has its own batch size, so the ranks exchange their
        # counts. Otherwise every rank computes the same maximum without communication.
        if self._micro.is_auto:
            counts = torch.zeros(group.world_size)
            counts[group.rank] = num_batches
            group.all_reduce(counts).wait()
            return int(counts.max())
        return max(
            sum(
                -(-len(samples) // self._batch_size)
                for _, samples in self._slots_of(r, group.world_size)
            )
            for r in range(group.world_size)
        )
