"""Messages between two ranks of a generation."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Peers(Protocol):
    """The part of the process group that sends messages, see ``process_group.RankGroup``."""

    rank: int
    world_size: int

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        """Start sending a contiguous CPU tensor; return an object with ``wait``."""
        ...

    def raise_if_failed(self) -> None:
        """Raise if the generation has failed, so that its tensors may belong to the next one."""
        ...

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        """Start receiving into a contiguous CPU tensor; return an object with ``wait``."""
        ...
