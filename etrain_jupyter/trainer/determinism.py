"""The settings of torch under which the same inputs give the same bits."""

from __future__ import annotations

import os

import torch


def compute_deterministically(device: torch.device) -> None:
    """Make torch's kernels give equal results for equal inputs, in this process, for good.

    One thread on a CPU, because a sum inside a kernel is cut into as many pieces as there are
    threads. An operation that has no deterministic kernel raises, and torch's message names it.
    What remains is the hardware: machines whose processors (or GPUs) differ may choose different
    kernels, so that equal digests are promised for machines of one type.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)
    # cuBLAS reads it when it is used for the first time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Every fresh tensor would be filled: that costs time and helps only who reads uninitialised
    # memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
