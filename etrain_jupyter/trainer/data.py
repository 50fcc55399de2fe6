"""Sample sources: fetch batches by sample index from the notebook's data sets."""

from __future__ import annotations

import contextlib
import itertools
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, default_collate

from etrain_jupyter.config.references import STREAM_HINT, is_stream, splits_of
from etrain_jupyter.config.source_map import with_article
from etrain_jupyter.data.batch_key import EVALUATION, fetching
from etrain_jupyter.data.kinds import is_frame
from etrain_jupyter.data.shards import Shards
from etrain_jupyter.rules.samples.block_order import BlockLayout
from etrain_jupyter.trainer.prefetch import Ahead, pin
from etrain_jupyter.trainer.references import DataError
from etrain_jupyter.trainer.row_sets import FrameRows, RowSet, row_set_of
from etrain_jupyter.trainer.seeds import seed_of, seeded

Indices = Sequence[int] | NDArray[np.int64]


class Share(NamedTuple):
    """The samples of one batch."""

    indices: Indices
    seed: int = 0
    """Seed for the process that fetches the samples (this process or a loader process). All numbers
    that a data set draws from torch, numpy or random depend only on this seed. The data set's own
    generators cannot be seeded."""
    job_seed: int = 0
    """Seed of the job, for data sets that draw random numbers per sample; see
    ``data.batch_key``."""
    epoch: int = 0
    """Epoch of the samples; ``batch_key.EVALUATION`` in an evaluation."""


def evaluation_share(samples: range, *, job_seed: int, step: int) -> Share:
    """Return the share for a batch of an evaluation.

    Args:
        samples: Samples of ``data.eval``, in order.
        job_seed: Seed of the job.
        step: Step after which the evaluation runs.
    """
    seed = seed_of(job_seed, "eval", step, samples.start)
    return Share(list(samples), seed, job_seed=job_seed, epoch=EVALUATION)


Delivered = tuple[NDArray[np.int64], Any]
"""Indices of the samples that were actually fetched, and their batch."""


class SampleSource(Protocol):
    """Source of batches."""

    @property
    def layout(self) -> BlockLayout | None:
        """Blocks that determine the order of the samples; None if they are all in memory."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the content, hexadecimal; empty if it is unknown."""
        ...

    def __len__(self) -> int: ...

    def batches(self, shares: Iterable[Share]) -> Iterator[Delivered]:
        """Yield the delivered batch of each share, in order.

        The state of this process's random generators does not change.
        """
        ...

    def close(self) -> None:
        """Stop the threads and loader processes, if there are any."""
        ...


def open_samples(
    data: Any,
    *,
    name: str,
    collate: Callable[[list[Any]], Any] | None,
    num_workers: int,
    pins_memory: bool = False,
    warn: Callable[[str], None] = print,
) -> SampleSource:
    """Wrap the object that ``data.train`` or ``data.eval`` refers to.

    Args:
        data: ``Shards``, a map-style data set, a Hugging Face ``Dataset``, a pandas, Polars or
            Arrow table, a pair or dict of tensors or arrays of equal length, or a class or function
            without arguments that returns one of these (it is called here, on the worker).
        name: The key in the cell, for messages.
        collate: Joins a list of samples into a batch; torch's ``default_collate`` if None.
        num_workers: Number of loader processes; 0 loads in the training process.
        pins_memory: True to prepare batches in pinned memory, if a thread or a loader process
            prepares them.
        warn: Receives messages about problems that do not stop the job.

    Returns:
        A source whose batches are tuples or dicts of tensors, or results of ``collate``.

    Raises:
        DataError: If ``data`` is none of these, or is empty.
        ShardError: If shards are missing or invalid.
    """
    # A data set may itself be callable; if it has ``__getitem__``, it is used as the data.
    if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")):
        data = data()
    if isinstance(data, Shards):
        return _open_shards(
            data,
            name=name,
            collate=collate,
            num_workers=num_workers,
            pins_memory=pins_memory,
            warn=warn,
        )
    if is_stream(data):
        raise DataError(f"{name} is {with_article(type(data).__name__)}. {STREAM_HINT}")
    if splits := splits_of(data):
        raise DataError(f"{name} is a DatasetDict. Return one of its splits: {', '.join(splits)}.")
    source = _source_of(
        data, name=name, collate=collate, num_workers=num_workers, pins_memory=pins_memory
    )
    if len(source) == 0:
        raise DataError(f"{name} is empty (0 samples). Check the code that builds it.")
    return source


def _open_shards(data: Shards, *, name: str, **options: Any) -> SampleSource:
    # Imported here because pyarrow is an optional dependency. Reading the index first gives the
    # clearest message if it is missing.
    len(data)
    from etrain_jupyter.trainer.shard_source import ShardSource

    return ShardSource(
        data,
        options["collate"],
        options["num_workers"],
        is_sequential=name == "data.eval",
        pins_memory=options["pins_memory"],
        warn=options["warn"],
    )


def _source_of(
    data: Any,
    *,
    name: str,
    collate: Callable[[list[Any]], Any] | None,
    num_workers: int,
    pins_memory: bool,
) -> SampleSource:
    # The notebook's ``collate`` expects a list of samples.
    if collate is None:
        rows = row_set_of(data, name)
        if rows is not None:
            if num_workers and rows.is_decoded:
                return ItemSource(rows, None, num_workers, pins_memory=pins_memory)
            return RowSource(rows, pins_memory=pins_memory)
    elif is_frame(data):
        data = FrameRows(data, name)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return ItemSource(data, collate or default_collate, num_workers, pins_memory=pins_memory)
    raise DataError(
        f"{name} is a {type(data).__name__} without len() and [i]. Give a map-style data set, "
        "a data frame, a pair of tensors, or a function that returns one."
    )


_SMALL_BYTES = 1 << 20
"""Gathering a smaller batch costs less than passing it between threads."""


class RowSource:
    """Rows gathered one batch at a time in a thread of this process; nothing is random."""

    def __init__(self, rows: RowSet, *, pins_memory: bool) -> None:
        self._rows = rows
        self._pins_memory = pins_memory
        self._ahead = Ahead()

    layout = None
    digest = ""

    def __len__(self) -> int:
        return len(self._rows)

    def batches(self, shares: Iterable[Share]) -> Iterator[Delivered]:
        """Yield one batch per share."""
        stream = iter(shares)
        first = next(stream, None)
        if first is None:
            return
        num_bytes = len(first.indices) * self._rows.row_bytes
        shares = itertools.chain([first], stream)
        if num_bytes < _SMALL_BYTES and not self._rows.is_decoded:
            yield from map(self._gather, shares)
        else:
            yield from self._ahead.map(self._prepare, shares)

    def close(self) -> None:
        """Stop the thread."""
        self._ahead.close()

    def _prepare(self, share: Share) -> Delivered:
        rows, batch = self._gather(share)
        return rows, pin(batch) if self._pins_memory else batch

    def _gather(self, share: Share) -> Delivered:
        rows = np.asarray(share.indices, dtype=np.int64)
        return rows, self._rows.batch_of(rows)


class ItemSource:
    """A map-style data set, read sample by sample, in this process or in loader processes.

    Args:
        data: The data set.
        collate: Joins a list of samples into a batch; None if ``data`` is a row set.
        num_workers: Number of loader processes.
        pins_memory: True to copy batches of loader processes into pinned memory.
    """

    def __init__(
        self,
        data: Any,
        collate: Callable[[list[Any]], Any] | None,
        num_workers: int,
        *,
        pins_memory: bool,
    ) -> None:
        self._fetcher = _Fetcher(data, collate)
        self._shares = _Shares()
        # The loader outlives generations: starting its processes takes seconds.
        self._loader = self._start_loader(num_workers, pins_memory) if num_workers else None

    layout = None
    digest = ""

    def __len__(self) -> int:
        return len(self._fetcher)

    def batches(self, shares: Iterable[Share]) -> Iterator[Delivered]:
        """Yield one collated batch per share."""
        if self._loader is not None:
            self._shares.feed = shares
            for indices, batch in self._loader:
                yield np.asarray(indices, dtype=np.int64), batch
            return
        for share in shares:
            indices, batch = self._fetcher.__getitems__(_order_of(share))
            yield np.asarray(indices, dtype=np.int64), batch

    def close(self) -> None:
        """Stop the loader processes."""
        self._loader = None  # the destructor of its iterator stops them

    def _start_loader(self, num_workers: int, pins_memory: bool) -> DataLoader[Any]:
        # Spawned, not forked, because the trainer has threads, and possibly a CUDA context.
        return DataLoader(
            cast("Dataset[Any]", self._fetcher),
            batch_sampler=cast("Any", self._shares),  # yields each order unchanged
            num_workers=num_workers,
            collate_fn=_unchanged,  # the fetcher has already collated
            # Without its own generator, the loader would draw from the model's generator.
            generator=torch.Generator(),
            persistent_workers=True,
            pin_memory=pins_memory,
            multiprocessing_context="spawn",
        )


class _Shares:
    # The batch sampler of a loader that outlives a generation. Iterating over the loader again
    # resets its processes, drops prefetched batches, and reads the new feed.
    def __init__(self) -> None:
        self.feed: Iterable[Share] = ()

    def __iter__(self) -> Iterator[_Order]:
        return map(_order_of, self.feed)


class _Order(NamedTuple):
    # A share as it is sent to a loader process. Its indices are plain integers,
    # which any data set accepts.
    indices: list[int]
    seed: int
    job_seed: int
    epoch: int


def _order_of(share: Share) -> _Order:
    return _Order([int(i) for i in share.indices], share.seed, share.job_seed, share.epoch)


class _Fetcher:
    # Fetches and collates samples, here or in a loader process, and also returns their indices: the
    # step header counts the samples that were delivered, not those that were planned.
    #
    # Pickled by value, because plain pickle would try to import the notebook's classes from a
    # module.
    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self._data = data
        self._collate = collate

    def __reduce__(self) -> tuple[Any, ...]:
        return (_fetcher_from, (cloudpickle.dumps((self._data, self._collate)),))

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, order: _Order) -> tuple[list[int], Any]:
        # If this method exists, torch's fetcher calls it with each item of the batch sampler.
        key = fetching(seed=order.job_seed, epoch=order.epoch, samples=order.indices)
        with seeded(order.seed), key:
            return self._fetch(order.indices)

    def _fetch(self, indices: list[int]) -> tuple[list[int], Any]:
        if self._collate is None:
            return indices, self._data.batch_of(np.asarray(indices, dtype=np.int64))
        try:
            samples = self._samples_at(indices)
        except FileNotFoundError as exc:
            exc.add_note(_MISSING_FILE_HINT)
            raise
        try:
            return indices, self._collate(samples)
        except Exception as exc:
            exc.add_note(f"while collating samples {reprlib.repr(indices)} into a batch")
            if self._collate is default_collate:
                exc.add_note(_COLLATE_HINT)
            raise

    def _samples_at(self, indices: list[int]) -> list[Any]:
        # The same protocol as torch's own fetcher: one call for the whole batch.
        if hasattr(self._data, "__getitems__"):
            with _naming(f"samples {reprlib.repr(indices)}"):
                return list(self._data.__getitems__(indices))
        return [self._sample_at(index) for index in indices]

    def _sample_at(self, index: int) -> Any:
        with _naming(f"sample {index}"):
            return self._data[index]


@contextlib.contextmanager
def _naming(samples: str) -> Iterator[None]:
    # A data set's own error often names neither the sample nor its file. For a truncated JPEG, PIL
    # raises "image file is truncated".
    try:
        yield
    except FileNotFoundError:
        raise  # names the file
    except Exception as exc:
        exc.add_note(f"while reading {samples} from the data set")
        raise


_MISSING_FILE_HINT = (
    "The data set reads files while the job trains, so they must exist at the same path on every "
    "worker. If their path differs there, name a function that opens the data set on the worker."
)


_COLLATE_HINT = (
    "Without data.collate, the samples of a batch must have tensors, arrays or lists of the same "
    "length. Write data: {train: train_set, collate: collate}, a function that makes a batch from "
    "a list of samples, for example with torch.nn.utils.rnn.pad_sequence."
)


def _fetcher_from(data: bytes) -> _Fetcher:
    return _Fetcher(*cloudpickle.loads(data))


def _unchanged(fetched: Any) -> Any:
    return fetched
