"""Exchange bytes and JSON between the ranks of a generation.

Everything is gathered with sums, which can be aborted: only one rank contributes to each byte, so
the sum is exact. A single rank exchanges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from etrain_jupyter.trainer.group.process_group import RankGroup

WINDOW_BYTES = 4 << 20
"""Size of the buffer in a rank's memory through which a stream passes."""


def gather_bytes(group: RankGroup, mine: Mapping[int, bytes], num_slots: int) -> list[bytes]:
    """Return the contents of every slot, on every rank; empty for a slot that no rank fills.

    Args:
        group: The generation's process group.
        mine: Contents of the slots that this rank fills; no other rank fills them.
        num_slots: Number of slots on all ranks together.

    Raises:
        CommunicationError: A peer is lost.
    """
    #     lengths   rank 0: [5, 0, 0]     rank 1: [0, 3, 4]     sum: [5, 3, 4]
    #     bytes     rank 0: aaaaa.......  rank 1: .....bbbcccc  sum: aaaaabbbcccc
    if group.world_size == 1 or not num_slots:
        return [mine.get(slot, b"") for slot in range(num_slots)]
    lengths = torch.zeros(num_slots, dtype=torch.int64)
    for slot, data in mine.items():
        lengths[slot] = len(data)
    group.all_reduce(lengths).wait()
    stops = lengths.cumsum(0).tolist()
    everything = torch.zeros(stops[-1], dtype=torch.uint8)
    for slot, data in mine.items():
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everything[stops[slot] - len(data) : stops[slot]] = row
    group.all_reduce(everything).wait()
    whole = everything.numpy().tobytes()
    return [
        whole[stop - length : stop] for stop, length in zip(stops, lengths.tolist(), strict=True)
    ]


def gather_json(group: RankGroup, value: Any) -> list[Any]:
    """Return the JSON value of every rank, in rank order, on every rank.

    Raises:
        CommunicationError: A peer is lost.
    """
    if group.world_size == 1:
        return [value]
    rows = gather_bytes(group, {group.rank: json.dumps(value).encode()}, group.world_size)
    return [json.loads(row) for row in rows]


def stream(
    group: RankGroup,
    num_bytes: int,
    fill: Callable[[int, memoryview], None],
    take: Callable[[memoryview], None] | None,
) -> None:
    """Send bytes that the ranks hold in pieces to every rank that wants them, window by window.

    Args:
        group: The generation's process group.
        num_bytes: Number of bytes, the same on every rank.
        fill: Writes this rank's bytes into a window that starts at a position; other bytes stay
            zero.
        take: Receives the windows in order; None on a rank that does not want them.

    Raises:
        CommunicationError: A peer is lost.
    """
    for position in range(0, num_bytes, WINDOW_BYTES):
        window = torch.zeros(min(WINDOW_BYTES, num_bytes - position), dtype=torch.uint8)
        data = window.numpy().data
        fill(position, data)
        group.all_reduce(window).wait()
        group.beat()
        if take is not None:
            take(data)
