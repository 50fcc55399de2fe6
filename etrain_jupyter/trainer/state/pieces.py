"""Copy large tensors piece by piece, so that the main thread can send heartbeats."""

from __future__ import annotations

from collections.abc import Callable

import torch

PIECE_BYTES = 64 << 20
"""Bytes between two heartbeats: about 0.1 s for newly allocated memory, which is slow."""


def copy_in_pieces(
    target: torch.Tensor,
    source: torch.Tensor,
    beat: Callable[[], None],
    *,
    non_blocking: bool = False,
) -> None:
    """Copy ``source`` into ``target``, of the same shape, with a heartbeat after each piece."""
    if source.nbytes <= PIECE_BYTES:
        target.copy_(source, non_blocking=non_blocking)
        beat()
        return
    # Split along the longest dimension, which allows the most pieces. Slices work with any memory
    # layout, whereas a flat view would need contiguous tensors.
    longest = max(range(source.dim()), key=lambda dim: source.shape[dim])
    count = min(source.shape[longest], -(-source.nbytes // PIECE_BYTES))
    pairs = zip(target.chunk(count, longest), source.chunk(count, longest), strict=True)
    for there, here in pairs:
        there.copy_(here, non_blocking=non_blocking)
        beat()
