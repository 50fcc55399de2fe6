"""What is offered at the cursor, and what a notebook is asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Completion:
    """One completion."""

    text: str
    """What replaces the text from ``Offers.start`` to the cursor."""
    kind: str
    """``command``, ``flag``, ``key``, ``value``, ``unit``, ``job``, ``pool``, ``cluster``, or what
    Python calls a name."""


@dataclass(frozen=True)
class Offers:
    """The completions at a place, the likeliest first."""

    start: int
    """Offset in the cell."""
    items: tuple[Completion, ...] = ()


class Facts(Protocol):
    """What can be known of a notebook without running anything in it."""

    @property
    def names(self) -> Mapping[str, Any]:
        """The notebook's names."""

    def jobs(self) -> Sequence[str]:
        """Names and ids of jobs, the newest first; what is not known at once is left out."""

    def pools(self) -> Sequence[str]:
        """The names of pools."""

    def clusters(self) -> Sequence[str]:
        """The ids of living clusters."""

    def complete_python(self, code: str) -> Offers:
        """Return what Python offers at the end of an expression; ``start`` is an offset in it."""


def matching(words: Iterable[str], begun: str, kind: str) -> list[Completion]:
    """Return those of ``words`` that go on with what is begun, in any case.

    >>> matching(["AdamW", "SGD"], "ad", "value")
    [Offer(text='AdamW', kind='value')]
    """
    begun = begun.casefold()
    return [Completion(word, kind) for word in words if word.casefold().startswith(begun)]
