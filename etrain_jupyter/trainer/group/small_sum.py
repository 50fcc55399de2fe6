"""Sums of small tensors over the ranks, in as few messages as possible.

gloo's all-reduce is a ring. Its number of messages grows with the number of ranks, whatever the
size of the tensor, and one message costs more than sending a hundred kilobytes (the figures are in
``docs/benchmarks/steps.md``, ``sums``). Recursive doubling needs ``log2(W)`` messages per rank,
each with the whole tensor (Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH", 2005, section 4.5).

Shapes: ``W`` ranks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from etrain_jupyter.rules import small_sums

TAG = 1 << 22
"""Message tag; no other exchange of a rank uses it."""


class Peers(Protocol):
    """The part of the process group that sends messages; see ``process_group.RankGroup``."""

    rank: int
    world_size: int

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        """Start sending a contiguous CPU tensor; return an object with ``wait``."""
        ...

    def raise_if_failed(self) -> None:
        """Raise if the generation has failed, because its tensors may belong to the next one."""
        ...

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        """Start receiving into a contiguous CPU tensor; return an object with ``wait``."""
        ...


def is_small(tensor: torch.Tensor, world_size: int) -> bool:
    """Return True if ``sum_small`` can sum a tensor and is faster than gloo's all-reduce."""
    size_bytes = tensor.numel() * tensor.element_size()
    is_usable = tensor.device.type == "cpu" and tensor.is_contiguous() and size_bytes > 0
    return is_usable and small_sums.is_small(size_bytes, world_size)


def sum_small(peers: Peers, tensor: torch.Tensor) -> None:
    """Sum a contiguous CPU tensor over the ranks, in place, with the same bits on all ranks.

    Blocks, so call it only inside ``RankGroup.start``. All ranks must call it in the same order.
    """
    # Five ranks. In each round, two ranks exchange their sums, and both add them up. The ranks
    # beyond the largest power of two send their values to a rank below it, and receive the total:
    #
    #     rank 0   a+e   a+b+e   a+b+c+d+e ── sends the total
    #     rank 1   b     a+b+e   a+b+c+d+e
    #     rank 2   c     c+d     a+b+c+d+e
    #     rank 3   d     c+d     a+b+c+d+e
    #     rank 4   sends e                    receives the total
    rank, world_size = peers.rank, peers.world_size
    num_core = 1 << (world_size.bit_length() - 1)
    received = torch.empty_like(tensor)
    if rank >= num_core:
        peers.isend(tensor, rank - num_core, TAG).wait()
        peers.irecv(received, rank - num_core, TAG).wait()
        peers.raise_if_failed()  # an abandoned sum must not write into its tensor
        tensor.copy_(received)
        return
    if rank + num_core < world_size:
        peers.irecv(received, rank + num_core, TAG).wait()
        peers.raise_if_failed()
        tensor.add_(received)
    distance = 1
    while distance < num_core:
        other = rank ^ distance
        works = [peers.irecv(received, other, TAG), peers.isend(tensor, other, TAG)]
        for work in works:
            work.wait()
        peers.raise_if_failed()
        # Both ranks add the lower rank's value first, because the sum of two NaNs has the bits of
        # the first.
        low, high = (tensor, received) if rank < other else (received, tensor)
        torch.add(low, high, out=tensor)
        distance *= 2
    if rank + num_core < world_size:
        peers.isend(tensor, rank + num_core, TAG).wait()
