"""Building blocks of the schema: base class, intervals, references and validation errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from etrain_jupyter.config.source_map import did_you_mean, in_words


def fault(
    message: str, *, hint: str = "", path: tuple[str, ...] | None = None, at_key: bool = False
) -> PydanticCustomError:
    """Build an error with its final message; ``path``, if given, points at another key."""
    context = {"message": message, "hint": hint, "path": path, "at_key": at_key}
    # pydantic formats the template with the context; `cell` reads the context itself.
    return PydanticCustomError("etrain", "{message}", context)


def check_word(value: Any, known: Sequence[str], *, usual: str = "", hint: str = "") -> Any:
    """Return ``value`` if it is an accepted word; otherwise raise a validation error.

    The error suggests ``hint``, else a similar word, else ``usual``.
    """
    if value in known:
        return value
    hint = hint or did_you_mean(str(value), known) or f"write {usual}"
    words = f"{', '.join(known[:-1])} or {known[-1]}"
    raise fault(f"{{key}} must be {words}, not {in_words(value)}", hint=hint)


def words(also: Mapping[Any, Any] | None = None, /, **usual: str) -> Any:
    """Return a validator for fields of a ``Section`` that are enumerations.

    Args:
        also: Values that stand for others, such as ``{None: "none"}``.
        usual: Fields, each with the word to suggest if no accepted word is similar.
    """

    def check(cls: type[Section], value: Any, info: ValidationInfo) -> Any:
        if also and (value is None or isinstance(value, str)) and value in also:
            return also[value]
        name = str(info.field_name)
        kind = cls.model_fields[name].annotation
        known = get_args(kind) if get_origin(kind) is Literal else get_args(get_args(kind)[0])
        return check_word(value, known, usual=f"{name}: {usual[name]}")

    return field_validator(*usual, mode="before")(check)


class Section(BaseModel):
    """Base class of all groups of keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        # Do not convert a quoted '3' to a number: YAML already distinguishes text from numbers.
        strict=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )
    shorthand: ClassVar[str] = ""
    """Key set by a bare integer, such as ``global`` for ``batch: 32``; empty if there is none."""
    interval: ClassVar[str] = ""
    """Key set by a bare interval, such as ``every`` for ``eval: 1 epoch``; empty if there is
    none."""

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, data: Any) -> Any:
        if cls.shorthand and isinstance(data, int) and not isinstance(data, bool):
            return {cls.shorthand: data}
        return data


class Interval(Section):
    """Interval: ``200 steps``, ``1 epoch``, ``30 s``, ``5 min`` or ``2 h``."""

    value: float
    """Number of units; positive, and an integer for steps."""
    unit: Literal["steps", "epochs", "s"]
    """Unit; minutes and hours are converted to seconds."""

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Read ``200 steps``.

        Raises:
            ValidationError: If the text is not a valid interval.

        >>> Interval.parse("5 min")
        Interval(value=300.0, unit='s')
        """
        return cls.model_validate(text)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        # The fields themselves were passed from Python.
        if isinstance(data, Mapping) and set(data) == {"value", "unit"}:
            return data
        return interval_parts(data)

    def num_passed(self, *, step: int, position: int, num_train: int) -> int:
        """Return the number of multiples up to ``step``; 0 for an interval in seconds.

        By then, ``position`` samples have been trained on, ``num_train`` per epoch.
        """
        if self.unit == "s":
            return 0
        # The interval may be a fraction, so tolerate rounding errors: 0.1 + 0.2 is not exactly 0.3.
        passed = step if self.unit == "steps" else position / num_train
        return math.floor(passed / self.value + 1e-9)

    @model_serializer
    def _to_text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        unit = {1: {"steps": "step", "epochs": "epoch"}}.get(int(self.value), {}).get(self.unit)
        whole = self.value == int(self.value)
        number = str(int(self.value)) if whole else repr(self.value)
        return f"{number} {unit if unit and whole else self.unit}"


_UNITS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("step", "steps"), ("steps", 1.0)),
    **dict.fromkeys(("epoch", "epochs"), ("epochs", 1.0)),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), ("s", 1.0)),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), ("s", 60.0)),
    **dict.fromkeys(("h", "hour", "hours"), ("s", 3600.0)),
}
_INTERVAL = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]+)\s*")
_INTERVAL_HINT = "write for example '200 steps', '1 epoch' or '5 min'"


def interval_words(value: Any) -> re.Match[str] | None:
    """Match a number and any unit; None if ``value`` does not match."""
    return _INTERVAL.fullmatch(value) if isinstance(value, str) else None


def interval_parts(value: Any) -> dict[str, Any]:
    """Return ``value`` and ``unit`` of an interval; raise a validation error if it is invalid."""
    # A bare number is ambiguous: 200 may mean steps or seconds.
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise fault(
            f"the number {value} needs a unit",
            hint=f"write '{value} steps', '{value} epochs' or '{value} min'"
            if value == int(value)
            else f"write '{value} epochs'; to count in steps, write a whole number",
        )
    match = interval_words(value)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        match = None
    if match is None:
        raise fault(
            f"{{key}} must be a number and a unit, not {in_words(value)}", hint=_INTERVAL_HINT
        )
    if match[2].lower() not in _UNITS:
        hint = did_you_mean(match[2], ("steps", "epochs", "seconds", "minutes", "hours"))
        raise fault(f"'{match[2]}' is not a unit", hint=hint or _INTERVAL_HINT)
    unit, factor = _UNITS[match[2].lower()]
    if not 0 < number < float("inf"):
        raise fault(f"{{key}} must be above 0, not '{value}'", hint=_INTERVAL_HINT)
    if unit == "steps" and number != int(number):
        raise fault(f"{{key}} must be a whole number of steps, not '{value}'", hint=_INTERVAL_HINT)
    return {"value": number * factor, "unit": unit}


def _reference(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise fault("{key} is empty", hint="name an object of this notebook, or remove the line")
    if value is not None and not isinstance(value, str):
        raise fault(
            f"{{key}} must be a Python expression over this notebook's names, not "
            f"{in_words(value)}",
            hint="write for example 'Net(hidden=128)', or package.module:attribute",
        )
    return value.strip() if isinstance(value, str) else value


def _required_reference(value: Any) -> Any:
    if value is None:
        raise fault("{key} is empty", hint="name an object of this notebook")
    return _reference(value)


Required = Annotated[str, BeforeValidator(_required_reference)]
"""A Python expression over the notebook's names, or ``package.module:attribute``."""
Optional = Annotated[str | None, BeforeValidator(_reference)]
"""Like ``Required``, but may be None."""
