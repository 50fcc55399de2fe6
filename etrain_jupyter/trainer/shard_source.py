"""Batches of a data set in shards, read by threads of this process.

::

    main thread      requests, two shares ahead ─────────── transform, collate ── step
    "etrain-batches" starts to read their blocks, gathers the rows of the next batches
    "etrain-shards"  read and decode blocks
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, default_collate

from etrain_jupyter.data.batch_key import fetching
from etrain_jupyter.data.columns import Column
from etrain_jupyter.data.shards import Shards, Warn
from etrain_jupyter.rules.samples.block_order import BlockLayout
from etrain_jupyter.trainer.prefetch import Ahead, pin
from etrain_jupyter.trainer.row_sets import tensors_of
from etrain_jupyter.trainer.seeds import BatchSeeds, seeded

_NUM_AHEAD = 2
"""Number of batches whose blocks are read ahead."""
_SEQUENTIAL_BLOCKS = 4
"""Number of blocks to keep in memory if a set is read in the order of its files, as in an
evaluation."""

Samples = Sequence[int] | NDArray[np.int64]


class ShardSource:
    """Source of batches from ``Shards``.

    Args:
        shards: The data set.
        collate: Joins a list of samples into a batch; None for columns as tensors, or for torch's
            ``default_collate`` if the set has a ``transform``.
        num_workers: Number of processes that transform and collate; this process reads the rows.
        is_sequential: True if the set is read in the order of its files.
        pins_memory: True to prepare batches in pinned memory, unless this thread collates them.
        warn: Receives a message if the disk cache cannot be used.

    Raises:
        ShardError: If the set is missing, incomplete or empty.
    """

    def __init__(
        self,
        shards: Shards,
        collate: Callable[[list[Any]], Any] | None,
        num_workers: int,
        *,
        is_sequential: bool,
        pins_memory: bool = False,
        warn: Warn,
    ) -> None:
        self._shards = shards
        num_kept = min(_SEQUENTIAL_BLOCKS, shards.layout.window) if is_sequential else None
        self._reader = shards.open(num_kept=num_kept, warn=warn)
        self._convert = _Converter(shards, collate)
        self._pins_memory = pins_memory
        self._shares = _Shares()
        self._ahead = Ahead()
        # Only per-sample work is worth a loader process; otherwise, rows would cross two processes
        # for nothing.
        self._loader = (
            self._start_loader(num_workers) if num_workers and self._convert.is_by_sample else None
        )

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def layout(self) -> BlockLayout:
        """Blocks of the set, which determine the order of its samples."""
        return self._shards.layout

    @property
    def digest(self) -> str:
        """Digest of the content, hexadecimal."""
        return self._shards.digest

    def batches(
        self, shares: Iterable[tuple[Samples, *tuple[int, ...]]]
    ) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """Yield the samples and the batch of each share; reads ahead."""
        requests = _requests(shares)
        if not self._convert.is_by_sample:
            yield from self._ahead.map(self._prepare, requests)
            return
        # Only this thread, or a loader process, runs code of the notebook.
        fetched = self._ahead.map(self._fetch, requests)
        if self._loader is not None:
            self._shares.feed = fetched
            yield from self._loader
            return
        for samples, columns, seeds in fetched:
            yield samples, self._convert.batch_of(samples, columns, seeds)

    def close(self) -> None:
        """Stop the threads and the loader processes."""
        self._loader = None  # the destructor of its iterator stops them
        self._ahead.close()  # before the reader, which its thread uses
        self._reader.close()

    def _prepare(self, request: _Request) -> tuple[NDArray[np.int64], Any]:
        samples, columns, _ = self._fetch(request)
        batch = self._convert.tensors_of(columns)
        return samples, pin(batch) if self._pins_memory else batch

    def _fetch(self, request: _Request) -> _Fetched:
        for samples in request.upcoming:
            self._reader.prefetch(samples)
        return request.samples, self._reader.take(request.samples), request.seeds

    def _start_loader(self, num_workers: int) -> DataLoader[Any]:
        # Spawned, not forked, because the trainer has threads, and possibly a CUDA context.
        return DataLoader(
            cast("Dataset[Any]", self._convert),
            batch_sampler=cast("Any", self._shares),  # passes the columns on unchanged
            num_workers=num_workers,
            collate_fn=_unchanged,  # the converter has already collated
            # Without its own generator the loader would draw from the model's.
            generator=torch.Generator(),
            persistent_workers=True,
            pin_memory=self._pins_memory,
            multiprocessing_context="spawn",
        )


class _Request(NamedTuple):
    samples: NDArray[np.int64]
    """Rows to gather."""
    seeds: BatchSeeds
    upcoming: list[NDArray[np.int64]]
    """Rows of later batches, whose blocks are read in the meantime."""


def _requests(shares: Iterable[tuple[Samples, *tuple[int, ...]]]) -> Iterator[_Request]:
    # Each share is taken from the stream before the previous ones are gathered.
    ahead: deque[tuple[NDArray[np.int64], BatchSeeds]] = deque()
    upcoming: list[NDArray[np.int64]] = []
    for indices, *seeds in shares:
        samples = np.asarray(indices, dtype=np.int64)
        upcoming.append(samples)
        ahead.append((samples, BatchSeeds(*seeds)))
        if len(ahead) > _NUM_AHEAD:
            yield _Request(*ahead.popleft(), upcoming)
            upcoming = []
    while ahead:
        yield _Request(*ahead.popleft(), upcoming)
        upcoming = []


_Fetched = tuple[NDArray[np.int64], dict[str, Column], BatchSeeds]
"""Samples, their columns, and the seeds of the process that converts them."""


class _Shares:
    # The batch sampler of a loader that outlives a generation; see ``trainer.data``.
    def __init__(self) -> None:
        self.feed: Iterable[_Fetched] = ()

    def __iter__(self) -> Iterator[_Fetched]:
        return iter(self.feed)


class _Converter:
    # Turns rows into a batch, here or in a loader process.
    #
    # Pickled by value, because plain pickle would look for the notebook's functions in a module.
    def __init__(self, shards: Shards, collate: Callable[[list[Any]], Any] | None) -> None:
        self._shards = shards
        self._collate = collate
        self.is_by_sample = collate is not None or shards.transform is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_converter_from, (cloudpickle.dumps((self._shards, self._collate)),))

    def __getitems__(self, fetched: _Fetched) -> tuple[NDArray[np.int64], Any]:
        # torch's fetcher calls this method if it exists, with each item of the batch sampler.
        return fetched[0], self.batch_of(*fetched)

    def batch_of(
        self, numbers: NDArray[np.int64], columns: dict[str, Column], seeds: BatchSeeds
    ) -> Any:
        key = fetching(seed=seeds.job, epoch=seeds.epoch, samples=numbers.tolist())
        with seeded(seeds.fetch), key:
            samples = self._shards.samples_of(columns, len(numbers))
            return (self._collate or default_collate)(samples)

    def tensors_of(self, columns: dict[str, Column]) -> Any:
        tensors = tensors_of(columns)
        return tuple(tensors.values()) if self._shards.index.sample == "tuple" else tensors


def _converter_from(data: bytes) -> _Converter:
    return _Converter(*cloudpickle.loads(data))


def _unchanged(fetched: Any) -> Any:
    return fetched
