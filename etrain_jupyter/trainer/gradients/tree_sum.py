"""Sums over the ranks whose order depends on the number of shards alone.

Every rank comes with the partial sums that it could make by itself (``elastic.shard_plan``). Each
rank owns a chunk of the result: it receives everybody's partial sums of that chunk, adds them up in
the order of the tree, and sends the result to all. That is a reduce-scatter and an all-gather whose
additions have a fixed order; it moves what an all-reduce moves, where shards lie evenly.

Shapes: ``N`` numbers, ``K`` partial sums of a rank, ``W`` ranks, ``S`` segments of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from etrain_jupyter.rules.samples.batch_plan import share_range
from etrain_jupyter.rules.samples.shard_plan import Merge, ShardPlan

DIRECT_BYTES = 1 << 20
"""If a rank would receive no more, everybody sends all to everybody and adds by itself: one journey
instead of two."""
SEGMENT_BYTES = 4 << 20
"""About so much is added up while the next segment travels."""


class Peers(Protocol):
    """What a sum needs of the generation's group."""

    rank: int
    world_size: int

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        """Start to send; the result has a ``wait``."""
        ...

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        """Start to receive; the result has a ``wait``."""
        ...


class TreeSum:
    """One vector's sum over all ranks' partial sums, again and again, in buffers of its own.

    Args:
        peers: The generation's group.
        plan: How the shards lie on its ranks.
        partials: This rank's partial sums, contiguous CPU tensors of shape ``(N,)``, one a subtree.
            They are read by each ``exchange``, and the first takes the total.
        tag: The first of ``num_tags`` tags that no other sum uses.
    """

    def __init__(
        self, peers: Peers, plan: ShardPlan, partials: Sequence[torch.Tensor], *, tag: int
    ) -> None:
        self._peers = peers
        self._plan = plan
        self._partials = list(partials)
        self._tag = tag
        self._ranks = [rank for rank in range(peers.world_size) if rank != peers.rank]
        self._most_partials = max(map(len, plan.subtrees))
        total = partials[0]
        size_bytes = total.numel() * total.element_size()
        num_others = sum(map(len, plan.subtrees)) - 1
        self._is_direct = size_bytes * num_others <= DIRECT_BYTES
        chunk_bytes = size_bytes // peers.world_size
        self._num_segments = 1 if self._is_direct else max(1, chunk_bytes // SEGMENT_BYTES)
        self._segments = [self._segments_of(rank) for rank in range(peers.world_size)]
        mine = self._segments[peers.rank]
        self._first = mine[0].start
        length = mine[-1].stop - mine[0].start
        # What arrives for my chunk: shape (K of that rank, chunk).
        self._arrivals = {
            rank: torch.empty(len(plan.subtrees[rank]), length, dtype=total.dtype)
            for rank in self._ranks
        }

    @property
    def num_tags(self) -> int:
        """How many tags it uses."""
        return self._num_segments * (self._most_partials + 1)

    def _segments_of(self, rank: int) -> list[slice]:
        """Return the pieces of a rank's chunk, some of which may be empty."""
        size, world_size = self._partials[0].numel(), self._peers.world_size
        chunk = range(size) if self._is_direct else share_range(size, rank, world_size)
        pieces = [share_range(len(chunk), s, self._num_segments) for s in range(self._num_segments)]
        bounds = [chunk.start, *(chunk.start + piece.stop for piece in pieces)]
        return [slice(a, b) for a, b in pairwise(bounds)]

    def exchange(self) -> None:
        """Put the total into the first partial sum. Blocks; only inside the group's ``start``."""
        arriving = [self._receive_partials(s) for s in range(self._num_segments)]
        leaving = [work for s in range(self._num_segments) for work in self._send_partials(s)]
        # An arriving total cannot overtake what is still to be sent of the same place: its owner
        # has had to receive that first.
        returning = [work for s in range(self._num_segments) for work in self._receive_totals(s)]
        for segment, works in enumerate(arriving):
            _wait(works)
            if self._is_direct:
                _wait(leaving)  # the total is about to take the place of what is being sent
            self._add_up(segment)
            leaving += self._send_totals(segment)
        _wait(leaving)
        _wait(returning)

    def _receive_partials(self, segment: int) -> list[Any]:
        place = self._segments[self._peers.rank][segment]
        arrived = slice(place.start - self._first, place.stop - self._first)
        return [
            self._peers.irecv(row[arrived], rank, self._tag_of(segment, k))
            for rank in self._ranks
            for k, row in enumerate(self._arrivals[rank])
            if place.stop > place.start
        ]

    def _send_partials(self, segment: int) -> list[Any]:
        return [
            self._peers.isend(partial[place], rank, self._tag_of(segment, k))
            for rank in self._ranks
            for k, partial in enumerate(self._partials)
            if (place := self._segments[rank][segment]).stop > place.start
        ]

    def _receive_totals(self, segment: int) -> list[Any]:
        return [
            self._peers.irecv(self._partials[0][place], rank, self._tag_of(segment, None))
            for rank in self._ranks
            if (place := self._segments[rank][segment]).stop > place.start and not self._is_direct
        ]

    def _send_totals(self, segment: int) -> list[Any]:
        place = self._segments[self._peers.rank][segment]
        return [
            self._peers.isend(self._partials[0][place], rank, self._tag_of(segment, None))
            for rank in self._ranks
            if place.stop > place.start and not self._is_direct
        ]

    def _tag_of(self, segment: int, partial: int | None) -> int:
        number = self._most_partials if partial is None else partial
        return self._tag + segment * (self._most_partials + 1) + number

    def _add_up(self, segment: int) -> None:
        place = self._segments[self._peers.rank][segment]
        arrived = slice(place.start - self._first, place.stop - self._first)
        values: list[torch.Tensor] = []
        for rank in range(self._peers.world_size):
            if rank == self._peers.rank:
                values += [partial[place] for partial in self._partials]
            else:
                values += [row[arrived] for row in self._arrivals[rank]]
        merge(values, self._plan.merges[:-1])
        into, other = self._plan.merges[-1]
        torch.add(values[into], values[other], out=self._partials[0][place])


def merge(values: Sequence[torch.Tensor], merges: Sequence[Merge]) -> None:
    """Add up ``values`` in place, in the order that ``merges`` says."""
    for into, other in merges:
        values[into].add_(values[other])


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
    works.clear()
