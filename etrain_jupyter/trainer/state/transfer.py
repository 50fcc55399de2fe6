"""How the state travels to the ranks that are behind: along a chain, chunk by chunk.

Rank 0 sends to the first rank that is behind, this one to the next, and each passes a chunk on
while it receives the following ones: ``k`` newcomers cost about as much time as one. Nobody else
takes part. The bytes go out of the sender's tensors and into the receiver's without a copy where
both are in host memory; small tensors, and those of a GPU, go through a few buffers that are used
in turn.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.micro_batch import memory_of
from etrain_jupyter.trainer.state.capture import BUFFER, living_tensors, own_tensors
from etrain_jupyter.trainer.state.packing import StateError, Tensors

CHUNK_BYTES = 4 << 20
"""Most bytes of a message."""
DIRECT_BYTES = 256 << 10
"""A tensor of at least this size is a message of its own, or several."""
WINDOW = 3
"""Messages that are under way to the next rank, or expected from the one before."""

HOST_SHARE = 0.5
"""Part of the free host memory that a state may wait in: other ranks of the machine need some."""

_LENGTH_TAG, _HEADER_TAG, _FIRST_TAG = range(1 << 20, (1 << 20) + 3)


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """What one transfer moved, as this rank saw it."""

    num_bytes: int
    duration_s: float

    def __str__(self) -> str:
        megabytes = self.num_bytes / 1e6
        speed = megabytes / max(self.duration_s, 1e-9)
        return f"{megabytes:.1f} MB in {self.duration_s:.2f} s, {speed:.0f} MB/s"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of the state, as the header describes it."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    stride: list[int]
    """The order of the elements in the sender's memory, which is the order that they come in."""
    same_as: str
    """The name of an earlier tensor that is the very same memory (tied weights); mostly empty."""

    @property
    def num_bytes(self) -> int:
        """How many bytes of it travel."""
        return 0 if self.same_as else self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True)
class TensorChunk:
    """Some bytes of one tensor, within a message."""

    index: int
    """Which tensor."""
    start: int
    stop: int


Message = list[TensorChunk]


def plan_messages(sizes: Sequence[int]) -> list[Message]:
    """Cut tensors of these sizes, in bytes, into messages: large ones alone, small ones together.

    Sender and receivers plan from the same sizes, and so agree without a word.
    """
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


# --- the sender ---


def send_state(
    group: RankGroup, header: dict[str, Any], tensors: Tensors, behind: Sequence[int]
) -> Transferred:
    """Rank 0's part: start the chain through the ranks that are ``behind``.

    Raises:
        CommunicationError: If the chain broke. The state is as it was.
    """
    started = time.perf_counter()
    entries, memory = describe(tensors)
    layout = [[e.name, _name_of(e.dtype), e.shape, e.stride, e.same_as] for e in entries]
    text = json.dumps({"header": header, "layout": layout, "behind": list(behind)}).encode()
    messages = plan_messages([e.num_bytes for e in entries])

    def work() -> None:
        head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        under_way = deque([group.isend(torch.tensor([len(text)]), behind[0], _LENGTH_TAG)])
        under_way.append(group.isend(head, behind[0], _HEADER_TAG))
        buffers = _Buffers(memory, WINDOW)
        for number, message in enumerate(messages):
            if len(under_way) >= WINDOW:
                under_way.popleft().wait()
            chunk = buffers.chunk_of(message, number)
            buffers.fill(chunk, message)
            under_way.append(group.isend(chunk, behind[0], _FIRST_TAG + number))
            group.beat()
        for sending in under_way:
            sending.wait()

    group.start(work, is_counted=False).wait()
    num_bytes = sum(e.num_bytes for e in entries)
    return Transferred(num_bytes=num_bytes, duration_s=time.perf_counter() - started)


def describe(tensors: Tensors) -> tuple[list[Entry], list[torch.Tensor | None]]:
    """Return what the header says of each tensor, and its bytes in the order of its memory."""
    entries: list[Entry] = []
    memory: list[torch.Tensor | None] = []
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
        key = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        same_as = seen.setdefault(key, name) if value.numel() else name
        if not _is_dense(value):
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
        memory.append(_bytes_of(value) if same_as == name else None)
    return entries, memory


# --- the receivers ---


def receive_state(
    group: RankGroup,
    model: nn.Module,
    behind: Sequence[int],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    keep: bool = False,
    on_overwrite: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], Tensors, Transferred]:
    """Receive into this rank's own tensors, and into new ones where it has none; pass all on.

    So the device never holds two states. What has to be kept meanwhile stays on the device, and the
    newer state waits in host memory, if there is room, until all of it is here.

    Args:
        group: The generation's.
        model: The notebook's.
        behind: The ranks of the chain.
        optimizer: The one of ``model``; its tensors are overwritten, too.
        keep: Receive into host memory, so that a chain that breaks leaves the state that this rank
            has: it is a step behind, and may be the newest that is left.
        on_overwrite: Called before the first of this rank's own tensors changes: it has no state
            from then on until ``put_state`` is done.

    Returns:
        The header and the tensors for ``put_state``. This rank's own are overwritten already.

    Raises:
        CommunicationError: If the chain broke.
        StateError: If rank 0's model is not like this one.
    """
    place = list(behind).index(group.rank)
    before = behind[place - 1] if place else 0
    after = behind[place + 1] if place + 1 < len(behind) else None
    started = time.perf_counter()
    told = _receive_header(group, before, after)
    entries = [
        Entry(name=n, dtype=getattr(torch, d), shape=shape, stride=stride, same_as=same)
        for n, d, shape, stride, same in told["layout"]
    ]
    host = frozenset(told["header"].get("host", ()))
    num_bytes = sum(e.num_bytes for e in entries)
    is_staged = keep and num_bytes <= HOST_SHARE * memory_of(torch.device("cpu")).free
    slots = _Slots(entries, model, optimizer, host, is_staged=is_staged)
    if not is_staged:
        on_overwrite()
    messages = plan_messages([e.num_bytes for e in entries])
    group.start(
        lambda: _relay(group, messages, slots.memory, before, after), is_counted=False
    ).wait()
    if is_staged:
        on_overwrite()
    tensors = slots.finish()
    moved = Transferred(num_bytes=num_bytes, duration_s=time.perf_counter() - started)
    return told["header"], tensors, moved


def _receive_header(group: RankGroup, before: int, after: int | None) -> Any:
    box = []

    def work() -> None:
        length = torch.zeros(1, dtype=torch.int64)
        group.irecv(length, before, _LENGTH_TAG).wait()
        text = torch.empty(int(length), dtype=torch.uint8)
        group.irecv(text, before, _HEADER_TAG).wait()
        if after is not None:
            passing = group.isend(length, after, _LENGTH_TAG)
            group.isend(text, after, _HEADER_TAG).wait()
            passing.wait()
        box.append(json.loads(text.numpy().tobytes()))

    group.start(work, is_counted=False).wait()
    return box[0]


def _relay(
    group: RankGroup,
    messages: list[Message],
    memory: list[torch.Tensor | None],
    before: int,
    after: int | None,
) -> None:
    """Receive all messages in order, and pass each on while the following ones arrive."""
    # Twice as many: a buffer is filled anew while those that came after it are being passed on.
    buffers = _Buffers(memory, 2 * WINDOW)
    arriving: deque[tuple[Any, torch.Tensor]] = deque()
    passing: deque[Any] = deque()

    def expect(number: int) -> None:
        if number < len(messages):
            chunk = buffers.chunk_of(messages[number], number)
            arriving.append((group.irecv(chunk, before, _FIRST_TAG + number), chunk))

    for number in range(WINDOW):
        expect(number)
    for number, message in enumerate(messages):
        work, chunk = arriving.popleft()
        work.wait()
        if after is not None:
            passing.append(group.isend(chunk, after, _FIRST_TAG + number))
            if len(passing) > WINDOW:
                passing.popleft().wait()
        buffers.empty(chunk, message)
        group.beat()
        expect(number + WINDOW)
    for work in passing:
        work.wait()


class _Slots:
    """Where each tensor of the state goes on a receiver."""

    def __init__(
        self,
        entries: list[Entry],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        host: frozenset[str],
        *,
        is_staged: bool,
    ) -> None:
        self._entries = entries
        self._is_staged = is_staged
        self._living = living_tensors(model)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._own = dict(self._living)
        if optimizer is not None:
            self._own = self._writable(entries, own_tensors(model, optimizer), host, device)
        self._received: Tensors = {}
        self.memory: list[torch.Tensor | None] = []
        """The bytes of each tensor, to be written; None if they do not travel."""
        for entry in entries:
            if entry.same_as:
                self.memory.append(None)
                continue
            at = torch.device("cpu") if entry.name in host else device
            tensor = self._slot_of(entry, at)
            self._received[entry.name] = tensor
            self.memory.append(_bytes_of(tensor))

    def _writable(
        self, entries: list[Entry], own: Tensors, host: frozenset[str], device: torch.device
    ) -> Tensors:
        """Return the model's tensors, and those of the optimizer that are as rank 0 has them."""
        writable = dict(self._living)
        taken = {tensor.data_ptr() for tensor in writable.values()}
        for entry in entries:
            tensor = own.get(entry.name)
            if tensor is None or entry.name in writable or tensor.data_ptr() in taken:
                continue
            at = torch.device("cpu") if entry.name in host else device
            if tensor.device == at and _is_alike(entry, tensor):
                writable[entry.name] = tensor
                taken.add(tensor.data_ptr())
        return writable

    def _slot_of(self, entry: Entry, device: torch.device) -> torch.Tensor:
        living = self._living.get(entry.name)
        if living is not None:
            self._check(entry, living)
        own = self._own.get(entry.name)
        if self._is_staged:
            return new_tensor(entry, torch.device("cpu"))
        if own is not None and _is_alike(entry, own):
            return own.detach()
        return new_tensor(entry, device)

    @staticmethod
    def _check(entry: Entry, living: torch.Tensor) -> None:
        mine = (living.dtype, list(living.shape))
        if mine != (entry.dtype, entry.shape) and not entry.name.startswith(BUFFER):
            raise StateError(
                f"{entry.name} has the type and shape {mine} on this rank, and "
                f"{(entry.dtype, entry.shape)} on rank 0. Let the notebook build the same model "
                "whatever the machine."
            )

    @torch.no_grad()
    def finish(self) -> Tensors:
        """Return all tensors, the model's own where it has one."""
        tensors: Tensors = {}
        for entry in self._entries:
            value = self._received[entry.same_as or entry.name]
            own = self._own.get(entry.name)
            is_own = own is not None and list(own.shape) == entry.shape
            if own is not None and is_own and own.data_ptr() != value.data_ptr():
                own.copy_(value)
            tensors[entry.name] = own if own is not None and is_own else value
        return tensors


def new_tensor(entry: Entry, device: torch.device) -> torch.Tensor:
    """Allocate the memory of a tensor that this rank has not got."""
    return torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device=device)


def _is_alike(entry: Entry, tensor: torch.Tensor) -> bool:
    """Whether the entry's bytes can be written into this tensor's memory."""
    mine = (tensor.dtype, list(tensor.shape), list(tensor.stride()))
    return mine == (entry.dtype, entry.shape, entry.stride) and _is_dense(tensor)


# --- bytes ---


class _Buffers:
    """Turns messages into contiguous chunks of host memory, and back."""

    def __init__(self, memory: list[torch.Tensor | None], count: int) -> None:
        self._memory = memory
        self._count = count
        self._pool: dict[int, torch.Tensor] = {}

    def chunk_of(self, message: Message, number: int) -> torch.Tensor:
        """Return what is sent or received: the tensor's own memory, or one of the buffers."""
        return self._own(message) if self._is_direct(message) else self._buffer(message, number)

    def fill(self, chunk: torch.Tensor, message: Message) -> None:
        """Copy a message's bytes into its chunk, unless it is their own memory."""
        if not self._is_direct(message):
            for part, own in self._parts(chunk, message):
                part.copy_(own, non_blocking=True)
            self._settle(message)

    def empty(self, chunk: torch.Tensor, message: Message) -> None:
        """Copy a chunk to where its bytes belong, unless they are there."""
        if not self._is_direct(message):
            for part, own in self._parts(chunk, message):
                own.copy_(part, non_blocking=True)
            self._settle(message)

    def _is_direct(self, message: Message) -> bool:
        return len(message) == 1 and not self._tensor(message[0]).is_cuda

    def _tensor(self, piece: TensorChunk) -> torch.Tensor:
        tensor = self._memory[piece.index]
        assert tensor is not None  # only what travels is planned
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
        if any(self._tensor(piece).is_cuda for piece in message):
            torch.cuda.current_stream().synchronize()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((s, n) for s, n in dims if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's own memory as a flat tensor of bytes."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
