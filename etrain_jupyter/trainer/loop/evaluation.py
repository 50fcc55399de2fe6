"""Evaluate the whole evaluation set once across all ranks, or stop at a planned change.

The set is cut into parts of one batch each, at positions that are the same on all ranks in all
generations. Each rank evaluates runs of consecutive parts. If a generation ends in the middle of an
evaluation, the runs are kept, and the next generation continues them.

Shapes: ``M`` means (loss first; see ``objective.measures``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from safetensors.torch import load, save

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.rules.samples.batch_plan import share_range
from etrain_jupyter.rules.samples.eval_parts import (
    Run,
    RunPlan,
    cut_parts,
    plan_runs,
    split_part,
)
from etrain_jupyter.rules.samples.shard_plan import Subtree, shard_merges
from etrain_jupyter.trainer.data import evaluation_share
from etrain_jupyter.trainer.gradients.tree_sum import merge
from etrain_jupyter.trainer.group.gathering import gather_bytes, gather_json
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.micro_batch import MicroBatch
from etrain_jupyter.trainer.objective.whole_set import RunStates, compute_metrics
from etrain_jupyter.trainer.seeds import seed_all
from etrain_jupyter.trainer.state.train_state import WorkPlan
from etrain_jupyter.trainer.step_header import stack_means
from etrain_jupyter.trainer.workload import Workload

SHARE_BYTES = 64 << 20
"""Maximum size of the runs that the ranks exchange before a planned change."""


class EvaluationResult(NamedTuple):
    """Result of an evaluation, the same on all ranks."""

    num_samples: int
    loss: float
    metrics: dict[str, float]
    """Metrics of single batches, then metrics over the whole set."""


@dataclass
class _Sums:
    """Sums over a run of parts, and the run's metric states."""

    run: Run
    """The parts that are done."""
    sums_M: torch.Tensor
    """Number of samples, then shares of the means, shape ``(1 + M,)``, float64."""
    states: RunStates
    is_new: bool = False
    """True if a part was added since the last exchange."""
    is_torn: bool = False
    """True while a part is being added. If the addition fails, the sums are invalid."""

    def pack(self) -> bytes:
        data: bytes = save({"sums": self.sums_M, **self.states.pack()})
        return data


@dataclass
class _Progress:
    """This rank's part of an evaluation in progress."""

    weights: int
    """Version of the weights (``TrainState.weights_version``)."""
    mine: list[_Sums] = field(default_factory=list)
    """Runs to which this rank has added parts since the last exchange."""
    packed: dict[Run, bytes] = field(default_factory=dict)
    """Runs of all ranks, as of the last exchange."""

    def pack(self) -> None:
        """Move this rank's runs to ``packed``."""
        for sums in self.mine:
            if sums.is_new and not sums.is_torn:
                self.packed[sums.run] = sums.pack()
        self.mine = []


class Evaluation:
    """Evaluates each sample on exactly one rank.

    With ``reproducible``, the set is split into V shards whose sums are added up in a fixed order,
    so the means are bit-identical on any number of ranks. Otherwise, each rank adds up one share.
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
        self._progress = _Progress(-1)

    def run(
        self,
        group: RankGroup,
        *,
        step: int,
        weights: int,
        is_pending: Callable[[], bool],
        at_batch: Callable[[], None],
    ) -> EvaluationResult | None:
        """Evaluate the current weights; return None if a planned change interrupts it.

        Args:
            group: The generation's process group.
            step: Step of the weights.
            weights: Version of the weights on this rank. An interrupted evaluation of the same
                weights is continued.
            is_pending: Returns True if this rank knows of a planned change.
            at_batch: Called before each part.
        """
        if self._progress.weights != weights:
            self._progress = _Progress(weights)
        shards = self._cut()
        parts = list(itertools.chain(*shards))
        ends = list(itertools.accumulate(map(len, shards)))
        groups = [Run(end - len(shard), end) for end, shard in zip(ends, shards, strict=True)]
        plan = self._exchange(group, groups)
        todo = plan.todo[group.rank]
        self._progress.mine = [self._begin(run, plan.kept, groups) for run in todo]
        work = [
            (sums, parts[number])
            for sums, run in zip(self._progress.mine, todo, strict=True)
            for number in range(run.first, run.stop)
        ]
        num_turns = max(sum(run.stop - run.first for run in runs) for runs in plan.todo)
        passes = self._passes(work, step)
        with self._workload.evaluating():
            if not self._turn(group, num_turns, passes, is_pending, at_batch):
                # Any rank may be about to leave.
                self._exchange(group, groups, max_bytes=SHARE_BYTES)
                return None
        plan = self._exchange(group, groups)
        found = [load(self._progress.packed[run]) for run in plan.kept]
        self._progress = _Progress(-1)
        return self._result(found, plan.kept, groups)

    # --- parts ---

    def _cut(self) -> list[list[range]]:
        # The cuts must be the same on all ranks in all generations. With ``batch.micro: auto``,
        # each rank has its own micro-batch size, and splits a part into as many batches as
        # necessary.
        size = (None if self._micro.is_auto else self._micro.size) or self._most
        num_shards = self._num_shards or 1
        shards = [share_range(self._num_samples, shard, num_shards) for shard in range(num_shards)]
        return [
            [shard[part.start : part.stop] for part in cut_parts(len(shard), size)]
            for shard in shards
        ]

    def _begin(self, run: Run, kept: Sequence[Run], groups: Sequence[Run]) -> _Sums:
        num_columns = 1 + self._workload.measures.num_columns
        states = RunStates(self._workload.whole_set, self._workload.device)
        is_first = any(run.first == group.first for group in groups)
        before = next((other for other in kept if other.stop == run.first), None)
        if before is None or is_first:
            sums_M = torch.zeros(num_columns, dtype=torch.float64)
            return _Sums(Run(run.first, run.first), sums_M, states)
        tensors = load(self._progress.packed[before])
        states.restore(tensors)
        return _Sums(before, tensors["sums"], states)

    def _turn(
        self,
        group: RankGroup,
        num_turns: int,
        passes: Iterator[None],
        is_pending: Callable[[], bool],
        at_batch: Callable[[], None],
    ) -> bool:
        # A planned change may stop an evaluation, but all ranks must stop after the same part. A
        # rank that stopped alone would leave the others blocked in a collective. So the ranks sum a
        # flag with every part, and read the sum one part later, when it has arrived and can be
        # read without waiting:
        #
        #     turn        1                2                           3
        #     each rank   sends, part 1    reads 1, sends 2, part 2    reads 2, sends 3, part 3
        #
        # All ranks take the same number of turns, even those with fewer parts.
        pending, sending = torch.zeros(1), None
        for _ in range(num_turns):
            if sending is not None:
                sending.wait()
            if pending > 0:
                return False
            pending = torch.tensor([float(is_pending())])
            sending = group.all_reduce(pending)
            at_batch()
            next(passes, None)  # this rank may have fewer parts than turns
            # A part may take a long time, so do not start another one in an aborted generation.
            group.raise_if_failed()
        if sending is not None:
            sending.wait()  # no collective may be in flight when the generation ends
        return True

    def _passes(self, work: list[tuple[_Sums, range]], step: int) -> Iterator[None]:
        # A generator, so that the caller can exchange the flag between two parts.
        assert self._workload.eval is not None
        batches = [split_part(part, self._micro.size or self._most) for _, part in work]
        shares = (
            evaluation_share(samples, job_seed=self._seed, step=step)
            for samples in itertools.chain(*batches)
        )
        fetched = self._workload.eval.batches(shares)
        for (sums, _), part in zip(work, batches, strict=True):
            sums.is_torn = True
            for samples in part:
                indices, batch = next(fetched)
                # Seeded by the position in the set, so that the numbers do not depend on the rank.
                seed_all(self._seed, step=step, rank=samples.start)
                passed = self._workload.forward(
                    self._workload.module, batch, len(indices), self._num_samples
                )
                sums.sums_M[0] += len(indices)
                sums.sums_M[1:] += stack_means(passed.loss, passed.shares)
                sums.states.update(passed.output, passed.target)
            sums.run = Run(sums.run.first, sums.run.stop + 1)
            sums.is_new, sums.is_torn = True, False
            yield

    # --- runs ---

    def _exchange(
        self, group: RankGroup, groups: Sequence[Run], *, max_bytes: int | None = None
    ) -> RunPlan:
        """Share all ranks' runs with all ranks, unless their total size exceeds ``max_bytes``."""
        progress = self._progress
        progress.pack()
        rows = gather_json(group, [[*run, len(data)] for run, data in progress.packed.items()])
        owners: dict[Run, int] = {}
        num_bytes: dict[Run, int] = {}
        for rank in reversed(range(group.world_size)):
            for first, stop, length in rows[rank]:
                owners[Run(first, stop)], num_bytes[Run(first, stop)] = rank, length
        may_cut = self._num_shards is None
        plan = plan_runs(owners, groups, group.world_size, may_cut=may_cut)
        if max_bytes is None or sum(num_bytes[run] for run in plan.kept) <= max_bytes:
            mine = {
                slot: progress.packed[run]
                for slot, run in enumerate(plan.kept)
                if owners[run] == group.rank
            }
            data = gather_bytes(group, mine, len(plan.kept))
            progress.packed = dict(zip(plan.kept, data, strict=True))
        return plan

    def _result(
        self, found: list[dict[str, torch.Tensor]], runs: Sequence[Run], groups: Sequence[Run]
    ) -> EvaluationResult:
        # With shards, each group is one run. Otherwise, the only group consists of several runs.
        num_columns = 1 + self._workload.measures.num_columns
        sums_SM = torch.zeros(len(groups), num_columns, dtype=torch.float64)
        for run, tensors in zip(runs, found, strict=True):
            slot = next(
                i for i, group in enumerate(groups) if group.first <= run.first < group.stop
            )
            sums_SM[slot] += tensors["sums"]
        if self._num_shards is not None:
            merge(list(sums_SM), shard_merges(Subtree(0, len(groups))))
        count, *columns = sums_SM[0].tolist()
        means = self._workload.measures.means(columns)
        values = compute_metrics(self._workload.whole_set, found)
        return EvaluationResult(int(count), means.loss, {**means.metrics, **values})
