"""Keys of the body, derived from the schema: where each key is allowed and what it accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from etrain_jupyter import plugin
from etrain_jupyter.config.cell import keys_of
from etrain_jupyter.config.fields import Interval, Section, interval_words
from etrain_jupyter.config.schema import OptimizerConfig, TrainConfig
from etrain_jupyter.config.vocabulary import NAMED_LR, OPTIONS, SWITCHES, find_optimizer

KeyPath = tuple[str, ...]
"""Path of keys from the top of the body, as spelled in the cell."""

OPTIMIZER: KeyPath = ("optimizer",)
METRICS: KeyPath = ("metrics",)

BOOLEANS = ("true", "false")
COUNTED = ("steps", "epochs", "s", "min", "h")
"""Units for intervals."""

_INTERVALS = ("1 epoch", "200 steps", "5 min")


@dataclass(frozen=True, kw_only=True)
class KeyHelp:
    """Description of one key."""

    path: KeyPath
    takes: str
    """Type and range of its value, for example ``whole number, 1 or more``."""
    meaning: str
    default: str = ""
    """Default value as spelled in the cell. Empty if the key is required, or if no value has the
    same effect as omitting the key."""
    is_required: bool = False
    words: tuple[str, ...] = ()
    """Accepted words: all members of an enumeration, or the common ones."""
    example: str = ""
    """Example line of a body."""

    @property
    def name(self) -> str:
        """Dotted name, for example ``batch.global``."""
        return ".".join(self.path)

    @property
    def facts(self) -> str:
        """Type and default, as one phrase."""
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
        """Return the description as Markdown."""
        parts = [f"**{self.name}** — {self.facts}", self.meaning]
        if self.words:
            parts.append("Values: " + ", ".join(f"`{word}`" for word in self.words))
        if self.example:
            parts.append(f"```yaml\n{self.example}\n```")
        return "\n\n".join(parts)


@dataclass(frozen=True, kw_only=True)
class ExtraGroup:
    """A group of keys that only the body of a plug-in's cell command has.

    One of its keys is a group in which every key is a name that the user defines. The expressions
    of the cell can use these names.
    """

    section: type[Section]
    """The other keys of the group."""
    names: KeyPath
    """Path of the group of names."""
    named: type[Section]
    """The group at each of these names."""
    describe: Callable[[KeyPath], KeyHelp | None]
    """Describes the group, the group of names, and a name in it; None for any other key."""
    forms: tuple[str, ...] = ()
    """Completions for the beginning of a name's value."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """Hints for keys of other tools, by their names in lower case."""


def extra_group(path: KeyPath) -> ExtraGroup | None:
    """Return the group of a plug-in that a path belongs to; None for any other path."""
    command = plugin.cells().get(path[0]) if path else None
    found: ExtraGroup | None = plugin.load(command.group) if command else None
    return found


# --------------------------------------------------------------------------- where a key is allowed


def group_at(path: KeyPath) -> type[Section] | None:
    """Return the group of keys at a path, or None if the path is not that of a group."""
    group: type[Section] | None = TrainConfig
    extra = extra_group(path)
    if extra is not None and path[:2] == extra.names:
        # The group of names has no fixed keys.
        group, path = (extra.named if len(path) > 2 else None), path[3:]
    elif extra is not None:
        group, path = extra.section, path[1:]
    for key in path:
        if group is None:
            return None
        group = keys_of(group).get(key)
    return group


def opens_group(path: KeyPath) -> bool:
    """Return whether there is a group of keys at a path."""
    extra = extra_group(path)
    names = extra.names if extra else ()
    return path in (METRICS, names) or group_at(path) is not None


def keys_in(path: KeyPath) -> list[str]:
    """Return all keys of a group, in schema order; empty if the path is not that of a group."""
    group = group_at(path)
    if group is None:
        return []
    extra = extra_group(path)
    first = [extra.names[-1]] if extra and len(path) == 1 else []
    return [*first, *keys_of(group)]


def field_at(path: KeyPath) -> FieldInfo | None:
    """Return the field at a path; None if there is none."""
    group = group_at(path[:-1]) if path else None
    if group is None:
        return None
    fields = group.model_fields.items()
    return next((info for name, info in fields if (info.alias or name) == path[-1]), None)


def keys_at(path: KeyPath, given: Mapping[str, str], *, top: Mapping[str, Any]) -> list[str]:
    """Return the keys that may still be added to a group, in schema order.

    ``given`` maps the group's keys to their text; ``top`` maps those of the body to text or keys.
    """
    group = group_at(path)
    if group is None:
        return []
    known = keys_in(path)
    if group is OptimizerConfig and given.get("reference"):
        known = ["reference"]
    elif group is OptimizerConfig:
        name = find_optimizer(given.get("name") or "AdamW")
        known = [key for key in known if key not in ("options", "reference")]
        known += sorted(OPTIONS.get(name, ()))
    free = [key for key in known if key not in given]
    return [key for key in free if not _excludes(path, key, known, given, top)]


def _excludes(
    path: KeyPath, key: str, known: list[str], given: Mapping[str, str], top: Mapping[str, Any]
) -> bool:
    """Return whether one of the given keys rules out this key."""
    if any(other in given for other in _rivals(path, key)):
        return True
    # A conflict is declared on only one of the two keys, so check both directions.
    if any(other in given and key in _rivals(path, other) for other in known):
        return True
    # Such a key is valid only with an alternative in another group, for example scaling with
    # batch.per_worker.
    group, _, instead = _extra(path, key, "instead_of").partition(".")
    others = top.get(group)
    if not instead or not isinstance(others, Mapping):
        return False
    return not any(_extra((group,), other, "instead_of") == instead for other in others)


def _rivals(path: KeyPath, key: str) -> list[str]:
    return [*_extra(path, key, "instead_of").split(), *_extra(path, key, "not_with").split()]


def _extra(path: KeyPath, key: str, name: str) -> str:
    # The schema declares "instead_of" and "not_with" next to each field.
    info = field_at((*path, key))
    extra = info.json_schema_extra if info else None
    return str(extra.get(name, "")) if isinstance(extra, dict) else ""


# -------------------------------------------------------------------------------- values it accepts


def accepts(path: KeyPath, value: Any) -> bool:
    """Return whether a key accepts a value, regardless of the other keys."""
    group = group_at(path[:-1])
    if group is None:
        return path[:-1] == METRICS and isinstance(value, str)
    try:
        # Use the schema itself, so that completion never offers a value that a submit rejects.
        # Ignore errors about other keys, such as missing ones.
        group.model_validate({path[-1]: value})
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        return not any(path[-1] in (e.get("ctx", {}).get("path") or e["loc"]) for e in errors)
    return True


def is_reference(path: KeyPath) -> bool:
    """Return whether a key accepts a Python expression over the notebook's names."""
    if path == OPTIMIZER or (path[:-1] == METRICS and len(path) > 1):
        return True
    info = field_at(path)
    return info is not None and takes_reference(info)


def takes_reference(info: FieldInfo) -> bool:
    """Return whether a field accepts a Python expression."""
    return any(
        isinstance(item, BeforeValidator) and "reference" in getattr(item.func, "__name__", "")
        for item in info.metadata
    )


def is_interval(path: KeyPath) -> bool:
    """Return whether a key accepts a number with a unit."""
    info = field_at(path)
    if info is None:
        return False
    return Interval in parts_of(info.annotation) or any(map(interval_words, info.examples or ()))


def words_of(path: KeyPath) -> tuple[str, ...]:
    """Return the words that a key accepts: all members of an enumeration, or the common ones."""
    if path == (*OPTIMIZER, "name"):
        return tuple(NAMED_LR)
    if path[:-1] == OPTIMIZER and path[-1] in SWITCHES:
        return BOOLEANS
    info = field_at(path)
    if info is None or takes_reference(info):
        return ()
    parts, examples = parts_of(info.annotation), info.examples or []
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    if bool in parts or any(isinstance(example, bool) for example in examples):
        words += BOOLEANS
    if str not in parts:
        words += [example for example in examples if isinstance(example, str)]
    if Interval in parts:
        units = {word.split()[-1] for word in words}
        # Examples of intervals, for units that the schema's own examples do not show.
        words += [word for word in _INTERVALS if word.split()[-1] not in units]
    values = {"true": True, "false": False}
    return tuple(dict.fromkeys(word for word in words if accepts(path, values.get(word, word))))


def units_of(path: KeyPath, number: str) -> list[str]:
    """Return the units for a number: ``["steps", "epochs"]``, or ``["step", "epoch"]`` after 1."""
    if not is_interval(path):
        return []
    one = {"steps": "step", "epochs": "epoch"} if number == "1" else {}
    return [one.get(unit, unit) for unit in COUNTED if accepts(path, f"{number} {unit}")]


def parts_of(annotation: Any) -> set[Any]:
    """Return the members of a union without None; for any other type, the type itself.

    A group that can also be written as an interval counts as both.
    """
    # For a Literal or a dict, get_args returns its words or types, not members of a union.
    is_plain = isinstance(annotation, type) or get_origin(annotation) in (Literal, dict)
    parts = (annotation,) if is_plain else get_args(annotation)
    found = {part for part in parts if part is not NoneType}
    groups = (part for part in found if isinstance(part, type) and issubclass(part, Section))
    return found | {Interval} if any(group.interval for group in groups) else found
