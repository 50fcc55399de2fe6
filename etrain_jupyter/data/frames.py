"""Tables in memory, such as pandas or Polars data frames, gathered by column."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from etrain_jupyter.config.source_map import with_article
from etrain_jupyter.data.columns import Column, column_of, num_missing, view_of
from etrain_jupyter.data.kinds import is_polars
from etrain_jupyter.errors import ShardError


def table_of(source: Any) -> pa.Table:
    """Return an object for which ``kinds.is_frame`` is true as a table, without its index.

    Raises:
        ShardError: If a column has values of different types.
    """
    if isinstance(source, pa.Table):
        return source
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    if is_polars(source):
        return pa.table(source.to_arrow())
    try:
        return pa.Table.from_pandas(source, preserve_index=False)
    except (pa.ArrowException, ValueError, TypeError) as exc:
        reason = "; ".join(str(part).partition("\n")[0] for part in reversed(exc.args))
        raise ShardError(
            f"{with_article(type(source).__name__)} has a column that cannot be read: {reason}. "
            "Give all values of a column one type: numbers, text, or lists of numbers."
        ) from exc


class Frame:
    """Rows of a table in memory."""

    def __init__(self, table: pa.Table) -> None:
        # One chunk per column, so that rows are gathered without a search.
        self._table = table.combine_chunks()
        self._views = {name: view_of(self._table.column(name)) for name in table.column_names}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return int(self._table.nbytes)

    @property
    def missing(self) -> dict[str, int]:
        """Number of missing values of each column of numbers that has any."""
        return missing_numbers(self._table)

    def take(self, rows: NDArray[Any]) -> dict[str, Column]:
        """Return rows by their numbers, in that order; see ``columns.columns_of``."""
        numbers = pa.array(rows)
        return {
            name: column_of(name, self._table.column(name).take(numbers))
            if view is None
            else view[rows]
            for name, view in self._views.items()
        }


def missing_numbers(table: pa.Table) -> dict[str, int]:
    """Return the number of missing values of each column of numbers that has any."""
    counts = {name: num_missing(table.column(name)) for name in table.column_names}
    return {name: count for name, count in counts.items() if count}
