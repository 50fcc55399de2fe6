"""The history of a job in columns, with one row per committed step.

A running job adds single rows, and the blocks in a log add thousands at once. Rows are packed into
arrays with at most 8 bytes per number; only ``columns`` returns Python objects.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from etrain_jupyter.log.blocks import Column, StepRun
from etrain_jupyter.log.events import EvalCompleted, EvalScored, StepCompleted

STEP_COLUMNS = (
    "step",
    "epoch",
    "samples",
    "loss",
    "lr",
    "world_size",
    "generation",
    "samples_per_s",
    "time",
    "data_s",
    "compute_s",
    "communication_s",
    "optimizer_s",
)
"""The columns of every history, in this order, followed by those of the metrics."""

_PACK_AT = 4096
"""Number of single rows to collect before packing them into arrays."""


@dataclass(frozen=True)
class _Chunk:
    """Rows as arrays of equal length, including the columns of their metrics."""

    columns: dict[str, Column]

    def __len__(self) -> int:
        return len(self.columns["step"])

    def head(self, num_rows: int) -> _Chunk:
        return _Chunk({name: column[:num_rows] for name, column in self.columns.items()})


class History:
    """Columns of equal length, one row per committed step; missing metrics are NaN."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._num_chunked = 0
        self._tail: list[dict[str, Any]] = []
        """Rows that are not packed yet."""
        self._measured: dict[str, None] = {}
        """The columns beyond ``STEP_COLUMNS``, in the order of their first values."""
        self._evals: dict[str, dict[int, float]] = {}
        """Evaluation results by column and row."""

    def __len__(self) -> int:
        return self._num_chunked + len(self._tail)

    def add_step(self, event: StepCompleted) -> None:
        """Append a row; a step committed again replaces its row and all later rows."""
        if len(self) and self._last_step() >= event.step:
            self.rewind_to(event.step - 1)
        row = {name: getattr(event, name) for name in STEP_COLUMNS}
        row |= {_column_of(name): value for name, value in event.metrics.items()}
        self._measured |= dict.fromkeys(name for name in row if name not in STEP_COLUMNS)
        self._tail.append(row)
        if len(self._tail) >= _PACK_AT:
            self._pack()

    def add_run(self, run: StepRun) -> None:
        """Append the rows of a run of consecutive steps."""
        first = int(run.column("step")[0])
        if len(self) and self._last_step() >= first:
            self.rewind_to(first - 1)
        self._pack()  # the single rows precede the run
        columns = {name: run.column(name) for name in STEP_COLUMNS}
        columns |= {_column_of(name): column for name, column in run.metrics().items()}
        self._measured |= dict.fromkeys(name for name in columns if name not in STEP_COLUMNS)
        self._push(_Chunk(columns))

    def add_eval(self, event: EvalCompleted | EvalScored) -> None:
        """Add the results of an evaluation to the row of its step."""
        row = self._rows_up_to(event.step) - 1
        # An evaluation before the first step has no row.
        if row < 0:
            return
        # Evaluations are rare and come after their row, which may be packed already. Keep them
        # apart from the chunks; `columns` merges them.
        for name, value in event.values.items():
            self._measured[f"eval_{name}"] = None
            self._evals.setdefault(f"eval_{name}", {})[row] = value

    def rewind_to(self, step: int) -> None:
        """Drop the rows after a step, because the later steps will be repeated."""
        # Example: chunks with steps 1-4 and 5-8, tail with 9-10, rewind_to(6):
        #   tail 9-10 dropped -> chunk 5-8 popped, its rows 5-6 pushed -> chunks 1-4 and 5-6
        num_rows = self._rows_up_to(step)
        del self._tail[max(0, num_rows - self._num_chunked) :]
        while self._num_chunked > num_rows:
            last = self._chunks.pop()
            self._num_chunked -= len(last)
            if self._num_chunked < num_rows:
                self._push(last.head(num_rows - self._num_chunked))
        for name, values in self._evals.items():
            self._evals[name] = {row: value for row, value in values.items() if row < num_rows}

    def columns(self) -> dict[str, list[Any]]:
        """Return a copy of all columns, for ``pandas.DataFrame``."""
        self._pack()
        found = {name: self._column(name).tolist() for name in STEP_COLUMNS}
        for name in self._measured:
            column: list[Any] = self._column(name).tolist()
            for row, value in self._evals.get(name, {}).items():
                column[row] = value
            found[name] = column
        return found

    def _column(self, name: str) -> Column:
        parts = [
            chunk.columns[name] if name in chunk.columns else np.full(len(chunk), math.nan)
            for chunk in self._chunks
        ]
        return np.concatenate(parts) if parts else np.empty(0)

    def _last_step(self) -> int:
        return int(self._tail[-1]["step"] if self._tail else self._chunks[-1].columns["step"][-1])

    def _rows_up_to(self, step: int) -> int:
        # The tail has the newest rows, and steps increase over all rows: `add_step` and `add_run`
        # rewind before they append a step again.
        if self._tail and self._tail[0]["step"] <= step:
            in_tail = bisect_right(self._tail, step, key=lambda row: int(row["step"]))
            return self._num_chunked + in_tail
        num_rows = self._num_chunked
        # Search from the end: the step is nearly always in the newest chunk.
        for chunk in reversed(self._chunks):
            num_rows -= len(chunk)
            steps = chunk.columns["step"]
            if steps[0] <= step:
                return num_rows + int(np.searchsorted(steps, step, side="right"))
        return 0

    def _pack(self) -> None:
        rows, self._tail = self._tail, []
        # All columns of a chunk have the same length, so a row whose metrics differ from those of
        # the previous row starts a new chunk.
        start = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or rows[end].keys() != rows[start].keys():
                names = rows[start]
                columns = {name: np.array([row[name] for row in rows[start:end]]) for name in names}
                self._push(_Chunk(columns))
                start = end

    def _push(self, chunk: _Chunk) -> None:
        self._chunks.append(chunk)
        self._num_chunked += len(chunk)


def _column_of(metric: str) -> str:
    """Return the column of a metric, with a prefix if it would be named like a step column."""
    return f"metric_{metric}" if metric in STEP_COLUMNS else metric
