"""Convert what ``eval.score`` returns: numbers are scores, anything else is an exhibit.

An exhibit is a figure, text or table that the dashboard displays. It is converted to bytes in the
scoring process, because only the notebook's objects know how to draw themselves.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import numbers
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.log.events import ExhibitFormat
from etrain_jupyter.log.exhibits import (
    MAX_EVALUATION_BYTES,
    MAX_PER_EVALUATION,
    Cell,
    InvalidExhibitError,
    Table,
    check_name,
    check_table_size,
    encode_table,
    parse_exhibit,
)
from etrain_jupyter.trainer.references import WorkloadError

_ACCEPTED = (
    "Return a number (a score), or something to display: a Matplotlib figure, the bytes of a PNG, "
    "text, or a table (a pandas DataFrame, or a list of dicts with scalar values)."
)
_REMEDIES = {
    "png": "Return a smaller picture, for example with a lower dpi.",
    "text": "Return a shorter text.",
    "table": "Return a smaller table, for example its first rows.",
}


@dataclass(frozen=True)
class Exhibit:
    """A figure, text or table in the form in which it is stored."""

    name: str
    format: ExhibitFormat
    data: bytes


@dataclass(frozen=True)
class ScoreResult:
    """The values that ``eval.score`` returned."""

    scores: dict[str, float]
    exhibits: tuple[Exhibit, ...] = ()


def result_of(returned: Any) -> ScoreResult:
    """Return the scores as plain numbers, and the rest as exhibits.

    Raises:
        WorkloadError: If ``score`` returned anything other than ``{name: value}``, or an exhibit
            exceeds a limit.
    """
    if not isinstance(returned, Mapping) or not returned:
        raise WorkloadError(
            f"eval.score returned {reprlib.repr(returned)}, a {type(returned).__name__}. Return a "
            'dict of numbers, for example {"f1": 0.87}.'
        )
    scores, exhibits = {}, []
    for name, value in returned.items():
        if not isinstance(name, str) or not name.strip():
            raise WorkloadError(
                f"eval.score returned a value named {name!r}. Names must be non-empty text."
            )
        number = _number_of(value)
        if number is not None:
            scores[name] = number
        else:
            exhibits.append(_exhibit_of(name, value))
    _check_together(exhibits)
    return ScoreResult(scores, tuple(exhibits))


def _number_of(value: Any) -> float | None:
    if hasattr(value, "item"):  # a NumPy scalar, or a tensor of one element
        with contextlib.suppress(ValueError, RuntimeError, TypeError):
            value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None


def _exhibit_of(name: str, value: Any) -> Exhibit:
    # Check the name first, because drawing a figure takes time.
    format = _format_of(name, value)
    try:
        check_name(name)
        match format:
            case "png":
                data = _png_of(value)
            case "text":
                data = value.encode(errors="backslashreplace")
            case "table":
                data = encode_table(_table_of(name, value))
        parse_exhibit(format, data)
    except InvalidExhibitError as exc:
        kind = {"png": "picture", "text": "text", "table": "table"}[format]
        remedy = f" {_REMEDIES[format]}" if "limit" in str(exc) else ""
        raise WorkloadError(f"the {kind} {name!r} of eval.score {exc}.{remedy}") from exc
    return Exhibit(name, format, data)


def _format_of(name: str, value: Any) -> ExhibitFormat:
    if _is_a(value, "matplotlib.figure", "Figure") or isinstance(value, bytes | bytearray):
        return "png"
    if isinstance(value, str):
        return "text"
    is_rows = isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value)
    if is_rows or _is_a(value, "pandas", "DataFrame"):
        return "table"
    raise WorkloadError(
        f"eval.score returned {reprlib.repr(value)} for {name!r}, a {type(value).__name__}. "
        f"{_ACCEPTED}"
    )


def _is_a(value: Any, module: str, kind: str) -> bool:
    # The module that defines the value's class is already imported.
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, kind))


def _png_of(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    buffer = io.BytesIO()
    value.savefig(buffer, format="png")
    # pyplot keeps its figures until they are closed.
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close(value)
    return buffer.getvalue()


def _table_of(name: str, value: Any) -> Table:
    if isinstance(value, list):
        keys = dict.fromkeys(key for row in value for key in row)
        rows = [[row.get(key) for key in keys] for row in value]
        columns = [str(key) for key in keys]
        check_table_size(len(rows), len(columns))
    else:
        # Names of rows, such as classes, are in the index; the default index only counts them.
        if not _is_a(value.index, "pandas", "RangeIndex"):
            value = value.reset_index(allow_duplicates=True)
        check_table_size(*value.shape)
        columns = [str(column) for column in value.columns]
        rows = list(value.itertuples(index=False, name=None))
    return Table(
        tuple(columns),
        tuple(
            tuple(_cell_of(cell, name, column) for cell, column in zip(row, columns, strict=True))
            for row in rows
        ),
    )


def _cell_of(value: Any, name: str, column: str) -> Cell:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if type(value).__name__ in ("NAType", "NaTType"):  # missing values of pandas
        return None
    if isinstance(value, datetime.date | datetime.datetime):
        return value.isoformat()
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError, TypeError):
            item = value.item()
            if isinstance(item, str | bool | int | float):
                return item
    raise WorkloadError(
        f"the table {name!r} of eval.score has {reprlib.repr(value)}, a {type(value).__name__}, in "
        f"the column {column!r}. Cells must be numbers, text, booleans or None."
    )


def _check_together(exhibits: list[Exhibit]) -> None:
    names = {exhibit.name.casefold() for exhibit in exhibits}
    if len(names) < len(exhibits):
        raise WorkloadError(
            "eval.score returned two exhibits whose names differ only in upper and lower case: "
            f"{', '.join(sorted(exhibit.name for exhibit in exhibits))}. They would be stored in "
            "the same file on some systems. Rename one of them."
        )
    num_bytes = sum(len(exhibit.data) for exhibit in exhibits)
    if len(exhibits) > MAX_PER_EVALUATION or num_bytes > MAX_EVALUATION_BYTES:
        raise WorkloadError(
            f"eval.score returned {len(exhibits)} figures, texts and tables with {num_bytes:,} "
            f"bytes together; the limit for one evaluation is {MAX_PER_EVALUATION} and "
            f"{MAX_EVALUATION_BYTES:,} bytes. Return fewer or smaller ones, for example several "
            "pictures in one figure."
        )
