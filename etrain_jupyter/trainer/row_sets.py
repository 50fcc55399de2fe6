"""Data sets whose batches are gathered by column, without any code of the notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset, TensorDataset

from etrain_jupyter.data.kinds import is_frame, is_hugging_face
from etrain_jupyter.errors import ShardError
from etrain_jupyter.trainer.references import DataError


class RowSet(Protocol):
    """Rows in memory or in mapped files, from which a batch is gathered at once."""

    @property
    def is_decoded(self) -> bool:
        """True if gathering computes more than it copies, so that loader processes are useful."""
        ...

    @property
    def row_bytes(self) -> int:
        """Size of one row in memory, on average."""
        ...

    def __len__(self) -> int: ...

    def batch_of(self, rows: NDArray[np.int64]) -> Any:
        """Return the batch of some rows, in that order; the caller may write to its memory."""
        ...


def row_set_of(data: Any, name: str) -> RowSet | None:
    """Return the rows of a data set; None if its samples must be fetched one by one.

    Args:
        data: A ``TensorDataset``; a dict or pair of tensors or arrays; a pandas, Polars or Arrow
            table; a Hugging Face ``Dataset``; or a ``Subset`` of one of these.
        name: The key in the cell, for messages.

    Raises:
        DataError: If columns differ in length, have missing numbers, or cannot be read.
    """
    # ``isinstance`` is not sufficient, because a subclass may override ``__getitem__``.
    if type(data) is Subset:
        rows = row_set_of(data.dataset, name)
        return None if rows is None else SelectedRows(rows, data.indices)
    if type(data) is TensorDataset:
        return TensorRows(tuple(data.tensors), name)
    if isinstance(data, Mapping) and data and all(_is_array(v) for v in data.values()):
        return TensorRows({str(k): torch.as_tensor(v) for k, v in data.items()}, name)
    if isinstance(data, tuple | list) and len(data) >= 2 and all(_is_array(v) for v in data):
        return TensorRows(tuple(torch.as_tensor(v) for v in data), name)
    if is_frame(data):
        return FrameRows(data, name)
    # A custom format is one of the notebook's functions.
    if is_hugging_face(data) and data.format["type"] != "custom":
        return HuggingFaceRows(data, name)
    return None


def tensors_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns with arrays of numbers as tensors that share their memory."""
    return {
        name: torch.from_numpy(column) if isinstance(column, np.ndarray) else column
        for name, column in columns.items()
    }


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0


class TensorRows:
    """Tensors of equal length."""

    is_decoded = False

    def __init__(
        self, columns: tuple[torch.Tensor, ...] | dict[str, torch.Tensor], name: str
    ) -> None:
        values = list(columns.values()) if isinstance(columns, dict) else list(columns)
        lengths = sorted({len(v) for v in values})
        if len(lengths) > 1:
            raise DataError(
                f"{name} has tensors of different lengths {lengths}. Give each column one row per "
                "sample."
            )
        self._columns = columns
        self._length = lengths[0]
        self.row_bytes = sum(v.numel() * v.element_size() for v in values) // max(1, self._length)

    def __len__(self) -> int:
        return self._length

    def batch_of(self, rows: NDArray[np.int64]) -> Any:
        """Return a tuple or dict of tensors, like the columns."""
        index = torch.as_tensor(rows)
        if isinstance(self._columns, dict):
            return {k: v[index] for k, v in self._columns.items()}
        return tuple(v[index] for v in self._columns)


class FrameRows:
    """A pandas, Polars or Arrow table.

    A batch is a dict of its columns, as for ``Shards``. Numbers become tensors of shape ``(B,)``,
    lists of equal length become tensors of shape ``(B, L)``, and text becomes a list.
    """

    is_decoded = False

    def __init__(self, frame: Any, name: str) -> None:
        # Imported here because pyarrow is an optional dependency.
        try:
            from etrain_jupyter.data.frames import Frame, table_of
        except ModuleNotFoundError as exc:
            if exc.name != "pyarrow":
                raise
            raise DataError(
                f"{name} is a {type(frame).__name__}, which needs pyarrow. Install it on this "
                'machine and on the workers: pip install "etrain-jupyter[data]"'
            ) from exc
        try:
            self._frame = Frame(table_of(frame))
        except ShardError as exc:
            raise DataError(f"{name}: {exc}") from exc
        is_pandas = hasattr(frame, "fillna")
        remedy = "fillna() or dropna()" if is_pandas else "fill_null() or drop_nulls()"
        self.row_bytes = self._frame.num_bytes // max(1, len(frame))
        _check_missing(self._frame.missing, len(frame), name, remedy)

    def __len__(self) -> int:
        return len(self._frame)

    def batch_of(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the columns of some rows."""
        return tensors_of(self._frame.take(rows))

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return one sample for ``data.collate``."""
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        """Return samples for ``data.collate``: dicts of NumPy and Python values."""
        columns = self._frame.take(np.asarray(rows, dtype=np.int64))
        return [{k: column[i] for k, column in columns.items()} for i in range(len(rows))]


class HuggingFaceRows:
    """A Hugging Face ``Dataset`` in ``torch`` format, with the columns of its original format."""

    is_decoded = True

    def __init__(self, dataset: Any, name: str) -> None:
        form = dataset.format
        if form["type"] != "torch":
            dataset = dataset.with_format(
                "torch", columns=form["columns"], output_all_columns=form["output_all_columns"]
            )
        self._dataset = dataset
        self.row_bytes = int(dataset.data.nbytes) // max(1, len(dataset.data))
        _check_missing(_missing_in(dataset), len(dataset), name, "map() or filter()")

    def __len__(self) -> int:
        return len(self._dataset)

    def batch_of(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the columns of some rows."""
        batch: dict[str, Any] = self._dataset[rows.tolist()]
        return batch


class SelectedRows:
    """Some rows of a row set, as ``torch.utils.data.Subset`` selects them."""

    def __init__(self, rows: RowSet, selected: Any) -> None:
        self._rows = rows
        self._selected = np.asarray(selected, dtype=np.int64)
        self.is_decoded = rows.is_decoded
        self.row_bytes = rows.row_bytes

    def __len__(self) -> int:
        return len(self._selected)

    def batch_of(self, rows: NDArray[np.int64]) -> Any:
        """Return the batch of some of the selected rows."""
        return self._rows.batch_of(self._selected[rows])


def _missing_in(dataset: Any) -> dict[str, int]:
    # Otherwise, a null among integers would become a NaN without any message.
    from etrain_jupyter.data.frames import missing_numbers

    columns = [name for name in dataset.column_names if name in dataset.format["columns"]]
    found = missing_numbers(dataset.data.table.select(columns))
    if found and dataset._indices is not None:  # some rows of the table may not be selected
        found = missing_numbers(dataset.with_format("arrow", columns=list(found))[:])
    return found


def _check_missing(missing: Mapping[str, int], num_rows: int, name: str, remedy: str) -> None:
    for column, count in missing.items():
        raise DataError(
            f"{name}: column {column!r} has {count} missing of {num_rows} values, and numbers in a "
            f"batch cannot be missing. Fill them or drop the rows with {remedy}, or drop the "
            "column."
        )
