"""Messages of a state transfer: how tensors are split into chunks and packed together.

Both sides have the layout of the state, so the chunks need no headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from etrain_jupyter.trainer.state.packing import Tensors

CHUNK_BYTES = 4 << 20
"""Maximum size of a message in bytes."""
DIRECT_BYTES = 256 << 10
"""A tensor of at least this size has its own messages; smaller ones share messages."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Description of one of the state's tensors in the header."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    stride: list[int]
    """Strides in the sender's memory. Elements are sent in memory order."""
    same_as: str
    """Name of an earlier tensor with the same memory (tied weights); usually empty."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are sent."""
        return 0 if self.same_as else self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True)
class TensorChunk:
    """A range of bytes of one tensor, within a message."""

    index: int
    """Index of the tensor."""
    start: int
    stop: int


Message = list[TensorChunk]


def plan_messages(sizes: Sequence[int]) -> list[Message]:
    """Split tensors, given by their sizes in bytes, into messages."""
    # First large tensors, in chunks that need no copy in host memory. Then small tensors, packed
    # together because each message adds latency:
    #
    #     sizes      9 MB, 1 KB, 2 KB
    #     messages   [0: 0-4 MB] [0: 4-8 MB] [0: 8-9 MB] [1, 2]
    messages: list[Message] = []
    for index, size in enumerate(sizes):
        if size >= DIRECT_BYTES:
            for start in range(0, size, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, size)
                messages.append([TensorChunk(index=index, start=start, stop=stop)])
    pack: Message = []
    filled = 0
    for index, size in enumerate(sizes):
        if 0 < size < DIRECT_BYTES:
            if filled + size > CHUNK_BYTES:
                messages.append(pack)
                pack, filled = [], 0
            pack.append(TensorChunk(index=index, start=0, stop=size))
            filled += size
    return [*messages, pack] if pack else messages


def describe(tensors: Tensors) -> tuple[list[Entry], list[torch.Tensor | None]]:
    """Return the description and the memory (None for tied weights) of each tensor."""
    entries: list[Entry] = []
    memory: list[torch.Tensor | None] = []
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
        # Tied weights are sent once. Empty tensors all have the same address (0), and are not tied.
        key = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        same_as = seen.setdefault(key, name) if value.numel() else name
        # For example, the bytes of a slice of a larger tensor are not contiguous in memory.
        if not is_dense(value):
            value = value.contiguous().clone()
        entries.append(
            Entry(
                name=name,
                dtype=value.dtype,
                shape=list(value.shape),
                stride=list(value.stride()),
                same_as="" if same_as == name else same_as,
            )
        )
        memory.append(bytes_of(value) if same_as == name else None)
    return entries, memory


class Buffers:
    """Convert messages to contiguous chunks of host memory, and back.

    Args:
        memory: Memory of each tensor as bytes; None if it is not sent.
        count: Number of buffers, used in turn.
    """

    def __init__(self, memory: list[torch.Tensor | None], count: int) -> None:
        self._memory = memory
        self._count = count
        self._pool: dict[int, torch.Tensor] = {}

    def chunk_of(self, message: Message, number: int) -> torch.Tensor:
        """Return the memory to send from or receive into: the tensor's own, or a buffer."""
        return self._own(message) if self._is_direct(message) else self._buffer(message, number)

    def fill(self, chunk: torch.Tensor, message: Message) -> None:
        """Copy a message's tensors into its chunk, unless it is their own memory."""
        if not self._is_direct(message):
            for part, own in self._parts(chunk, message):
                part.copy_(own, non_blocking=True)
            self._settle(message)

    def empty(self, chunk: torch.Tensor, message: Message) -> None:
        """Copy a chunk into the tensors of its message, unless it is their own memory."""
        if not self._is_direct(message):
            for part, own in self._parts(chunk, message):
                own.copy_(part, non_blocking=True)
            self._settle(message)

    def _is_direct(self, message: Message) -> bool:
        # gloo sends from and receives into host memory.
        return len(message) == 1 and not self._tensor(message[0]).is_cuda

    def _tensor(self, piece: TensorChunk) -> torch.Tensor:
        tensor = self._memory[piece.index]
        assert tensor is not None  # only tensors that are sent are planned
        return tensor

    def _own(self, message: Message) -> torch.Tensor:
        return self._tensor(message[0])[message[0].start : message[0].stop]

    def _buffer(self, message: Message, number: int) -> torch.Tensor:
        slot = number % self._count
        if slot not in self._pool:
            pin = torch.cuda.is_available()
            self._pool[slot] = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pin)
        return self._pool[slot][: sum(p.stop - p.start for p in message)]

    def _parts(
        self, chunk: torch.Tensor, message: Message
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = 0
        for piece in message:
            size = piece.stop - piece.start
            yield chunk[at : at + size], self._tensor(piece)[piece.start : piece.stop]
            at += size

    def _settle(self, message: Message) -> None:
        # The copies are queued on the device; they must finish before gloo sends or a buffer is
        # refilled.
        if any(self._tensor(piece).is_cuda for piece in message):
            torch.cuda.current_stream().synchronize()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill one block of memory, in any order."""
    # The bytes of a lazy conjugate or negative view represent a different value.
    if tensor.is_conj() or tensor.is_neg():
        return False
    # In stride order, each dimension must continue where the previous one ends.
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((s, n) for s, n in dims if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as a flat uint8 tensor, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a type without ``torch.``."""
    return str(dtype).removeprefix("torch.")
