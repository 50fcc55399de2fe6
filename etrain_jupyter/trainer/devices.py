"""Choose this worker's device, and configure NCCL and deterministic kernels for it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

_NCCL_ENVIRONMENT = {
    # The coordinator handles a lost peer, so NCCL's watchdog must neither end this process nor wait
    # for the peer. ``RankGroup.abort`` aborts the communicator of a generation.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    # ``wait`` returns as soon as the work is queued on the device; use an event to wait until it is
    # complete.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # By default the watchdog rethrows a CUDA error from its thread, which kills the process with
    # SIGABRT before Python has reported the error.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # After an error on a peer, the watchdog sleeps for four times this timeout (15 s by default).
    # It holds a lock that every new collective takes, so an abort would have to wait for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # NVLink SHARP keeps state outside the communicator, and an abort does not free that state.
    # NVIDIA's in-process restart (nvidia-resiliency-ext) requires this setting for the same reason.
    "NCCL_NVLS_ENABLE": "0",
}
"""These override the user's environment, because with other values, losing a peer would kill or
block the surviving ranks. Source: ``ProcessGroupNCCL.hpp`` of torch 2.13."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Description of a rank's device, for the coordinator."""

    name: str
    """``cpu`` or ``cuda:0``."""
    gpu: str
    """UUID of the GPU; empty if NCCL is not available. Two ranks with the same UUID share a GPU,
    which NCCL does not allow."""
    memory_bytes: int
    """The GPU's memory; 0 if there is no GPU."""


def choose_device() -> torch.device:
    """Return this worker's GPU, the only one visible to it; the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    os.environ.update(_NCCL_ENVIRONMENT)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def facts_of(device: torch.device) -> DeviceFacts:
    """Return the description of a device."""
    if device.type != "cuda":
        return DeviceFacts(name=str(device), gpu="", memory_bytes=0)
    properties = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}" if dist.is_nccl_available() else ""
    return DeviceFacts(name=str(device), gpu=uuid, memory_bytes=properties.total_memory)


def compute_deterministically(device: torch.device) -> None:
    """Make torch's kernels deterministic, for the rest of this process.

    On a CPU, torch is limited to one thread, because a kernel splits a sum into as many parts as
    there are threads. An operation without a deterministic kernel raises an error, in which torch
    names the operation. The result still depends on the hardware: different CPUs or GPUs may use
    different kernels, so equal digests are guaranteed only for machines of the same type.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)
    # cuBLAS reads this when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor takes time, and matters only to code that reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
