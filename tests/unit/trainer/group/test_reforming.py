"""A process that forms one generation after another frees the previous ones completely."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from etrain_jupyter.trainer.group import gloo_device
from etrain_jupyter.trainer.group.gloo_device import GlooDevice
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from tests.unit.trainer.peers import HOST, Peer, connected

NUM_GENERATIONS = 30
TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")


def wrap(model: nn.Module, group: RankGroup) -> nn.Module:
    module = DistributedDataParallel(model, init_sync=False)
    module.register_comm_hook(None, lambda _, bucket: group.ddp_hook(bucket))
    return module


def train(model: nn.Module, group: RankGroup, peer: Peer) -> weakref.ref:
    """One backward pass of an intact generation, and a message."""
    module = wrap(model, group)
    arriving = group.start(lambda: group.irecv(torch.zeros(4), 1, tag=1).wait())
    peer.send(torch.ones(4), tag=1)
    num_values = sum(p.numel() for p in model.parameters())
    other = threading.Thread(target=peer.all_reduce, args=[torch.zeros(num_values)])
    other.start()
    module(torch.ones(2, 8)).sum().backward()
    other.join()
    arriving.wait()
    return weakref.ref(module)


def train_until_abort(model: nn.Module, group: RankGroup) -> weakref.ref:
    """A backward pass and a message whose peer stays silent."""
    module = wrap(model, group)
    arriving = group.start(lambda: group.irecv(torch.zeros(4), 1, tag=1).wait())
    timer = threading.Timer(0.01, group.abort)
    timer.start()
    try:
        module(torch.ones(2, 8)).sum().backward()
        group.settle()
        arriving.wait()
    except CommunicationError:
        timer.join()
        return weakref.ref(module)
    raise AssertionError("the abort was not noticed")


def live_one(model: nn.Module, generation: int) -> list[weakref.ref]:
    with connected(generation) as (group, peer):
        is_broken = generation % 2 == 0
        module = train_until_abort(model, group) if is_broken else train(model, group, peer)
        model.zero_grad()
        return [module, weakref.ref(group)]


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settles(is_so: Callable[[], bool]) -> bool:
    """Return True once the condition holds: other threads free the remains asynchronously."""
    deadline = time.monotonic() + 30
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def what_is_left_of_many() -> dict[str, bool]:
    """Run many generations, and return which conditions hold afterwards."""
    model = nn.Linear(8, 8)
    for generation in (1, 2):
        live_one(model, generation)  # torch keeps some threads and modules after the first one
    gc.collect()
    threads, descriptors, count = num_threads(), num_descriptors(), c10d._world.group_count
    hook = sys.excepthook
    gc.disable()  # cycles would be collected late, and gloo's destructor waits for them
    traces = [ref for g in range(NUM_GENERATIONS) for ref in live_one(model, 3 + g)]
    return {
        "no module and no group": settles(lambda: all(trace() is None for trace in traces)),
        "no thread": settles(lambda: num_threads() <= threads),
        "no descriptor": settles(lambda: num_descriptors() <= descriptors),
        "nothing in torch's tables": not any(getattr(c10d._world, name) for name in TABLES),
        "torch's count": c10d._world.group_count == count,
        "the hook for exceptions": sys.excepthook is hook,
        "no exchange": "etrain-exchange" not in {t.name for t in threading.enumerate()},
    }


def test_generation_is_freed_completely_at_its_end():
    # In a separate process: other tests leave threads, and libraries start some.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        is_so = process.submit(what_is_left_of_many).result()
    assert is_so == dict.fromkeys(is_so, True)


def test_device_is_found_even_if_it_reuses_the_descriptor_of_an_older_one(monkeypatch):
    older = GlooDevice(HOST)
    number = older._epoll
    list_links = gloo_device._links

    def links_and_the_end_of_the_older() -> dict[int, str]:
        found = list_links()
        older.__dict__.pop("device", None)  # just freed by another thread
        return found

    monkeypatch.setattr(gloo_device, "_links", links_and_the_end_of_the_older)
    younger = GlooDevice(HOST)
    assert younger._epoll is not None
    assert younger._epoll == number
