"""Compare three ways to sum gradients over the ranks, without any other work.

Every rank of ``torchrun`` holds some of V shard gradients. ``all_reduce`` sums them in an order
that depends on the number of ranks. ``all_gather`` sends every shard to all ranks, and each rank
adds them up in the order of the tree. ``tree`` sums in the order of the tree while sending, as
``reproducible`` does. Rank 0 writes the times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from etrain_jupyter.rules.samples.shard_plan import ShardPlan, Subtree, plan_shards, shard_merges
from etrain_jupyter.trainer.gradients.tree_sum import TreeSum, merge


class Way(Protocol):
    """Method to sum gradients over the ranks."""

    total: torch.Tensor

    def prepare(self) -> None:
        """Reset the input. Not timed."""

    def exchange(self) -> None:
        """Compute the sum in ``total``."""


class Peers:
    """Adapter from the default process group to the interface that ``TreeSum`` needs."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        """Start sending a tensor."""
        return dist.isend(tensor, dst, tag=tag)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        """Start receiving a tensor."""
        return dist.irecv(tensor, src, tag=tag)

    def raise_if_failed(self) -> None:
        """Do nothing: this group is never aborted."""


class AllReduce:
    """Sum with gloo's all-reduce."""

    def __init__(self, shards: list[torch.Tensor]) -> None:
        self._sum = torch.stack(shards).sum(0)
        self.total = torch.empty_like(self._sum)

    def prepare(self) -> None:
        """Restore the rank's own sum."""
        self.total.copy_(self._sum)

    def exchange(self) -> None:
        """Sum over all ranks."""
        dist.all_reduce(self.total)


class AllGather:
    """Send each shard to all ranks; each rank adds them up in the order of the tree."""

    def __init__(self, shards: list[torch.Tensor], world_size: int) -> None:
        self._mine = torch.stack(shards)
        self._all = [torch.empty_like(self._mine) for _ in range(world_size)]
        self._merges = shard_merges(Subtree(0, len(shards) * world_size))
        self.total = self._all[0][0]

    def prepare(self) -> None:
        """Do nothing: the exchange does not change its input."""

    def exchange(self) -> None:
        """Gather all shards and add them up."""
        dist.all_gather(self._all, self._mine)
        merge([row for gathered in self._all for row in gathered], self._merges)


class Tree:
    """Sum in the order of the tree, as ``reproducible`` does."""

    def __init__(self, shards: list[torch.Tensor], plan: ShardPlan, peers: Peers) -> None:
        first = plan.shards[peers.rank].start
        self._own = []
        for tree in plan.subtrees[peers.rank]:
            rows = [shards[number - first].clone() for number in range(tree.first, tree.stop)]
            merge(rows, shard_merges(tree))
            self._own.append(rows[0])
        self._partials = [torch.empty_like(own) for own in self._own]
        self._sum = TreeSum(peers, plan, self._partials, tag=1)
        self.total = self._partials[0]

    def prepare(self) -> None:
        """Restore the rank's own partial sums."""
        for partial, own in zip(self._partials, self._own, strict=True):
            partial.copy_(own)

    def exchange(self) -> None:
        """Sum over all ranks in the order of the tree."""
        self._sum.exchange()


def main() -> None:
    """Run all methods in turn, round after round; rank 0 writes the times and digests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--numbers", type=int, required=True, help="elements per gradient")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    peers = Peers()
    plan = plan_shards(num_shards=options.shards, world_size=peers.world_size)
    shards = [gradient_of(shard, options.numbers) for shard in plan.shards[peers.rank]]
    ways: dict[str, Way] = {
        "all_reduce": AllReduce(shards),
        "all_gather": AllGather(shards, peers.world_size),
        "tree": Tree(shards, plan, peers),
    }
    times = measure(ways, options.rounds)
    digests = {name: digest_of(way.total) for name, way in ways.items()}
    if peers.rank == 0:
        options.json.write_text(json.dumps({"times": times, "digests": digests}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(ways: dict[str, Way], num_rounds: int) -> dict[str, list[float]]:
    """Time every method ``num_rounds`` times, in turn, after a first round that connects."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_rounds + 1):
        for name, way in ways.items():
            way.prepare()
            dist.barrier()
            begin = time.perf_counter()
            way.exchange()
            dist.barrier()
            if number > 0:
                times[name].append(time.perf_counter() - begin)
    return times


def gradient_of(shard: int, numbers: int) -> torch.Tensor:
    """Return the gradient of a shard, which is the same in every process."""
    return torch.randn(numbers, generator=torch.Generator().manual_seed(shard))


def digest_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's values."""
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
