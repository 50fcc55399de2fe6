"""What the ranks of a generation talk through."""

from __future__ import annotations

from collections.abc import Sequence


def choose_backend(devices: Sequence[tuple[str, str]]) -> str:
    """Return ``nccl`` if every rank has a GPU of its own, else ``gloo``.

    NCCL refuses two ranks on one GPU, and knows no processors.

    Args:
        devices: Of each rank, the device as torch names it and the GPU's identifier, empty if that
            is unknown.

    >>> choose_backend([("cuda:0", "GPU-1f"), ("cuda:0", "GPU-2e")])
    'nccl'
    >>> choose_backend([("cuda:0", "GPU-1f"), ("cuda:0", "GPU-1f")])
    'gloo'
    """
    gpus = [gpu for device, gpu in devices if device.startswith("cuda") and gpu]
    return "nccl" if devices and len(gpus) == len(set(gpus)) == len(devices) else "gloo"
