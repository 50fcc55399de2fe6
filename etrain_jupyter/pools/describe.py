"""The keys of a kind of pool as a table, for its page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import PlainSerializer
from pydantic.fields import FieldInfo

from etrain_jupyter.config.fields import Section

UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))


def keys_as_table(spec: type[Section]) -> str:
    """Return every key of a pool with its default and its meaning, in Markdown."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in _keys_of(spec):
        meaning = " ".join((field.description or "").replace("``", "`").split())
        rows.append(f"| `{name}` | {_default_of(field)} | {meaning} |")
    return "\n".join(rows)


def _keys_of(section: type[Section], before: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for key, field in section.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        # An optional section is a union: `GpuSpec | None`.
        groups = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if groups:
            yield from _keys_of(groups[0], f"{before}{key}.")
        else:
            yield f"{before}{key}", field


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    # Only durations have a serializer, see `spec_fields`.
    if value is not None and any(isinstance(item, PlainSerializer) for item in field.metadata):
        return _time(value)
    return _plain(value)


def _plain(value: Any) -> str:
    """Return a value as written in the file; empty for a default that needs no entry."""
    if value in (None, (), {}):
        return ""
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _time(seconds: float) -> str:
    """Format a duration in the largest unit that divides it: ``90 s``, ``15 min``.

    >>> _time(43200.0), _time(120.0), _time(90.0)
    ('12 h', '2 min', '90 s')
    """
    unit, size = next((unit, size) for unit, size in UNITS if seconds % size == 0)
    return f"{seconds / size:g} {unit}"
