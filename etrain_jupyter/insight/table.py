"""The table of a comparison: its columns, and its text form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etrain_jupyter.display.numbers import MISSING, dollars, duration
from etrain_jupyter.display.tables import Column, align_columns
from etrain_jupyter.untrusted import plain_line

IF_DIFFERENT = ("status", "device", "batch", "steps", "epochs", "saved_usd", "interruptions")
"""Columns that the text has only if the jobs differ in them, because lines are short."""
MAX_TEXT = 60
"""Maximum number of characters of a value from a configuration."""


_ratio = "{:.2f}".format


def _workers(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


_BEFORE = (
    Column(key="job", heading="job"),
    Column(key="status", heading="status"),
    Column(key="workers", heading="workers", about="mean, weighted by time", show=_workers),
    Column(key="device", heading="device"),
    Column(key="batch", heading="batch", about="mean number of samples per step"),
    Column(key="steps", heading="steps"),
    Column(key="epochs", heading="epochs", show=_ratio),
    Column(
        key="samples_per_s",
        heading="samples/s",
        about="without loading, evaluation, saving and recovery",
    ),
    Column(
        key="speedup",
        heading="speed-up",
        about="throughput relative to the job with the fewest workers",
        show="{:.1f}x".format,
    ),
    Column(
        key="efficiency",
        heading="efficiency",
        about="speed-up by the ratio of workers; 1.00 is linear scaling",
        show=_ratio,
    ),
)
_TRAIN_LOSS = Column(key="train_loss", heading="train loss", about="mean over the last steps")
"""Shown if no job has evaluations."""
_AFTER = (
    Column(
        key="hours",
        heading="time",
        about="from the beginning of the first step to the end of the last one",
        show=duration,
    ),
    Column(key="usd", heading="cost", show=dollars),
    Column(key="saved_usd", heading="saved", about="relative to on-demand prices", show=dollars),
    Column(
        key="wasted_usd",
        heading="wasted",
        about="part of the cost for booting, warming up or draining after the first step",
        show=dollars,
    ),
    Column(
        key="interruptions", heading="interruptions", about="workers that were preempted or lost"
    ),
)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns that have a value in any row, those of the metrics in the middle."""
    metrics = list(_metric_columns(rows)) or [_TRAIN_LOSS]
    found = [*_BEFORE, *metrics, *_AFTER]
    return [column for column in found if any(_is_known(row.get(column.key)) for row in rows)]


def _is_known(value: Any) -> bool:
    # A job without interruptions is not worth a column.
    return bool(value) and not (isinstance(value, float) and math.isnan(value))


def _metric_columns(rows: Sequence[Mapping[str, Any]]) -> Iterator[Column]:
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("best_"))
    for name in (key.removeprefix("best_") for key in keys):
        best, final = f"best_{name}", f"final_{name}"
        # One column is enough if the last evaluation is the best one in every job.
        is_same = all(row.get(best) == row.get(final) for row in rows)
        yield Column(key=best, heading=name if is_same else f"best {name}", about="evaluation")
        if not is_same:
            yield Column(key=final, heading=f"final {name}", about="last evaluation")


def render_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table as text; a line below it has the values that all jobs have in common."""
    columns = columns_of(rows)
    common = [
        column
        for column in columns
        if column.key in IF_DIFFERENT and len(rows) > 1 and len({*map(column.cell, rows)}) == 1
    ]
    columns = [column for column in columns if column not in common]
    lines = [[column.heading.upper() for column in columns]]
    lines += [[column.cell(row) for column in columns] for row in rows]
    shared = ", ".join(f"{column.heading} {column.cell(rows[0])}" for column in common)
    return align_columns(lines) + (f"\nAll jobs: {shared}" if shared else "")


def render_differences(labels: Sequence[str], differences: Mapping[str, Sequence[str]]) -> str:
    """Return the keys in which the jobs differ as text; empty if they do not differ."""
    if not differences:
        return ""
    return align_columns(
        [
            ["DIFFERENCES", *labels],
            *([key, *map(short_value, values)] for key, values in differences.items()),
        ]
    )


def short_value(value: str) -> str:
    """Return a value of a configuration on one line of limited length."""
    return plain_line(value, MAX_TEXT) or MISSING
