"""Template for a cell's body, generated from the schema: every key, its default and its meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from etrain_jupyter.config.fields import Interval, Section
from etrain_jupyter.config.schema import OptimizerConfig, TrainConfig
from etrain_jupyter.config.vocabulary import DEFAULT_LR

COMMENT_COLUMN = 40
"""Column of the comments, so that they line up."""


def template() -> str:
    """Return a commented body for ``%%etrain distributed``.

    Required keys and the loss are active lines. ``# key: value`` shows a default; remove the ``# ``
    to change it. ``# or`` marks an alternative to the line above.
    """
    return "\n".join(_section(TrainConfig)) + "\n"


def _section(section: type[Section], *, indent: str = "", off: bool = False) -> Iterator[str]:
    """Yield the lines of a group; ``off`` comments out all of its keys."""
    for name, info in section.model_fields.items():
        key, kind = info.alias or name, info.annotation
        mark = _mark(info)
        if mark in ("", "# "):
            # Align a block's comment markers in one column, so that an editor can uncomment the
            # block at once.
            start = f"# {indent}" if off else f"{indent}{mark}"
        else:
            start = f"{indent}{mark}"
        if kind is Interval:
            yield _line(f"{start}{key}: {info.default}", info)
        elif kind is OptimizerConfig:
            yield _line(f"{start}{key}: {{name: AdamW, lr: {DEFAULT_LR['AdamW']}}}", info)
        elif isinstance(kind, type) and issubclass(kind, Section):
            yield _line(f"{start}{key}:", info)
            yield from _section(kind, indent=indent + "  ", off=bool(mark))
        else:
            # Prefer the example: some defaults, such as None, do not show which values the key
            # accepts.
            shown = info.examples[0] if info.examples else info.default
            yield _line(f"{start}{key}: {yaml_of(shown)}", info)


def _mark(info: FieldInfo) -> str:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    # Write them as comments, because only one of the two keys may be given.
    if "instead_of" in extra:
        return "# or "
    return "" if info.is_required() or "usual" in extra else "# "


def yaml_of(value: Any) -> str:
    """Return a value as spelled in the cell, on one line."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_of(inner)}" for key, inner in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def _line(text: str, info: FieldInfo) -> str:
    meaning = " ".join((info.description or "").split()).rstrip(".")
    required = "; required" if info.is_required() else ""
    return f"{text.ljust(COMMENT_COLUMN)}  # {meaning}{required}"
