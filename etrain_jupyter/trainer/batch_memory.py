"""Memory of batches: pinned host memory, and copies to the device that do not block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def uses_pinned_memory(device: torch.device) -> bool:
    """Return True if copies to a device overlap with its computation only from pinned memory."""
    return device.type == "cuda"


def pin(batch: Any) -> Any:
    """Return a nested batch whose dense tensors are in pinned host memory."""
    return _map_tensors(batch, _pinned)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a nested batch to a device, without waiting for the copies."""
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return tensor.pin_memory() if is_dense else tensor


def _map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        mapped = [_map_tensors(value, function) for value in batch]
        is_named = hasattr(batch, "_fields")  # its constructor takes the elements as arguments
        return type(batch)(*mapped) if is_named else type(batch)(mapped)
    return batch
