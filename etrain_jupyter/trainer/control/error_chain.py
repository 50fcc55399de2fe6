"""Walk the causes of an exception."""

from __future__ import annotations

from collections.abc import Iterator


def chain_of(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, newest first."""
    # User code may create a cycle with ``raise ... from``.
    seen: set[int] = set()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
