"""Descriptions of the keys of a cell's body: accepted values, default, meaning and example.

The help, the editor's hints, the template and the documentation's table all use this module, so an
option is described in one place, its field in ``schema``.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from etrain_jupyter.config.cell import EXAMPLES, keys_of, shorthand_at
from etrain_jupyter.config.fields import Interval, Section
from etrain_jupyter.config.keys import (
    BOOLEANS,
    METRICS,
    OPTIMIZER,
    KeyHelp,
    KeyPath,
    extra_group,
    field_at,
    group_at,
    is_interval,
    parts_of,
    takes_reference,
    units_of,
    words_of,
)
from etrain_jupyter.config.schema import OptimizerConfig, TrainConfig
from etrain_jupyter.config.vocabulary import DEFAULT_LR, NAMED_LR, OPTIONS, SWITCHES, find_optimizer

COMMENT_COLUMN = 40
"""Column of the comments, so that they line up."""
_USUAL = ("model", "data", "loss", "optimizer", "batch", "epochs", "workers")
"""Keys shown in the example body."""
_KINDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "group of names",
    list: "list",
}
_BOUNDS = {"ge": "{} or more", "gt": "above {}", "lt": "below {}"}


def _takes(path: KeyPath, info: FieldInfo, words: tuple[str, ...]) -> str:
    """Describe the accepted values of a field from its annotation."""
    if takes_reference(info):
        return "Python expression"
    kinds: list[str] = []
    # Sorted, because a set has no order and the help must not change from run to run.
    for part in sorted(parts_of(info.annotation), key=str):
        kind = get_origin(part) or part
        if kind is Literal:
            kinds += get_args(part)
        elif kind is Interval:
            kinds += [*units_of(path, "2")[:2], *(["time"] if "min" in units_of(path, "2") else [])]
        elif isinstance(kind, type) and issubclass(kind, Section):
            kinds += [_KINDS[int]] * bool(kind.shorthand) + ["group of keys"]
        else:
            kinds.append(_KINDS[kind])
    # log.every and scaling.ramp are stored as integers, but accept "10 steps" as well.
    if is_interval(path) and Interval not in parts_of(info.annotation):
        kinds.append("steps")
    if "true" in words and _KINDS[bool] not in kinds:
        kinds.append(_KINDS[bool])
    if "auto" in words and "auto" not in kinds:
        kinds.append("auto")
    if path == OPTIMIZER:
        kinds += ["name", "Python expression"]
    bounds = [
        text.format(f"{getattr(item, name):g}")
        for item in info.metadata
        for name, text in _BOUNDS.items()
        # Only the seed has a larger bound, which is not worth showing.
        if hasattr(item, name) and abs(getattr(item, name)) < 2**31
    ]
    *first, last = kinds
    return ", ".join([f"{', '.join(first)} or {last}" if first else last, *bounds])


# -------------------------------------------------------------------------------------- described


def describe(path: KeyPath, *, optimizer: str = "AdamW") -> KeyHelp | None:
    """Return the description of a key; None if the key is unknown.

    ``optimizer`` is the optimizer named in the cell; its options are keys as well.
    """
    # Optimizer options and metric names are not fields in the schema.
    name = find_optimizer(optimizer)
    if path[:-1] == OPTIMIZER and len(path) == 2 and path[-1] in OPTIONS.get(name, ()):
        return _describe_option(path, name)
    if path[:-1] == METRICS and len(path) == 2:
        whole = field_at(METRICS)
        meaning = _meaning(whole) if whole else ""
        return KeyHelp(path=path, takes="Python expression", meaning=meaning)
    extra = extra_group(path)
    found = extra.describe(path) if extra else None
    return found or _describe_field(path)


@cache
def _describe_field(path: KeyPath) -> KeyHelp | None:
    info = field_at(path)
    if info is None:
        return None
    words, key = words_of(path), shorthand_at(path)
    return KeyHelp(
        path=path,
        takes=_takes(path, info, words),
        meaning=_meaning(info) + (f" A number N is short for {{{key}: N}}." if key else ""),
        default=_default(info),
        is_required=info.is_required(),
        words=words if words != BOOLEANS else (),
        example=_example(path, info),
    )


def _describe_option(path: KeyPath, name: str) -> KeyHelp:
    home = "pytorch_optimizer" if name in ("LAMB", "LARS") else "torch.optim"
    takes = _KINDS[bool] if path[-1] in SWITCHES else "number or list of numbers"
    return KeyHelp(
        path=path,
        takes=takes,
        meaning=f"Keyword argument of {home}.{name}, passed unchanged.",
        example=f"optimizer: {{name: {name}, {path[-1]}: ...}}",
    )


def describe_optimizer(text: str) -> KeyHelp | None:
    """Return the description of an optimizer, or None if the name is unknown."""
    name = find_optimizer(text)
    if name not in NAMED_LR:
        return None
    home = "pytorch_optimizer" if name in ("LAMB", "LARS") else "torch.optim"
    return KeyHelp(
        path=(*OPTIMIZER, "name"),
        takes=f"{home}.{name}",
        meaning=f"Default learning rate: {NAMED_LR[name]:g}. "
        f"Options: {', '.join(sorted(OPTIONS[name]))}.",
        example=f"optimizer: {{name: {name}, lr: {NAMED_LR[name]:g}}}",
    )


def _meaning(info: FieldInfo) -> str:
    return " ".join((info.description or "").replace("``", "`").split())


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True) if not info.is_required() else None
    if isinstance(default, Section) and default.interval:
        default = getattr(default, default.interval)
    # Null or an empty group means the same as no key, so the help shows no default.
    is_group = isinstance(default, Section) and not isinstance(default, Interval)
    if default is None or default == {} or is_group:
        return ""
    if isinstance(default, float):
        return f"{default:g}"
    return yaml_of(str(default) if isinstance(default, Interval) else default)


def _example(path: KeyPath, info: FieldInfo) -> str:
    # Some examples are written by hand, where the schema's first example would explain little.
    if len(path) == 1 and path[0] in EXAMPLES:
        return EXAMPLES[path[0]]
    value = info.examples[0] if info.examples else info.get_default(call_default_factory=True)
    # Write nested groups on one line: `checkpoint: {best: {metric: accuracy}}`.
    line = f"{path[-1]}: {yaml_of(str(value) if isinstance(value, Interval) else value)}"
    for key in reversed(path[:-1]):
        line = f"{key}: {{{line}}}"
    return line


def all_keys(path: KeyPath = ()) -> Iterator[KeyHelp]:
    """Yield every key in schema order, each group before its keys."""
    group = group_at(path)
    if group is None:
        return
    for key in keys_of(group):
        found = describe((*path, key))
        if found is not None and found.path != (*OPTIMIZER, "options"):
            yield found
            yield from all_keys(found.path)


def example_body() -> str:
    """Return a short body that shows the usual keys."""
    found = (describe((key,)) for key in _USUAL)
    return "\n".join(key.example for key in found if key is not None) + "\n"


def keys_in_words() -> str:
    """Return the description of all keys as text, for ``--help``."""
    blocks = []
    for key in all_keys():
        head = f"  {key.name.ljust(24)} {key.facts}"
        text = textwrap.fill(key.meaning, 100, initial_indent=" " * 27, subsequent_indent=" " * 27)
        blocks.append(f"{head}\n{text}")
    return "\n".join(blocks)


# --- template ---


def template() -> str:
    """Return a commented body for ``%%etrain distributed``.

    Required keys and the loss are active lines. ``# key: value`` shows a default; remove the ``# ``
    to change it. ``# or`` marks an alternative to the line above.
    """
    return "\n".join(_lines_of(TrainConfig)) + "\n"


def _lines_of(section: type[Section], *, indent: str = "", off: bool = False) -> Iterator[str]:
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
            yield _commented(f"{start}{key}: {info.default}", info)
        elif kind is OptimizerConfig:
            yield _commented(f"{start}{key}: {{name: AdamW, lr: {DEFAULT_LR['AdamW']}}}", info)
        elif isinstance(kind, type) and issubclass(kind, Section):
            yield _commented(f"{start}{key}:", info)
            yield from _lines_of(kind, indent=indent + "  ", off=bool(mark))
        else:
            # Prefer the example: some defaults, such as None, do not show which values the key
            # accepts.
            shown = info.examples[0] if info.examples else info.default
            yield _commented(f"{start}{key}: {yaml_of(shown)}", info)


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


def _commented(text: str, info: FieldInfo) -> str:
    meaning = " ".join((info.description or "").split()).rstrip(".")
    required = "; required" if info.is_required() else ""
    return f"{text.ljust(COMMENT_COLUMN)}  # {meaning}{required}"
