"""Read ranges of a checkpoint's parts, block by block, with a limit on memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from etrain_jupyter.storage.checkpoints.base import CheckpointStore
from etrain_jupyter.storage.checkpoints.manifest import Part

NUM_THREADS = 4
"""Maximum number of blocks that one process reads, and so has in memory, at the same time."""


class Overlap(NamedTuple):
    """Bytes of a block that belong to a range."""

    in_block: int
    """Offset in the block."""
    in_range: int
    """Offset in the range."""
    size: int


class PartBlocks:
    """The blocks of one part."""

    def __init__(self, store: CheckpointStore, part: Part) -> None:
        self.part = part
        self._store = store
        self._block_bytes = part.block_bytes or max(1, part.size)

    def find(self, first: int, stop: int) -> Iterator[tuple[int, Overlap]]:
        """Yield the number of each block that has bytes of a range, and which bytes.

        >>> part = Part(key="k", sha256="", size=9, block_bytes=4, blocks=("", "", ""))
        >>> [(number, *found) for number, found in PartBlocks(None, part).find(3, 9)]
        [(0, 3, 0, 1), (1, 0, 1, 4), (2, 0, 5, 1)]
        """
        size = self._block_bytes
        # An empty range may be in the middle of a block.
        for number in range(first // size, -(-stop // size)) if first < stop else ():
            at, end = max(first, number * size), min(stop, (number + 1) * size)
            yield number, Overlap(at - number * size, at - first, end - at)

    def read(self, number: int) -> bytes:
        """Return the verified bytes of a block. Safe to call from several threads.

        Raises:
            CheckpointError: If it is missing or corrupt.
        """
        return self._store.read_block(self.part, number)


def read_blocks(
    wanted: Iterable[tuple[PartBlocks, int]], take: Callable[[PartBlocks, int, bytes], None]
) -> Iterator[int]:
    """Read blocks in several threads; yield the size of each after it was taken.

    Args:
        wanted: Part and number of each block.
        take: Called with the bytes of each block, in any thread and order.

    Raises:
        CheckpointError: If a block is missing or corrupt.
    """

    def read(blocks: PartBlocks, number: int) -> int:
        data = blocks.read(number)
        take(blocks, number, data)
        return len(data)

    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="etrain-blocks") as pool:
        futures: list[Future[int]] = [pool.submit(read, *block) for block in wanted]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
