"""What a generation's collectives run on: gloo always, NCCL beside it for gradients on GPUs.

NCCL has not been tried yet: no machine with a GPU could be had. Its part is tested with a stand-in,
and by ``tests/integration/test_gpu.py`` where there is a GPU.
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
"""Only a backstop: lost peers are noticed by the coordinator, long before."""

Keep = Callable[[Any], None]
ConnectNccl = Callable[[BroadcastStore, int, int, Keep], None]

_NAME = "etgloo"


def connect_gloo(store: BroadcastStore, rank: int, world_size: int, device: GlooDevice) -> Any:
    """Return a gloo backend on a device of its own. Blocks, perhaps without any time-out."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device.device]
    options._timeout = COLLECTIVE_TIMEOUT
    options._threads = 2
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def connect_nccl(store: BroadcastStore, rank: int, world_size: int, keep: Keep) -> None:
    """Make an NCCL backend and connect it. Blocks, perhaps without any time-out.

    Args:
        store: The generation's.
        rank: This rank.
        world_size: All of them.
        keep: Called with the backend before it connects, so that it can be aborted meanwhile.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    prefixed = c10d.PrefixStore(NCCL, store)
    backend: Any = dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
    keep(backend)
    # The first collective connects. Better here than within the backward pass.
    count = torch.ones(1, device=torch.device("cuda", torch.cuda.current_device()))
    backend.allreduce([count]).wait()
    if int(count) != world_size:
        raise CommunicationError(f"NCCL counted {int(count)} ranks instead of {world_size}")


def end_nccl(backend: Any, *, gently: bool) -> None:
    """Free an NCCL backend in a thread of its own: either call may wait for a stuck kernel."""
    end = backend.shutdown if gently else backend.abort
    threading.Thread(target=end, daemon=True, name="etrain-nccl-end").start()


class _Prebuilt(threading.local):
    backend: Any = None


_PREBUILT = _Prebuilt()


def make_default_group(
    backend: Any, store: BroadcastStore, rank: int, world_size: int
) -> dist.ProcessGroup:
    """Make ``backend`` torch's default group, without any waiting. Returns the group.

    Also tensors on a GPU go through it if somebody calls ``torch.distributed`` by hand: slow, but
    it can be aborted. Two custom backends in one group would be mixed up by torch.
    """
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
        # torch puts another hook around the old one in every generation, and never takes it away.
        _PREBUILT.backend, sys.excepthook = None, hook
    group = dist.group.WORLD
    assert group is not None
    return group
