"""Exchange of tensors between pairs of ranks, all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from etrain_jupyter.rules.optimizer_shards import Move, Range
from etrain_jupyter.trainer.group.process_group import Pending, RankGroup
from etrain_jupyter.trainer.state.transfer_plan import Buffers, bytes_of, plan_messages

_FIRST_TAG = 1 << 21
"""Tags of the messages; other exchanges use lower ones."""


class _Stream:
    """The tensors that go to one rank, or come from it, as messages."""

    def __init__(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        self.peer = peer
        memory: list[torch.Tensor | None] = [bytes_of(tensor) for tensor in tensors]
        self.messages = plan_messages([tensor.nbytes for tensor in tensors])
        # Large tensors need no buffer; all messages of small ones are in flight at once.
        self._buffers = Buffers(memory, len(self.messages))
        self.chunks = [
            self._buffers.chunk_of(message, number) for number, message in enumerate(self.messages)
        ]

    def fill(self, number: int) -> torch.Tensor:
        self._buffers.fill(self.chunks[number], self.messages[number])
        return self.chunks[number]

    def empty(self, number: int) -> None:
        self._buffers.empty(self.chunks[number], self.messages[number])


class RangeExchange:
    """Sends and receives the same tensors whenever it is started.

    Both ranks of a pair must list their tensors in the same order, with the same sizes.

    Args:
        group: The generation's process group.
        sends: Contiguous tensors to send, by the rank that receives them.
        receives: Contiguous tensors to overwrite, by the rank that sends them.
    """

    def __init__(
        self,
        group: RankGroup,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        self._group = group
        self._sends = [_Stream(peer, tensors) for peer, tensors in sends.items()]
        self._receives = [_Stream(peer, tensors) for peer, tensors in receives.items()]

    def start(self) -> Pending:
        """Start the exchange in the group's exchange thread. Every rank must start it.

        Raises:
            CommunicationError: If the generation has failed.
        """
        return self._group.start(self._run)

    def _run(self) -> None:
        group = self._group
        arriving: list[tuple[Any, _Stream, int]] = []
        leaving: list[Any] = []
        for stream in self._receives:
            for number, chunk in enumerate(stream.chunks):
                work = group.irecv(chunk, stream.peer, _FIRST_TAG + number)
                arriving.append((work, stream, number))
        for stream in self._sends:
            for number in range(len(stream.messages)):
                work = group.isend(stream.fill(number), stream.peer, _FIRST_TAG + number)
                leaving.append(work)
        for work, stream, number in arriving:
            work.wait()
            # An abandoned exchange must not write into tensors that the next generation uses.
            group.raise_if_failed()
            stream.empty(number)
            group.beat()
        for work in leaving:
            work.wait()
            group.beat()


def exchange_moves(
    group: RankGroup,
    moves: Sequence[Move],
    read: Callable[[Range], list[torch.Tensor]],
    slots: Callable[[Range], list[torch.Tensor]],
) -> None:
    """Move ranges between the ranks.

    Args:
        group: The generation's process group.
        moves: All moves, in the same order on all ranks.
        read: Returns the tensors of a range that this rank sends.
        slots: Returns the memory for a range that this rank receives, in the same order.

    Raises:
        CommunicationError: A peer is lost.
    """
    sends: dict[int, list[torch.Tensor]] = {}
    receives: dict[int, list[torch.Tensor]] = {}
    for move in moves:
        if move.source == group.rank:
            sends.setdefault(move.target, []).extend(read(move.span))
        if move.target == group.rank:
            receives.setdefault(move.source, []).extend(slots(move.span))
    RangeExchange(group, sends, receives).start().wait()
