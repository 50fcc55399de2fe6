"""``Shards``: a data set that is read from its files while a job trains."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from etrain_jupyter.data.disk_cache import DiskCache, default_folder
from etrain_jupyter.data.index import ShardIndex
from etrain_jupyter.data.places import absolute_path, open_place
from etrain_jupyter.errors import ShardError
from etrain_jupyter.rules.samples.block_order import BlockLayout, blocks_within
from etrain_jupyter.untrusted import make_private

if TYPE_CHECKING:
    import pyarrow as pa

    from etrain_jupyter.data.reader import ShardReader

WINDOW = 64
WINDOW_BYTES = 512 << 20
CACHE_BYTES = 16 << 30
NUM_THREADS = 4

Warn = Callable[[str], None]


class Shards:
    """A data set in a folder or bucket, larger than memory, for ``data.train`` and ``data.eval``.

    The workers receive a description and the index of its blocks, not the data. Each worker
    reads the blocks of its own samples, in an order that depends only on the job's seed, the epoch
    and the blocks.

    A batch is a dict of the columns, ``{"tokens": (B, L), "label": (B,)}``, or a tuple if the set
    was written from tuples. Text and bytes are lists. With ``transform`` or ``data.collate``, a
    batch is collated from single samples instead.

    Args:
        path: A folder, a file or ``s3://bucket/prefix`` with Parquet files, Arrow IPC files, JSON
            lines, a saved Hugging Face data set, or a set written by ``write_shards``. A folder
            must exist at the same path on every worker.
        columns: Columns to read; None for all.
        transform: Function of one sample, such as the decoding of an image. The job seeds the
            random numbers that it draws from torch, numpy or random. It runs in the loader
            processes if ``data.num_workers`` is above 0.
        window: Maximum number of blocks whose rows are shuffled together.
        window_bytes: Maximum size of a window in memory, which takes precedence over ``window``.
            Decoded blocks of this size are kept in each worker's memory.
        cache_bytes: Maximum size of the disk cache on each machine, for ``s3://``.
        cache_dir: Folder of the disk cache; by default in the temporary folder, one for each user.
        num_threads: Threads of each worker that read and decode blocks.

    Raises:
        ShardError: If an argument is invalid. Errors of the data are raised when they are first
            used, by ``len`` for example.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        window: int = WINDOW,
        window_bytes: int = WINDOW_BYTES,
        cache_bytes: int = CACHE_BYTES,
        cache_dir: str | os.PathLike[str] | None = None,
        num_threads: int = NUM_THREADS,
    ) -> None:
        limits = {"window": window, "window_bytes": window_bytes, "num_threads": num_threads}
        for name, value in limits.items():
            if value < 1:
                raise ShardError(f"{name}={value} is less than 1.")
        if isinstance(columns, str):
            raise ShardError(f"columns={columns!r} is a text. Write columns=[{columns!r}].")
        self.path = absolute_path(path)
        self.columns = list(columns) if columns is not None else None
        self.transform = transform
        self.window = window
        self.window_bytes = window_bytes
        self.cache_bytes = cache_bytes
        self.cache_dir = os.fspath(cache_dir) if cache_dir is not None else None
        self.num_threads = num_threads
        self._index: ShardIndex | None = None
        self._layout: BlockLayout | None = None
        self._own_reader: ShardReader | None = None

    # --- description ---

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.layout.num_samples

    def __repr__(self) -> str:
        if self._index is None:
            return f"Shards({self.path!r})"
        return (
            f"Shards({self.path!r}): {len(self):,} samples in {len(self._index.blocks):,} blocks "
            f"and {len(self._index.files):,} files"
        )

    @property
    def index(self) -> ShardIndex:
        """Files and blocks of the set; read from the files once, then kept."""
        if self._index is None:
            cache: Path | None = self._cache_folder()
            try:
                make_private(self._cache_folder())
            except OSError:
                cache = None  # then each process indexes the files itself
            self._index = _engine().opening.index_place(open_place(self.path), cache)
        return self._index

    @property
    def layout(self) -> BlockLayout:
        """Blocks and window, on which the order of the samples depends."""
        if self._layout is None:
            blocks = self.index.blocks
            window = blocks_within([b.num_bytes for b in blocks], self.window, self.window_bytes)
            self._layout = BlockLayout(tuple(block.rows for block in blocks), window)
        return self._layout

    @property
    def digest(self) -> str:
        """Digest of the content, hexadecimal: equal for copies of the set in different places."""
        return self.index.digest

    @property
    def identity(self) -> tuple[Any, ...]:
        """Everything that determines the samples and their order.

        It does not include the place of the files, nor settings for reading them such as
        ``cache_bytes``, ``cache_dir`` and ``num_threads``.
        """
        return self.digest, self.layout.encode(), self.columns, self.transform

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the columns that are read."""
        return self._reader().schema

    def __getstate__(self) -> dict[str, Any]:
        """Return the description and the index, which every worker then shares."""
        state = {**self.__dict__, "_index": self.index.to_bytes()}
        return {**state, "_layout": None, "_own_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._index = ShardIndex.from_bytes(state["_index"])

    # --- samples ---

    def __getitem__(self, number: int) -> Any:
        """Return one sample: a dict of its columns or a tuple, after ``transform``."""
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self.samples_of(self._reader().take(np.array([number % len(self)])), 1)[0]

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples in the order of the files."""
        reader = self._reader()
        for block in range(len(self.index.blocks)):
            table = reader.read_block(block)
            yield from self.samples_of(_engine().columns.columns_of(table), table.num_rows)

    def tables(self, first_block: int = 0) -> Iterator[pa.Table]:
        """Yield the blocks as Arrow tables, in the order of the files."""
        reader = self._reader()
        for block in range(first_block, len(self.index.blocks)):
            yield reader.read_block(block)

    def samples_of(self, columns: Mapping[str, Any], num_rows: int) -> list[Any]:
        """Return the samples in the columns of some rows, after ``transform``."""
        rows: list[Any] = _engine().columns.rows_of(columns, num_rows)
        if self.index.sample == "tuple":
            rows = [tuple(row.values()) for row in rows]
        return rows if self.transform is None else [self.transform(row) for row in rows]

    def open(self, *, num_kept: int | None = None, warn: Warn = print) -> ShardReader:
        """Return a reader with threads of its own, for a training process.

        Args:
            num_kept: Maximum number of blocks in memory; by default the number of blocks in a
                window.
            warn: Receives a message if the disk cache cannot be used.

        Raises:
            ShardError: If a column does not exist.
        """
        # Create this one first, because its message is the clearest if pyarrow is missing.
        reader = _engine().reader.ShardReader
        place = open_place(self.path)
        cache_bytes = self.cache_bytes if place.is_remote else 0
        opened: ShardReader = reader(
            self.index,
            place,
            DiskCache(self._cache_folder(), cache_bytes, warn),
            self.layout,
            columns=self.columns,
            num_kept=num_kept or self.layout.window,
            num_threads=self.num_threads,
        )
        return opened

    def _reader(self) -> ShardReader:
        if self._own_reader is None:
            self._own_reader = self.open()
        return self._own_reader

    def _cache_folder(self) -> Path:
        return Path(self.cache_dir).expanduser().resolve() if self.cache_dir else default_folder()


@contextmanager
def needing_pyarrow(who: str, where: str = "") -> Iterator[None]:
    """Raise ShardError if an import in the context fails because pyarrow is not installed.

    pyarrow is optional: describing a set or refusing an invalid argument must work without it.
    Modules that need it are therefore imported on first use.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name != "pyarrow":
            raise
        raise ShardError(
            f"{who} needs pyarrow, which is not installed. Install it{where}: "
            'pip install "etrain-jupyter[data]"'
        ) from exc


def _engine() -> Any:
    with needing_pyarrow("Shards", " on this machine and on the workers"):
        from etrain_jupyter.data import columns, opening, reader
    return SimpleNamespace(columns=columns, opening=opening, reader=reader)
