"""Transfer the state to the ranks that are behind: along a chain, chunk by chunk.

::

    rank 0 -> first rank behind -> second rank behind -> ...

Each rank forwards a chunk while it receives the following ones, so a transfer to k new ranks takes
about as long as a transfer to one rank. The other ranks do not take part. Large tensors in host
memory are sent and received without a copy; small tensors and GPU tensors go through a few buffers
in turn.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.micro_batch import memory_of
from etrain_jupyter.trainer.state.capture import (
    BUFFER,
    NO_EXTRAS,
    Extras,
    living_tensors,
    own_tensors,
)
from etrain_jupyter.trainer.state.packing import StateError, Tensors
from etrain_jupyter.trainer.state.transfer_plan import (
    Buffers,
    Entry,
    Message,
    bytes_of,
    describe,
    is_dense,
    name_of,
    plan_messages,
)

WINDOW = 3
"""Maximum number of messages in flight to the next rank, or expected from the previous rank."""

HOST_SHARE = 0.5
"""Maximum fraction of free host memory for a staged state; other ranks need memory, too."""

_LENGTH_TAG, _HEADER_TAG, _FIRST_TAG = range(1 << 20, (1 << 20) + 3)


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """Size and duration of one transfer on this rank."""

    num_bytes: int
    duration_s: float

    def __str__(self) -> str:
        megabytes = self.num_bytes / 1e6
        speed = megabytes / max(self.duration_s, 1e-9)
        return f"{megabytes:.1f} MB in {self.duration_s:.2f} s, {speed:.0f} MB/s"


# --- sender ---


def send_state(
    group: RankGroup, header: dict[str, Any], tensors: Tensors, behind: Sequence[int]
) -> Transferred:
    """Send the state from rank 0 along the chain of the ranks in ``behind``.

    Raises:
        CommunicationError: If the chain breaks. The state is unchanged.
    """
    # Three kinds of messages, in order: the length of the header, the header with the layout of the
    # tensors, and the chunks. Both sides compute the same chunks from the layout.
    started = time.perf_counter()
    entries, memory = describe(tensors)
    layout = [[e.name, name_of(e.dtype), e.shape, e.stride, e.same_as] for e in entries]
    text = json.dumps({"header": header, "layout": layout, "behind": list(behind)}).encode()
    messages = plan_messages([e.num_bytes for e in entries])

    def work() -> None:
        head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        in_flight = deque([group.isend(torch.tensor([len(text)]), behind[0], _LENGTH_TAG)])
        in_flight.append(group.isend(head, behind[0], _HEADER_TAG))
        buffers = Buffers(memory, WINDOW)
        for number, message in enumerate(messages):
            # Reuse a buffer only once the message in it has been sent.
            if len(in_flight) >= WINDOW:
                in_flight.popleft().wait()
            chunk = buffers.chunk_of(message, number)
            buffers.fill(chunk, message)
            in_flight.append(group.isend(chunk, behind[0], _FIRST_TAG + number))
            group.beat()
        for sending in in_flight:
            sending.wait()

    # This is not counted as a collective here, because only some ranks take part. The trainer
    # counts it on all ranks.
    group.start(work, is_counted=False).wait()
    num_bytes = sum(e.num_bytes for e in entries)
    return Transferred(num_bytes=num_bytes, duration_s=time.perf_counter() - started)


# --- receivers ---


def receive_state(
    group: RankGroup,
    model: nn.Module,
    behind: Sequence[int],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    extras: Extras = NO_EXTRAS,
    keep: bool = False,
    on_overwrite: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], Tensors, Transferred]:
    """Receive the state into this rank's own tensors, and forward it to the next rank.

    Args:
        group: The process group of the generation.
        model: The model to receive into.
        behind: The ranks in the chain, in order.
        optimizer: The optimizer of ``model``; its tensors and those of ``extras`` are overwritten.
        extras: The other stateful components.
        keep: Stage the state in host memory, so that this rank keeps its own state if the chain
            breaks. That state is one step behind, but may be the newest one left.
        on_overwrite: Called before any of this rank's own tensors changes: from then until
            ``put_state`` returns, this rank has no state.

    Returns:
        The header and the tensors for ``put_state``; this rank's own tensors are overwritten.

    Raises:
        CommunicationError: If the chain breaks.
        StateError: If rank 0's model does not have the same tensors.
    """
    #                 memory                                     if the chain breaks
    # in place        this rank's own tensors; new ones only     this rank has no state
    #                 where it has none
    # staged (keep)   host memory, if there is room              this rank keeps its old state
    # In both cases, the device never holds two states.
    place = list(behind).index(group.rank)
    before = behind[place - 1] if place else 0
    after = behind[place + 1] if place + 1 < len(behind) else None
    started = time.perf_counter()
    received = _receive_header(group, before, after)
    entries = [
        Entry(name=n, dtype=getattr(torch, d), shape=shape, stride=stride, same_as=same)
        for n, d, shape, stride, same in received["layout"]
    ]
    host = frozenset(received["header"].get("host", ()))
    num_bytes = sum(entry.num_bytes for entry in entries)
    # If there is too little host memory, receive in place, which is better than not joining at all.
    is_staged = keep and num_bytes <= HOST_SHARE * memory_of(torch.device("cpu")).free
    slots = _Slots(entries, model, optimizer, extras, host, is_staged=is_staged)
    # From the first chunk on, this rank's tensors are a mix of two states.
    if not is_staged:
        on_overwrite()
    messages = plan_messages([e.num_bytes for e in entries])
    relay = partial(_relay, group, messages, slots.memory, before, after)
    group.start(relay, is_counted=False).wait()
    if is_staged:
        on_overwrite()
    tensors = slots.finish()
    moved = Transferred(num_bytes=num_bytes, duration_s=time.perf_counter() - started)
    return received["header"], tensors, moved


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
    """Receive all messages in order, and forward each while later ones arrive."""
    # Use twice as many buffers as messages in flight, because a buffer may still be forwarded while
    # later messages arrive.
    buffers = Buffers(memory, 2 * WINDOW)
    arriving: deque[tuple[Any, torch.Tensor]] = deque()
    passing: deque[Any] = deque()

    # WINDOW messages are in flight in each direction:
    #
    #     previous rank ── n+2  n+1 ──▶ this rank ── n  n-1  n-2 ──▶ next rank
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
    """Destination of each tensor of the state on a receiver."""

    def __init__(
        self,
        entries: list[Entry],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extras: Extras,
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
            own = own_tensors(model, optimizer, extras)
            self._own = self._writable(entries, own, host, device)
        self._received: Tensors = {}
        self.memory: list[torch.Tensor | None] = []
        """Memory into which each tensor is received; None for tied weights, which are not sent."""
        for entry in entries:
            # Tied weights: if this rank's model is not tied in the same way, ``finish`` copies.
            if entry.same_as:
                self.memory.append(None)
                continue
            at = torch.device("cpu") if entry.name in host else device
            tensor = self._slot_of(entry, at)
            self._received[entry.name] = tensor
            self.memory.append(bytes_of(tensor))

    def _writable(
        self, entries: list[Entry], own: Tensors, host: frozenset[str], device: torch.device
    ) -> Tensors:
        # An optimizer tensor is overwritten only if it matches rank 0's tensor: it must be on the
        # right device, have the same layout, and not share memory with another received entry (an
        # optimizer may keep a reference to a parameter).
        writable = dict(self._living)
        taken = {tensor.data_ptr() for tensor in writable.values()}
        for entry in entries:
            tensor = own.get(entry.name)
            if tensor is None or entry.name in writable or tensor.data_ptr() in taken:
                continue
            at = torch.device("cpu") if entry.name in host else device
            if tensor.device == at and _has_same_layout(entry, tensor):
                writable[entry.name] = tensor
                taken.add(tensor.data_ptr())
        return writable

    def _slot_of(self, entry: Entry, device: torch.device) -> torch.Tensor:
        # Check this before the first tensor arrives, because a mismatched model must be rejected
        # while this rank's own tensors are intact.
        living = self._living.get(entry.name)
        if living is not None:
            self._check(entry, living)
        own = self._own.get(entry.name)
        if self._is_staged:
            return new_tensor(entry, torch.device("cpu"))
        if own is not None and _has_same_layout(entry, own):
            return own.detach()
        return new_tensor(entry, device)

    @staticmethod
    def _check(entry: Entry, living: torch.Tensor) -> None:
        # A buffer that is not in the state_dict may be a cache that grows when it is used.
        mine = (living.dtype, list(living.shape))
        if mine != (entry.dtype, entry.shape) and not entry.name.startswith(BUFFER):
            raise StateError(
                f"{entry.name} has the type and shape {mine} on this rank, and "
                f"{(entry.dtype, entry.shape)} on rank 0. The notebook has to build the same "
                "model on every machine."
            )

    @torch.no_grad()
    def finish(self) -> Tensors:
        """Return all tensors, copied into this rank's own tensors where they exist."""
        # Most tensors were received in place. The others are copied now: staged tensors, and those
        # whose layout differs from rank 0's.
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
    """Allocate a tensor that this rank does not have."""
    return torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device=device)


def _has_same_layout(entry: Entry, tensor: torch.Tensor) -> bool:
    # If the layouts match, the entry's bytes can be received directly into the tensor's memory.
    mine = (tensor.dtype, list(tensor.shape), list(tensor.stride()))
    return mine == (entry.dtype, entry.shape, entry.stride) and is_dense(tensor)
