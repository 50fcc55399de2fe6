"""Completions at the cursor, and the notebook facts from which they are computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Completion:
    """One completion."""

    text: str
    """Replacement for the text from ``Offers.start`` to the cursor."""
    kind: str
    """``command``, ``flag``, ``key``, ``value``, ``unit``, ``job``, ``pool``, ``cluster``, or a
    kind of Python name such as ``function``."""


@dataclass(frozen=True)
class Offers:
    """Completions at the cursor, most likely first."""

    start: int
    """Offset in the cell at which the replaced text starts."""
    items: tuple[Completion, ...] = ()


class Facts(Protocol):
    """Facts about a notebook that are available without running any of its code."""

    @property
    def names(self) -> Mapping[str, Any]:
        """The notebook's names."""

    def jobs(self) -> Sequence[str]:
        """Names and ids of jobs, newest first; incomplete if listing them takes too long."""

    def pools(self) -> Sequence[str]:
        """Names of pools."""

    def clusters(self) -> Sequence[str]:
        """Ids of the user's clusters on this machine."""

    def complete_python(self, code: str) -> Offers:
        """Complete an expression at its end; ``start`` is an offset in the expression."""


def matching(candidates: Iterable[str], prefix: str, kind: str) -> list[Completion]:
    """Return the candidates that start with a prefix, ignoring case.

    >>> matching(["AdamW", "SGD"], "ad", "value")
    [Completion(text='AdamW', kind='value')]
    """
    prefix = prefix.casefold()
    return [Completion(text, kind) for text in candidates if text.casefold().startswith(prefix)]
