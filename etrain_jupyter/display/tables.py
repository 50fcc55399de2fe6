"""Render tables as text, as HTML and as data frames."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from etrain_jupyter.display.numbers import MISSING, plain
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.untrusted import plain_line, plain_text

if TYPE_CHECKING:
    from pandas import DataFrame


class Html(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    key: str
    """Key in the rows."""
    heading: str
    about: str = ""
    """Explanation, shown as a tooltip."""
    show: Callable[[Any], str] = plain
    """Formats a known value."""

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the text of one cell."""
        value = row.get(self.key, math.nan)
        is_known = not (isinstance(value, float) and math.isnan(value))
        return plain_line(self.show(value)) if is_known else MISSING


def align_columns(
    lines: Sequence[Sequence[str]], *, num_left: int | None = None, min_width: int = 0
) -> str:
    """Return lines of cells as text with aligned columns.

    Args:
        lines: The cells, by line; all lines have the same length.
        num_left: Number of columns that are aligned to the left; by default all.
        min_width: Minimum width of a column.
    """
    widths = [max(min_width, *map(len, column)) for column in zip(*lines, strict=True)]
    left = len(widths) if num_left is None else num_left
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def html_of(text: str, max_length: int | None = None) -> Html:
    """Return text as HTML; with ``max_length``, as one line of limited length."""
    if isinstance(text, Html):
        return text
    return Html(escape(plain_text(text) if max_length is None else plain_line(text, max_length)))


def html_list(items: Iterable[str], *, css_class: str = "") -> Html:
    """Return an HTML list with one line per item; empty without items."""
    body = "".join(f"<li>{html_of(item, 2000)}</li>" for item in items)
    attribute = f' class="{css_class}"' if css_class else ""
    return Html(f"<ul{attribute}>{body}</ul>" if body else "")


def html_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    tooltips: Sequence[str] = (),
    has_row_heads: bool = False,
) -> Html:
    """Return an HTML table. Cells that are not ``Html`` are escaped.

    Args:
        heads: Headings of the columns; none if empty.
        rows: The cells, by row.
        tooltips: Explanations of the headings; none if empty.
        has_row_heads: True if the first column has the headings of the rows.
    """
    head = "".join(
        f'<th title="{html_of(about)}">{html_of(text)}</th>'
        if about
        else f"<th>{html_of(text)}</th>"
        for text, about in zip(heads, tooltips or [""] * len(heads), strict=True)
    )
    first = '<th scope="row">{}</th>' if has_row_heads else "<td>{}</td>"
    body = "".join(
        f"<tr>{first.format(html_of(row[0]))}"
        f"{''.join(f'<td>{html_of(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return Html(f"<table>{top}<tbody>{body}</tbody></table>")


def data_frame(rows: Iterable[Mapping[str, Any]], *, otherwise: str) -> DataFrame:
    """Return rows as a ``pandas.DataFrame``.

    Args:
        rows: Values by column.
        otherwise: Expression with the same values, for the error message.

    Raises:
        ConfigError: If pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as exc:
        raise ConfigError(
            "to_frame() needs the package pandas, which is not installed",
            hint=f"pip install pandas; {otherwise}",
        ) from exc
    return pd.DataFrame(rows)
