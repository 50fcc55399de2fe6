"""Formatting of numbers in tables and charts."""

from __future__ import annotations

import math

MISSING = "-"
"""Shown for a value that is not known."""


def number(value: float) -> str:
    """Format a number with four significant digits.

    >>> number(0.123456), number(98765.4), number(1.0), number(float("nan"))
    ('0.1235', '98,765', '1', '-')
    """
    if math.isnan(value):
        return MISSING
    if abs(value) < 1000 or abs(value) >= 1e9:
        return f"{value:.4g}"
    return f"{value:,.0f}"


def duration(hours: float) -> str:
    """Format a duration, given in hours, in a unit that suits its length.

    >>> [duration(hours) for hours in (36.72, 0.8, 0.01, 0.0001, float("nan"))]
    ['36.7 h', '48.0 min', '36.0 s', '360 ms', '-']
    """
    if math.isnan(hours):
        return MISSING
    if hours >= 1:
        return f"{hours:,.1f} h"
    seconds = hours * 3600
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def dollars(usd: float) -> str:
    """Format an amount of US dollars; below 10 cents, with three significant digits.

    >>> [dollars(usd) for usd in (1234.5, 0.0, 0.00123, float("nan"))]
    ['$1,234.50', '$0.00', '$0.00123', '-']
    """
    if math.isnan(usd):
        return MISSING
    return f"${usd:.3g}" if 0 < abs(usd) < 0.1 else f"${usd:,.2f}"


def plain(value: object) -> str:
    """Format any other value as text, with numbers as in ``number``."""
    return number(value) if isinstance(value, int | float) else str(value) or MISSING
