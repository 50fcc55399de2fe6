"""Object storage: one client for S3 and compatible services."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from etrain_jupyter.errors import EtrainError, StoreError


@contextmanager
def store_errors_as(kind: type[EtrainError], text: str = "{}") -> Iterator[None]:
    """Raise a ``StoreError`` of the block, or of a decorated function, as another error."""
    try:
        yield
    except StoreError as exc:
        raise kind(text.format(exc)) from exc
