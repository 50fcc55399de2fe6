"""Format numbers, durations, sizes and amounts for display."""

from __future__ import annotations

import math

MISSING = "-"
"""Shown for a value that is not known."""


def number(value: float) -> str:
    """Format a number with four significant digits.

    >>> number(0.123456), number(98765.4), number(1.0), number(2.5e9), number(float("nan"))
    ('0.1235', '98,765', '1', '2.5e+09', 'nan')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> counted(1, "frame"), counted(3000, "frame")
    ('1 frame', '3,000 frames')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def seconds(value: float) -> str:
    """Format a duration in a unit that suits its length.

    >>> [seconds(value) for value in (0.0314, 7.25, 95, 132_192)]
    ['31 ms', '7.2 s', '1.6 min', '36.7 h']
    """
    if value >= 3600:
        return f"{value / 3600:,.1f} h"
    if value >= 60:
        return f"{value / 60:.1f} min"
    # A log may have any number, so the value may be NaN.
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def duration(hours: float) -> str:
    """Format a duration that is given in hours, as ``seconds`` does."""
    return seconds(hours * 3600)


def size(value: float) -> str:
    """Format a number of bytes with a decimal unit, as in storage prices.

    >>> size(812), size(1_500_000)
    ('812 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def dollars(usd: float) -> str:
    """Format an amount of US dollars; below 10 cents, with three significant digits.

    >>> [dollars(usd) for usd in (1234.5, 0.0, 0.00123, 0.5)]
    ['$1,234.50', '$0.00', '$0.00123', '$0.50']
    """
    return f"${usd:.3g}" if 0 < abs(usd) < 0.1 else f"${usd:,.2f}"


def plain(value: object) -> str:
    """Format any value of a table: numbers as ``number`` does, unknown ones as ``MISSING``."""
    if isinstance(value, float) and math.isnan(value):
        return MISSING
    return number(value) if isinstance(value, int | float) else str(value) or MISSING
