"""Divide a machine into slots: one per GPU, or CPU slots if it has no GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etrain_jupyter.process.processes import num_usable_cores


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Capacity for one worker process."""

    index: int
    device: str = "cpu"
    """Torch device of the worker. Each worker sees at most one GPU, as ``cuda:0``."""
    type: str = "CPU slot"
    """Description for tables: ``CPU slot`` or the name of the GPU."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the worker and its trainers."""


def make_slots(
    gpus: Sequence[tuple[str, str]], *, max_cpu_slots: int, workers_per_gpu: int = 1
) -> list[Slot]:
    """Return ``workers_per_gpu`` slots for each GPU, or CPU slots if there is no GPU.

    Args:
        gpus: Identifier and name of each GPU.
        max_cpu_slots: Number of slots without GPUs. An empty slot uses no resources.
        workers_per_gpu: Slots on each GPU. Workers share a GPU only if they outnumber the GPUs,
            because the first slots are on different GPUs.
    """
    if gpus:
        num_slots = len(gpus) * workers_per_gpu
        threads = str(max(1, num_usable_cores() // num_slots))
        return [
            Slot(
                index=index,
                device="cuda:0",
                type=name if workers_per_gpu == 1 else f"{name}, shared",
                environment={
                    "CUDA_VISIBLE_DEVICES": uuid,
                    # By default torch starts one thread per core in every process. With eight
                    # trainers on one machine, that is eight threads per core.
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
                },
            )
            # Cycle through the GPUs: A B A B, not A A B B.
            for index, (uuid, name) in enumerate(list(gpus) * workers_per_gpu)
        ]
    # CPU slots share the cores. By default, torch uses one thread per core, so they would compete.
    single_threaded = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return [Slot(index=i, environment=single_threaded) for i in range(max_cpu_slots)]
