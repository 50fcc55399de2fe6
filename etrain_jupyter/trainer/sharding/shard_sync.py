"""Bring the shards of all ranks to the newest step, and divide them among the ranks.

This happens while a generation forms, on all ranks together::

    report      each rank reports its step and which state it has
    complete    ranks that have the gradients of the newest step, but not its update, apply it
    repair      ranks receive missing weights of the shards that they do not hold
    (chain)     new ranks receive everything but the optimizer's state: see ``transfer``
    divide      each rank receives the parts of its new shards that it does not have

A rank keeps its old shards until all ranks have their new ones. So losing a rank in the meantime
costs no state either, unless it was the neighbor of another lost rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from etrain_jupyter.rules.optimizer_shards import (
    Move,
    Range,
    find_lost,
    overlap,
    plan_moves,
    subtract,
)
from etrain_jupyter.trainer.group.gathering import gather_json
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from etrain_jupyter.trainer.sharding.held_state import Form, NewShard, vectors_of
from etrain_jupyter.trainer.sharding.range_exchange import exchange_moves
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer
from etrain_jupyter.trainer.state.pieces import copy_in_pieces

NO_STEP = -1
"""Step of a rank that has no state."""


class ShardsLostError(CommunicationError):
    """Part of the optimizer's state is on no rank; only the newest checkpoint has it."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The state of one rank before the ranks divide it."""

    step: int
    """Newest committed step; ``NO_STEP`` without a state."""
    num_evals: int = 0
    is_prepared: bool = False
    """True if the rank has complete gradients for the next step, but has not updated its shards."""
    is_stale: bool = False
    """See ``ShardedOptimizer.is_stale``."""
    spans: tuple[Range, ...] = ()
    """Ranges whose optimizer state the rank has."""

    def to_json(self) -> list[Any]:
        """Return this report as JSON."""
        spans = [list(span) for span in self.spans]
        return [self.step, self.num_evals, self.is_prepared, self.is_stale, spans]

    @classmethod
    def from_json(cls, packed: Sequence[Any]) -> RankReport:
        """Return the report that ``to_json`` has packed."""
        step, num_evals, is_prepared, is_stale, spans = packed
        return cls(
            step=step,
            num_evals=num_evals,
            is_prepared=is_prepared,
            is_stale=is_stale,
            spans=tuple((first, stop) for first, stop in spans),
        )


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """Each rank's part in the synchronization; all ranks compute the same plan."""

    completing: tuple[int, ...]
    """Ranks that apply the update for which they are prepared."""
    held: Mapping[int, tuple[Range, ...]]
    """Ranges of the newest state, by the rank that has them."""
    stale: tuple[int, ...]
    """Ranks in ``held`` that must receive weights."""
    behind: tuple[int, ...]
    """Ranks that receive everything but the optimizer's state from rank 0."""
    lost: tuple[Range, ...]
    """Ranges that no rank has."""


def plan_sync(reports: Sequence[RankReport], size: int, *, is_restored: bool = False) -> SyncPlan:
    """Plan the synchronization of a generation.

    Args:
        reports: The ranks' reports, by rank.
        size: Number of elements whose state is divided.
        is_restored: Rank 0 has loaded a checkpoint, so that other states do not count. All ranks
            have read their shards from the checkpoint, or have dropped them.
    """
    newest = max(report.step for report in reports)
    if is_restored or newest == NO_STEP:
        # At the start of a job, all ranks have initial weights, but only rank 0's count.
        held = {0: reports[0].spans}
        if is_restored:
            held = {rank: report.spans for rank, report in enumerate(reports) if report.spans}
        return SyncPlan(
            completing=(),
            held=held,
            stale=(),
            behind=tuple(range(1, len(reports))),
            lost=tuple(find_lost(held.values(), size)),
        )
    completing = [r for r, one in enumerate(reports) if one.is_prepared and one.step == newest - 1]
    current = [r for r, one in enumerate(reports) if one.step == newest]
    held = {rank: reports[rank].spans for rank in sorted([*current, *completing])}
    everything = [(0, size)]
    # An update changes the weights of a rank's own shards only.
    stale = [r for r in completing if subtract(everything, held[r])]
    stale += [r for r in current if reports[r].is_stale]
    # Rank 0 may have evaluated these weights before another rank has. The states are then the same,
    # but the counters differ.
    evals = reports[0].num_evals
    behind = [r for r in range(1, len(reports)) if r not in held or reports[r].num_evals != evals]
    return SyncPlan(
        completing=tuple(completing),
        held=held,
        stale=tuple(sorted(stale)),
        behind=tuple(behind),
        lost=tuple(find_lost(held.values(), size)),
    )


class ShardSync:
    """The synchronization of one generation on one rank.

    Args:
        beat: Sends a heartbeat.
    """

    def __init__(
        self, group: RankGroup, shards: ShardedOptimizer, beat: Callable[[], None]
    ) -> None:
        self._group = group
        self._shards = shards
        self._beat = beat
        self._layout = shards.layout

    def agree(self, report: RankReport, *, is_restored: bool) -> SyncPlan:
        """Exchange the reports of all ranks and return the plan.

        Raises:
            CommunicationError: A peer is lost.
            ShardsLostError: Part of the state is lost.
        """
        packed = gather_json(self._group, report.to_json())
        reports = [RankReport.from_json(one) for one in packed]
        plan = plan_sync(reports, self._layout.size, is_restored=is_restored)
        if plan.lost:
            num_lost = sum(stop - first for first, stop in plan.lost)
            raise ShardsLostError(
                f"the optimizer state of {num_lost} of {self._layout.size} parameters is lost: "
                "two workers that were neighbors in the order of ranks were lost at once. The job "
                "continues from its newest checkpoint"
            )
        return plan

    def repair(self, plan: SyncPlan) -> None:
        """Send the weights that stale ranks lack.

        Raises:
            CommunicationError: A peer is lost.
        """
        everything = ((0, self._layout.size),)
        trusted = {
            rank: spans if rank in plan.stale else everything for rank, spans in plan.held.items()
        }
        moves = plan_moves(trusted, {rank: everything for rank in plan.stale})
        if moves:
            exchange_moves(self._group, moves, self._weights, self._weights)

    def _weights(self, span: Range) -> list[torch.Tensor]:
        return [self._layout.weights(part) for part in self._layout.slices(span)]

    def divide(self, plan: SyncPlan) -> int:
        """Receive this rank's new shards and drop the old ones.

        Returns:
            Number of bytes that all ranks together have moved.

        Raises:
            CommunicationError: A peer is lost. The old shards are kept, and the new ones if they
                are complete.
        """
        group, shards = self._group, self._shards
        size = group.world_size
        wanted = {rank: self._layout.shards(rank, size) for rank in range(size)}
        num_bytes = 0
        is_moved = any(plan.held.get(rank) != spans for rank, spans in wanted.items())
        if is_moved:
            moves = plan_moves(plan.held, wanted)
            forms = self._gather_forms(plan)
            new = self._build(plan, moves, forms)
            # If a rank is lost before this point, all other ranks still have their old shards. If
            # one is lost later, some ranks may have dropped their old shards, but then all new
            # shards are complete.
            shards.replace(new)
            group.all_reduce(torch.zeros(1)).wait()
            num_bytes = sum(self._num_bytes(move.span, forms) for move in moves)
        shards.adopt(group.rank, size)
        return num_bytes

    def _gather_forms(self, plan: SyncPlan) -> dict[int, Form]:
        mine = {}
        if self._group.rank in plan.held:
            found = {i: self._shards.form(i) for i in range(len(self._layout.parameters))}
            mine = {str(i): form.to_json() for i, form in found.items() if form is not None}
        forms: dict[int, Form] = {}
        for packed in gather_json(self._group, mine):
            for index, form in packed.items():
                forms.setdefault(int(index), Form.from_json(form))
        return forms

    def _build(
        self, plan: SyncPlan, moves: Sequence[Move], forms: Mapping[int, Form]
    ) -> list[NewShard]:
        group, shards = self._group, self._shards
        wanted = self._layout.shards(group.rank, group.world_size)
        new = [NewShard(self._layout, span, forms) for span in wanted]

        def slots(span: Range) -> list[torch.Tensor]:
            [shard] = [one for one in new if overlap(one.span, span) == span]
            return shard.slots(span)

        for span in plan.held.get(group.rank, ()):
            for common in (overlap(span, shard.span) for shard in new):
                if common is not None:
                    values = shards.read_span(common, forms)
                    for slot, value in zip(slots(common), values, strict=True):
                        copy_in_pieces(slot, value, self._beat)
        if moves:
            exchange_moves(group, moves, lambda span: shards.read_span(span, forms), slots)
        return new

    def _num_bytes(self, span: Range, forms: Mapping[int, Form]) -> int:
        return sum(
            (part.stop - part.first) * dtype.itemsize
            for part in self._layout.slices(span)
            for _, dtype in vectors_of(part, forms)
        )
