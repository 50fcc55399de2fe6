"""Deterministic settings of torch."""

from __future__ import annotations

import os

import torch


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
