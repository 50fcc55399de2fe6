"""A body to start from, printed from the schema: every key, its default, and what it means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from etrain_jupyter.config.fields import Interval, Later, Section
from etrain_jupyter.config.schema import OptimizerConfig, TrainConfig

COMMENT_COLUMN = 40
"""Where the meanings begin, so that they stand under each other."""


def template() -> str:
    """Return a commented body for ``%%etrain distributed``.

    What must be given is there; ``# key: value`` is a default that can be changed once the ``# ``
    is removed;
    ``# or`` is an alternative to the line above; ``# later:`` comes with a later version and is
    refused until then.
    """
    return "\n".join(_section(TrainConfig, indent="")) + "\n"


def _section(section: type[Section], *, indent: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        key, kind = info.alias or name, info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _group(key, kind, info, indent)
        else:
            mark = _mark(info)
            yield _line(f"{indent}{mark}{key}: {_shown(info)}", info)


def _group(key: str, kind: type[Section], info: FieldInfo, indent: str) -> Iterator[str]:
    mark = "" if info.is_required() else "# "
    if kind is Interval:
        yield _line(f"{indent}{mark}{key}: {{every: {info.default}}}", info)
    elif kind is OptimizerConfig:
        default = OptimizerConfig()
        yield _line(f"{indent}{mark}{key}: {{name: {default.name}, lr: {default.lr}}}", info)
    else:
        yield _line(f"{indent}{mark}{key}:", info)
        # Within a group that is commented out, the mark stays in the group's column: one block to
        # uncomment.
        for line in _section(kind, indent="  "):
            body = line.removeprefix("  ")
            later = body.startswith(("# later: ", "# or "))
            text = body if later or not mark else body.removeprefix("# ")
            yield f"{indent}  {text}" if later or not mark else f"{indent}# {'  '}{text}"


def _mark(info: FieldInfo) -> str:
    later = next((m for m in info.metadata if isinstance(m, Later)), None)
    # A field that takes nothing but its default is later as a whole; one with an empty ``accept``
    # is a part of it.
    if later is not None and later.accept:
        return "# later: "
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    if "instead_of" in extra:
        return "# or "
    return "" if info.is_required() else "# "


def _shown(info: FieldInfo) -> str:
    value = info.examples[0] if info.examples else info.default
    return _yaml(value)


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(inner)}" for key, inner in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def _line(text: str, info: FieldInfo) -> str:
    meaning = " ".join((info.description or "").split())
    required = "; required" if info.is_required() else ""
    return f"{text.ljust(COMMENT_COLUMN)}  # {meaning.rstrip('.')}{required}"
