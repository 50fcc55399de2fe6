"""Backends of a generation's collectives: gloo always, and NCCL for gradients on GPUs.

Unit tests replace NCCL; ``tests/integration/test_gpu.py`` uses it on machines with a GPU.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from etrain_jupyter.trainer.group.gloo_device import GlooDevice
from etrain_jupyter.trainer.group.rendezvous import BroadcastStore, CommunicationError

GLOO, NCCL = "gloo", "nccl"
COLLECTIVE_TIMEOUT = timedelta(seconds=1800)
"""Timeout of last resort: normally, the coordinator detects a lost peer much earlier."""

Keep = Callable[[Any], None]
ConnectNccl = Callable[[BroadcastStore, int, int, Keep], None]

_NAME = "etgloo"


def connect_gloo(store: BroadcastStore, rank: int, world_size: int, device: GlooDevice) -> Any:
    """Return a connected gloo backend on its own device. Blocks, possibly without a timeout."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # The generation's own device, not torch's shared one: shutting down its sockets unblocks only
    # this generation's collectives.
    options._devices = [device.device]
    options._timeout = COLLECTIVE_TIMEOUT
    options._threads = 2
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def connect_nccl(store: BroadcastStore, rank: int, world_size: int, keep: Keep) -> None:
    """Create an NCCL backend and connect it. Blocks, possibly without a timeout.

    Args:
        store: The rendezvous store of the generation.
        rank: This rank.
        world_size: Number of ranks.
        keep: Called with the backend before it connects, so that another thread can abort it.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    # ``abort`` cannot reach a communicator inside a blocking initialization. If a peer dies during
    # it, the thread, its sockets and its GPU memory would be lost.
    options.config.blocking = False
    prefixed = c10d.PrefixStore(NCCL, store)
    backend: Any = dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
    keep(backend)
    # NCCL connects in its first collective. Run one here, where a failure counts as a failed
    # attempt to form the generation, rather than in the backward pass. The sum also proves that all
    # ranks take part.
    count = torch.ones(1, device=torch.device("cuda", torch.cuda.current_device()))
    backend.allreduce([count]).wait()
    # The conversion synchronizes with the device.
    if int(count) != world_size:
        raise CommunicationError(f"NCCL counted {int(count)} ranks instead of {world_size}")


def end_nccl(backend: Any, *, gently: bool) -> None:
    """Free an NCCL backend in a separate thread, because this may wait for a stuck kernel."""
    # ``abort`` cancels collectives in flight. An intact generation has none.
    end = backend.shutdown if gently else backend.abort
    threading.Thread(target=end, daemon=True, name="etrain-nccl-end").start()


class _Prebuilt(threading.local):
    # torch creates a group's backend through a registered function, which gets no reference to our
    # backend. Our backend is passed through this object, which is thread-local so that no other
    # thread can get it.
    backend: Any = None


_PREBUILT = _Prebuilt()


def make_default_group(
    backend: Any, store: BroadcastStore, rank: int, world_size: int
) -> dist.ProcessGroup:
    """Make ``backend`` torch's default group without blocking, and return the group.

    If user code calls ``torch.distributed`` directly, even tensors on a GPU go through gloo, which
    is slow but can be aborted. torch would confuse two custom backends in one group.
    """
    # Register it once per process, because torch cannot unregister a backend.
    if _NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            _NAME, lambda *_: _PREBUILT.backend, extended_api=True, devices=["cpu", "cuda"]
        )
    _PREBUILT.backend, hook = backend, sys.excepthook
    try:
        dist.init_process_group(
            _NAME, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
        )
    finally:
        # torch wraps the hook again in every generation and never removes the wrappers.
        _PREBUILT.backend, sys.excepthook = None, hook
    group = dist.group.WORLD
    assert group is not None
    return group
