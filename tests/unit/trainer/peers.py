"""Two ranks in one process: a real group, and a bare peer that a test controls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from etrain_jupyter.trainer.group import small_sum
from etrain_jupyter.trainer.group.authentication import authenticate
from etrain_jupyter.trainer.group.gloo_device import GlooDevice
from etrain_jupyter.trainer.group.process_group import BroadcastStore, RankGroup

HOST = "127.0.0.1"


class Peer:
    """Rank 1's end of the connection: only gloo, without the code under test."""

    def __init__(self, store: BroadcastStore, rank: int = 1, world_size: int = 2) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.device = GlooDevice(HOST)
        self.backend: Any = None

    def connect(self) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self.device.device]
        options._timeout = timedelta(seconds=30)
        options._threads = 2
        # The group under test may fail meanwhile.
        with contextlib.suppress(RuntimeError):
            backend = dist.ProcessGroupGloo(self._store, self._rank, self._world_size, options)
            size = self._world_size
            authenticate(self.device, self._store, rank=self._rank, world_size=size, secret=b"")
            self.backend = backend

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Join a sum over the two ranks, in place."""
        if not small_sum.is_small(tensor, 2):
            self.backend.allreduce([tensor]).wait()
            return
        received = torch.empty_like(tensor)
        receiving = self.backend.recv([received], 0, small_sum.TAG)
        self.send(tensor, small_sum.TAG)
        receiving.wait()
        tensor += received

    def send(self, tensor, tag: int, to: int = 0) -> None:
        self.backend.send([tensor], to, tag).wait()

    def receive(self, tensor, tag: int, source: int = 0) -> None:
        self.backend.recv([tensor], source, tag).wait()

    def die(self) -> None:
        self.device.shut_down()


def linked_stores(count: int = 2) -> list[BroadcastStore]:
    """Connected rendezvous stores, in place of the coordinator."""
    stores: list[BroadcastStore] = []

    def publisher(index: int):
        def publish(key: str, value: bytes) -> None:
            for other, store in enumerate(stores):
                if other != index:
                    store.put(key, value)

        return publish

    stores += [BroadcastStore(publisher(index)) for index in range(count)]
    return stores


@contextlib.contextmanager
def connected(
    generation: int = 1, *, on_made: Callable[[RankGroup], None] | None = None, **keys: Any
) -> Iterator[tuple[RankGroup, Peer]]:
    """Yield a formed group of two ranks and its peer."""
    mine, its = linked_stores()
    group = RankGroup(generation=generation, rank=0, world_size=2, store=mine, host=HOST, **keys)
    if on_made is not None:
        on_made(group)
    peer = Peer(its)
    connecting = threading.Thread(target=peer.connect)
    connecting.start()
    try:
        group.form()
        connecting.join()
        yield group, peer
    finally:
        group.close()


@contextlib.contextmanager
def linked_groups(count: int, generation: int = 1) -> Iterator[list[RankGroup]]:
    """Yield the groups of ``count`` ranks, connected, without torch's default group."""
    groups = [
        RankGroup(generation=generation, rank=rank, world_size=count, store=store, host=HOST)
        for rank, store in enumerate(linked_stores(count))
    ]
    with ThreadPoolExecutor(count) as ranks:
        list(ranks.map(lambda group: group.connect(), groups))
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def on_each(groups: list[RankGroup], work: Callable[[RankGroup], Any]) -> list[Any]:
    """Run ``work`` on all ranks at the same time; return the result or exception of each.

    If one raises, all are aborted, as by the coordinator.
    """

    def attempt(group: RankGroup) -> Any:
        try:
            return work(group)
        except Exception as exc:
            for each in groups:
                each.abort("a rank has raised")
            return exc

    with ThreadPoolExecutor(len(groups)) as ranks:
        return list(ranks.map(attempt, groups))
