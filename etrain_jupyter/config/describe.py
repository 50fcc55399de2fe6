"""What a key of the body takes and means, in words, read off the schema.

Help, completion, the hints of an editor and the table in ``docs/cell.md`` all ask here, so that an
option is described in one place: its field in ``schema``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from etrain_jupyter.config.cell import EXAMPLES, keys_of
from etrain_jupyter.config.fields import Interval, Section, interval_words
from etrain_jupyter.config.schema import OptimizerConfig, TrainConfig
from etrain_jupyter.config.template import yaml_of
from etrain_jupyter.config.vocabulary import NAMED_LR, OPTIONS, SWITCHES, find_optimizer

KeyPath = tuple[str, ...]
"""Keys from the top of the body, as the cell spells them."""

TOP: KeyPath = ()
OPTIMIZER: KeyPath = ("optimizer",)
METRICS: KeyPath = ("metrics",)

BOOLEANS = ("true", "false")
COUNTED = ("steps", "epochs", "s", "min", "h")
"""Units that an interval may be written in."""

_USUAL = ("model", "data", "loss", "optimizer", "batch", "epochs", "workers")
"""What stands in the example of a body."""
_KINDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "group of names",
}
_INTERVALS = ("1 epoch", "200 steps", "5 min")
_BOUNDS = {"ge": "{} or more", "gt": "above {}", "lt": "below {}"}


@dataclass(frozen=True, kw_only=True)
class KeyHelp:
    """One key, described."""

    path: KeyPath
    takes: str
    """What its value is, for example ``whole number, 1 or more``."""
    meaning: str
    default: str = ""
    """As the cell spells it; empty if it is required, or if leaving it out means something else
    than any value."""
    is_required: bool = False
    words: tuple[str, ...] = ()
    """The words that it takes, all of them or the usual ones."""
    example: str = ""
    """A line of a body."""

    @property
    def name(self) -> str:
        """``batch.global``."""
        return ".".join(self.path)

    @property
    def facts(self) -> str:
        """What it takes and what holds without it, in one phrase."""
        end = "; required" if self.is_required else ""
        return f"{self.takes}{end}" + (f"; default {self.default}" if self.default else "")

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.facts}", "", self.meaning]
        if self.words:
            lines += ["", f"Values: {', '.join(self.words)}"]
        if self.example:
            lines += ["", f"Example: {self.example}"]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return it for front ends that render Markdown."""
        parts = [f"**{self.name}** — {self.facts}", self.meaning]
        if self.words:
            parts.append("Values: " + ", ".join(f"`{word}`" for word in self.words))
        if self.example:
            parts.append(f"```yaml\n{self.example}\n```")
        return "\n\n".join(parts)


# ------------------------------------------------------------------------------------ where it is


def group_at(path: KeyPath) -> type[Section] | None:
    """Return the group of keys that a path opens, or None if it opens none."""
    group: type[Section] | None = TrainConfig
    for key in path:
        if group is None or group is Interval:
            return None
        group = keys_of(group).get(key)
    return group


def opens_group(path: KeyPath) -> bool:
    """Tell whether keys may stand below a path."""
    return path == METRICS or group_at(path) is not None


def field_at(path: KeyPath) -> FieldInfo | None:
    """Return the field behind a path; that of ``eval`` for ``eval.every``."""
    if path[1:] == ("every",) and group_at(path[:1]) is Interval:
        path = path[:1]
    group = group_at(path[:-1]) if path else None
    if group is None or group is Interval:
        return None
    fields = group.model_fields.items()
    return next((info for name, info in fields if (info.alias or name) == path[-1]), None)


def keys_at(path: KeyPath, given: Mapping[str, str], *, top: Mapping[str, Any]) -> list[str]:
    """Return the keys that may still be added to a group, in the order of the schema.

    Args:
        path: The group.
        given: Its keys that are there already, with their text.
        top: The keys of the whole body; those of its groups lie in mappings.
    """
    group = group_at(path)
    if group is Interval:
        return [] if "every" in given else ["every"]
    if group is None:
        return []
    known = list(keys_of(group))
    if group is OptimizerConfig:
        known = _optimizer_keys(known, given)
    free = [key for key in known if key not in given]
    return [key for key in free if not _excludes(path, key, known, given, top)]


def _optimizer_keys(known: list[str], given: Mapping[str, str]) -> list[str]:
    if given.get("reference"):
        return ["reference"]
    name = find_optimizer(given.get("name") or "AdamW")
    own = [key for key in known if key not in ("options", "reference")]
    return [*own, *sorted(OPTIONS.get(name, ()))]


def _excludes(
    path: KeyPath, key: str, known: list[str], given: Mapping[str, str], top: Mapping[str, Any]
) -> bool:
    """Tell whether a key that is given rules this one out."""
    if any(other in given for other in _rivals(path, key)):
        return True
    if any(other in given and key in _rivals(path, other) for other in known):
        return True
    # Such a key belongs to an alternative in another group, and is refused without it.
    group, _, instead = _extra(path, key, "instead_of").partition(".")
    other = top.get(group)
    return bool(instead) and isinstance(other, Mapping) and not _has_rival_of(group, instead, other)


def _has_rival_of(group: str, key: str, given: Mapping[str, Any]) -> bool:
    return any(_extra((group,), other, "instead_of") == key for other in given)


def _rivals(path: KeyPath, key: str) -> list[str]:
    return [*_extra(path, key, "instead_of").split(), *_extra(path, key, "not_with").split()]


def _extra(path: KeyPath, key: str, name: str) -> str:
    info = field_at((*path, key))
    extra = info.json_schema_extra if info else None
    return str(extra.get(name, "")) if isinstance(extra, dict) else ""


# ------------------------------------------------------------------------------------ what it takes


def accepts(path: KeyPath, value: Any, *, beside: Mapping[str, Any] | None = None) -> bool:
    """Tell whether a key takes a value, whatever the keys of other groups say.

    ``beside`` are keys of its own group that matter for it.
    """
    if path[1:] == ("every",) and group_at(path[:1]) is Interval:
        path = path[:1]
    group = group_at(path[:-1])
    if group is None:
        return path[:-1] == METRICS and isinstance(value, str)
    try:
        group.model_validate({**(beside or {}), path[-1]: value})
    except ValidationError as exc:
        return not any(_is_about(error, path[-1]) for error in exc.errors(include_url=False))
    return True


def _is_about(error: ErrorDetails, key: str) -> bool:
    where = error.get("ctx", {}).get("path") or error["loc"]
    return key in where


def is_reference(path: KeyPath) -> bool:
    """Tell whether a key takes a Python expression over the notebook's names."""
    if path == OPTIMIZER or (path[:-1] == METRICS and len(path) > 1):
        return True
    info = field_at(path)
    return info is not None and _is_reference(info)


def _is_reference(info: FieldInfo) -> bool:
    return any(
        isinstance(item, BeforeValidator) and "reference" in getattr(item.func, "__name__", "")
        for item in info.metadata
    )


def is_interval(path: KeyPath) -> bool:
    """Tell whether a key takes a number with a unit."""
    info = field_at(path)
    if info is None:
        return False
    return Interval in _parts(info.annotation) or any(map(interval_words, info.examples or ()))


def words_of(path: KeyPath) -> tuple[str, ...]:
    """Return the words that a key takes: all of an enumeration, else the usual ones."""
    if path == (*OPTIMIZER, "name"):
        return tuple(NAMED_LR)
    if path[:-1] == OPTIMIZER and path[-1] in SWITCHES:
        return BOOLEANS
    info = field_at(path)
    if info is None or _is_reference(info):
        return ()
    parts, examples = _parts(info.annotation), info.examples or []
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    if bool in parts or any(isinstance(example, bool) for example in examples):
        words += BOOLEANS
    if str not in parts:
        words += [example for example in examples if isinstance(example, str)]
    if Interval in parts:
        units = {word.split()[-1] for word in words}
        words += [word for word in _INTERVALS if word.split()[-1] not in units]
    return tuple(dict.fromkeys(word for word in words if _takes_word(path, word)))


def units_of(path: KeyPath, number: str) -> list[str]:
    """Return what may follow a number: ``["steps", "epochs"]``, ``["step", "epoch"]`` after 1."""
    if not is_interval(path):
        return []
    one = {"steps": "step", "epochs": "epoch"} if number == "1" else {}
    return [one.get(unit, unit) for unit in COUNTED if accepts(path, f"{number} {unit}")]


def _takes_word(path: KeyPath, word: str) -> bool:
    return accepts(path, {"true": True, "false": False}.get(word, word))


def _parts(annotation: Any) -> set[Any]:
    """Return the members of a union, without None; the type itself if it is none."""
    is_plain = isinstance(annotation, type) or get_origin(annotation) in (Literal, dict)
    parts = (annotation,) if is_plain else get_args(annotation)
    return {part for part in parts if part is not NoneType}


def _takes(path: KeyPath, info: FieldInfo, words: tuple[str, ...]) -> str:
    """Return in words what the field's annotation says."""
    if _is_reference(info):
        return "Python expression"
    kinds: list[str] = []
    for part in sorted(_parts(info.annotation), key=str):
        kind = get_origin(part) or part
        if kind is Literal:
            kinds += get_args(part)
        elif kind is Interval:
            kinds += [*units_of(path, "2")[:2], *(["time"] if "min" in units_of(path, "2") else [])]
        elif isinstance(kind, type) and issubclass(kind, Section):
            kinds.append("group of keys")
        else:
            kinds.append(_KINDS[kind])
    if is_interval(path) and Interval not in _parts(info.annotation):
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
        # The one bound beyond is that of a seed, which is no number that anybody means.
        if hasattr(item, name) and abs(getattr(item, name)) < 2**31
    ]
    *first, last = kinds
    return ", ".join([f"{', '.join(first)} or {last}" if first else last, *bounds])


# -------------------------------------------------------------------------------------- described


def describe(path: KeyPath, *, optimizer: str = "AdamW") -> KeyHelp | None:
    """Return what is to be said of a key, or None if there is no such key.

    ``optimizer`` is the one of the cell, whose options may be asked for.
    """
    name = find_optimizer(optimizer)
    if path[:-1] == OPTIMIZER and len(path) == 2 and path[-1] in OPTIONS.get(name, ()):
        return _describe_option(path, name)
    if path[:-1] == METRICS and len(path) == 2:
        whole = field_at(METRICS)
        meaning = _meaning(whole) if whole else ""
        return KeyHelp(path=path, takes="Python expression", meaning=meaning)
    return _describe_field(path)


@cache
def _describe_field(path: KeyPath) -> KeyHelp | None:
    info = field_at(path)
    if info is None:
        return None
    words = words_of(path)
    return KeyHelp(
        path=path,
        takes=_takes(path, info, words),
        meaning=_meaning(info),
        default=_default(info),
        is_required=info.is_required(),
        words=words if not _is_only_boolean(words) else (),
        example=_example(path, info),
    )


def _is_only_boolean(words: tuple[str, ...]) -> bool:
    return words == BOOLEANS


def _describe_option(path: KeyPath, name: str) -> KeyHelp:
    home = "pytorch_optimizer" if name in ("LAMB", "LARS") else "torch.optim"
    takes = _KINDS[bool] if path[-1] in SWITCHES else "number or list of numbers"
    return KeyHelp(
        path=path,
        takes=takes,
        meaning=f"Keyword of {home}.{name}, which gets it as it is.",
        example=f"optimizer: {{name: {name}, {path[-1]}: ...}}",
    )


def describe_optimizer(text: str) -> KeyHelp | None:
    """Return what is to be said of a name of an optimizer, or None if it is none."""
    name = find_optimizer(text)
    if name not in NAMED_LR:
        return None
    home = "pytorch_optimizer" if name in ("LAMB", "LARS") else "torch.optim"
    return KeyHelp(
        path=(*OPTIMIZER, "name"),
        takes=f"{home}.{name}",
        meaning=f"Learning rate without lr: {NAMED_LR[name]:g}. "
        f"Options: {', '.join(sorted(OPTIONS[name]))}.",
        example=f"optimizer: {{name: {name}, lr: {NAMED_LR[name]:g}}}",
    )


def _meaning(info: FieldInfo) -> str:
    return " ".join((info.description or "").replace("``", "`").split())


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True) if not info.is_required() else None
    if default is None or default == {} or (isinstance(default, Section) and not _is_every(info)):
        return ""
    if isinstance(default, float):
        return f"{default:g}"
    return yaml_of(str(default) if isinstance(default, Interval) else default)


def _is_every(info: FieldInfo) -> bool:
    return info.annotation is Interval


def _example(path: KeyPath, info: FieldInfo) -> str:
    if len(path) == 1 and path[0] in EXAMPLES:
        return EXAMPLES[path[0]]
    value = info.examples[0] if info.examples else info.get_default(call_default_factory=True)
    line = f"{path[-1]}: {yaml_of(str(value) if isinstance(value, Interval) else value)}"
    for key in reversed(path[:-1]):
        line = f"{key}: {{{line}}}"
    return line


def all_keys(path: KeyPath = TOP) -> Iterator[KeyHelp]:
    """Yield every key, groups before what is in them, in the order of the schema."""
    group = group_at(path)
    if group is None or group is Interval:
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


def keys_in_words(width: int = 100) -> str:
    """Return all keys with what they take and mean, for ``--help``."""
    blocks = []
    for key in all_keys():
        head = f"  {key.name.ljust(24)} {key.facts}"
        text = textwrap.fill(
            key.meaning, width, initial_indent=" " * 27, subsequent_indent=" " * 27
        )
        blocks.append(f"{head}\n{text}")
    return "\n".join(blocks)


def keys_as_table() -> str:
    """Return all keys as a table in Markdown, for ``docs/cell.md``."""
    rows = ["| key | takes | meaning |", "|---|---|---|"]
    for key in all_keys():
        meaning = key.meaning.replace("|", "\\|")
        rows.append(f"| `{key.name}` | {key.facts} | {meaning} |")
    return "\n".join(rows)
