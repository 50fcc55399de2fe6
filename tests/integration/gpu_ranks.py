"""Work of a rank in the GPU tests; importable, because each rank is a process."""

from __future__ import annotations

import threading
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from etrain_jupyter.trainer.devices import choose_device
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from etrain_jupyter.trainer.state.capture import digest_of, put_state, take_state
from etrain_jupyter.trainer.state.transfer import receive_state, send_state

HOST = "127.0.0.1"
WIDTH = 1024
"""Wide enough for several buckets and for messages of more than one chunk."""


class _Rendezvous(dist.PrefixStore):
    """A torch store with the additional method of a generation's store."""

    def abort(self) -> None:
        """Do nothing: no rank waits for the store after the group has formed."""


class Rank:
    """A model on a device that trains in several generations."""

    def __init__(self, rank: int, world_size: int, port: int, backend: str, device: str) -> None:
        self.rank, self.world_size, self.backend = rank, world_size, backend
        timeout = timedelta(seconds=60)
        self.store = dist.TCPStore(HOST, port, None, False, timeout, wait_for_workers=False)
        self.device = choose_device() if device == "cuda" else torch.device(device)
        torch.manual_seed(rank)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def form(self, generation: int) -> RankGroup:
        """Form the group of a generation and return it."""
        group = RankGroup(
            generation=generation,
            rank=self.rank,
            world_size=self.world_size,
            store=_Rendezvous(f"g{generation}", self.store),
            host=HOST,
            backend=self.backend,
        )
        group.form()
        return group

    def share_state(self, group: RankGroup) -> None:
        """Send the state of rank 0 to all other ranks."""
        behind = list(range(1, self.world_size))
        if group.rank == 0:
            send_state(group, *take_state(self.model, self.optimizer), behind)
        else:
            header, tensors, _ = receive_state(group, self.model, behind, optimizer=self.optimizer)
            put_state(self.model, self.optimizer, header, tensors)

    def wrap(self, group: RankGroup) -> nn.Module:
        """Return the model wrapped in DDP for this group."""
        module = DistributedDataParallel(self.model, init_sync=False)
        module.register_comm_hook(None, lambda _, bucket: group.ddp_hook(bucket))
        return module

    def step(self, group: RankGroup, module: nn.Module, number: int) -> float:
        """Run one step; return the relative difference of its gradients from one process's."""
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(self.world_size, 4, WIDTH, generator=generator).to(self.device)
        whole = [
            torch.autograd.grad(self.model(x).square().mean(), list(self.model.parameters()))
            for x in batch
        ]
        module(batch[self.rank]).square().mean().backward()
        group.settle()
        gaps = [
            float((p.grad - sum(parts)).abs().max()) / float(sum(parts).abs().max())
            for p, parts in zip(self.model.parameters(), zip(*whole, strict=True), strict=True)
        ]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return max(gaps)


def train(answers: Queue[Any], *place: Any) -> None:
    """Form two generations; in each, share the state of rank 0 and run three steps."""
    rank = Rank(*place)
    gaps = []
    for generation in (1, 2):
        group = rank.form(generation)
        rank.share_state(group)
        module = rank.wrap(group)
        gaps += [rank.step(group, module, number) for number in range(3)]
        del module
        group.close()
    answers.put((rank.rank, digest_of(rank.model), max(gaps)))


def abort(answers: Queue[Any], *place: Any) -> None:
    """Abort rank 0 in a backward pass that rank 1 does not join; train in the next generation."""
    rank = Rank(*place)
    group = rank.form(1)
    rank.share_state(group)
    module = rank.wrap(group)
    failure = ""
    if rank.rank == 0:
        threading.Timer(1.0, group.abort, ["rank 1 is silent"]).start()
        try:
            rank.step(group, module, 0)
        except CommunicationError as exc:
            failure = str(exc)
        rank.optimizer.zero_grad()
        rank.store.set("aborted", "1")
    rank.store.wait(["aborted"])  # rank 1 stays alive but silent
    del module
    group.close()
    group = rank.form(2)
    rank.share_state(group)
    module = rank.wrap(group)
    gap = rank.step(group, module, 1)
    del module
    group.close()
    answers.put((rank.rank, digest_of(rank.model), gap, failure))
