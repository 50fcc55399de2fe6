"""Ranks that exchange messages in memory, each in a thread of its own."""

from __future__ import annotations

import queue
from typing import Any

import torch


class Mail:
    """Messages by sender, receiver and tag; sending the same one twice is an error."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], queue.Queue] = {}
        self.num_messages = self.num_bytes = 0

    def box(self, src: int, dst: int, tag: int) -> queue.Queue:
        # Not a defaultdict: two threads must get the same queue at the same time.
        return self.boxes.setdefault((src, dst, tag), queue.Queue())


class Done:
    def wait(self) -> None:
        """Return at once."""


class Arriving:
    def __init__(self, box: queue.Queue, tensor: torch.Tensor) -> None:
        self.box, self.tensor = box, tensor

    def wait(self) -> None:
        self.tensor.copy_(self.box.get(timeout=30))


class MemoryPeers:
    """One rank's end."""

    def __init__(self, mail: Mail, rank: int, world_size: int) -> None:
        self.mail, self.rank, self.world_size = mail, rank, world_size
        self.failure: Exception | None = None

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        assert tensor.numel()
        assert tensor.is_contiguous()
        self.mail.box(self.rank, dst, tag).put(tensor.clone())
        self.mail.num_messages += 1
        self.mail.num_bytes += tensor.numel() * tensor.element_size()
        return Done()

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        assert tensor.numel()
        assert tensor.is_contiguous()
        return Arriving(self.mail.box(src, self.rank, tag), tensor)
