"""Sums over the ranks in an order that depends only on the number of shards.

Every rank has the partial sums of its own shards (``rules.samples.shard_plan``), and owns a chunk
of the result. It receives the partial sums of that chunk from all ranks, adds them up in the order
of the tree, and sends the result to all ranks. This is a reduce-scatter followed by an all-gather,
with additions in a fixed order. If the shards are evenly distributed, it transfers the same number
of bytes as an all-reduce.

Shapes: ``N`` elements, ``K`` partial sums per rank, ``W`` ranks, ``S`` segments per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from etrain_jupyter.rules.samples.batch_plan import share_range
from etrain_jupyter.rules.samples.shard_plan import Merge, ShardPlan
from etrain_jupyter.trainer.group.small_sum import Peers

DIRECT_BYTES = 1 << 20
"""If each rank receives at most this number of bytes, all ranks send everything to each other, and
each rank adds up the whole vector. This takes one round trip instead of two."""
SEGMENT_BYTES = 4 << 20
"""Approximate size of a segment. One segment is added up while the next one is received."""


class TreeSum:
    """Adds up the partial sums of one vector from all ranks; reusable, with its own buffers.

    Args:
        plan: Distribution of the shards over the ranks.
        partials: This rank's partial sums, contiguous CPU tensors of shape ``(N,)``, one per
            subtree. Each ``exchange`` reads them and overwrites the first with the total.
        tag: The first of ``num_tags`` message tags that no other sum uses.
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
        # Small sums are limited by latency, large sums by bandwidth.
        self._is_direct = size_bytes * num_others <= DIRECT_BYTES
        chunk_bytes = size_bytes // peers.world_size
        self._num_segments = 1 if self._is_direct else max(1, chunk_bytes // SEGMENT_BYTES)
        self._segments = [self._segments_of(rank) for rank in range(peers.world_size)]
        mine = self._segments[peers.rank]
        self._first = mine[0].start
        length = mine[-1].stop - mine[0].start
        # Received partial sums of this rank's chunk, shape (the sender's K, chunk).
        self._arrivals = {
            rank: torch.empty(len(plan.subtrees[rank]), length, dtype=total.dtype)
            for rank in self._ranks
        }

    @property
    def num_tags(self) -> int:
        """Number of message tags in use."""
        return self._num_segments * (self._most_partials + 1)

    def _segments_of(self, rank: int) -> list[slice]:
        """Return the segments of a rank's chunk, some of which may be empty."""
        size, world_size = self._partials[0].numel(), self._peers.world_size
        chunk = range(size) if self._is_direct else share_range(size, rank, world_size)
        pieces = [share_range(len(chunk), s, self._num_segments) for s in range(self._num_segments)]
        bounds = [chunk.start, *(chunk.start + piece.stop for piece in pieces)]
        return [slice(a, b) for a, b in pairwise(bounds)]

    def exchange(self) -> None:
        """Write the total into the first partial sum.

        Blocks, so call it only inside ``RankGroup.start``.
        """
        # Two ranks, each with one partial sum of two chunks; rank 0 owns chunk a, rank 1 chunk b
        # (in a direct sum, each rank receives and adds both):
        #
        #     rank 0   a0 b0   sends b0   receives a1   a = a0 + a1   sends a   receives b
        #     rank 1   a1 b1   sends a1   receives b0   b = b0 + b1   sends b   receives a
        arriving = [self._receive_partials(s) for s in range(self._num_segments)]
        leaving = [work for s in range(self._num_segments) for work in self._send_partials(s)]
        # A total cannot arrive before the partial sum in the same place has been sent, because the
        # owner of the chunk must first receive that partial sum.
        returning = [work for s in range(self._num_segments) for work in self._receive_totals(s)]
        for segment, works in enumerate(arriving):
            _wait(works)
            # This rank may still be sending the partial sums that the total overwrites.
            if self._is_direct:
                _wait(leaving)  # the total overwrites the memory that is being sent
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
        # Each segment has one tag per partial sum and one for the total. Two messages between the
        # same ranks with the same tag could be mixed up.
        number = self._most_partials if partial is None else partial
        return self._tag + segment * (self._most_partials + 1) + number

    def _add_up(self, segment: int) -> None:
        place = self._segments[self._peers.rank][segment]
        arrived = slice(place.start - self._first, place.stop - self._first)
        # In rank order, which is shard order: ``merges`` refers to these positions.
        values: list[torch.Tensor] = []
        for rank in range(self._peers.world_size):
            if rank == self._peers.rank:
                values += [partial[place] for partial in self._partials]
            else:
                values += [row[arrived] for row in self._arrivals[rank]]
        # The last addition writes its result directly into the send buffer.
        merge(values, self._plan.merges[:-1])
        into, other = self._plan.merges[-1]
        torch.add(values[into], values[other], out=self._partials[0][place])


def merge(values: Sequence[torch.Tensor], merges: Sequence[Merge]) -> None:
    """Add up ``values`` in place, in the order of ``merges``."""
    for into, other in merges:
        values[into].add_(values[other])


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
    works.clear()
