"""Field types of pools with machines: durations, amounts and lists of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from etrain_jupyter.config.fields import fault, interval_parts
from etrain_jupyter.config.source_map import in_words


def _duration(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise fault(
            f"the number {value} needs a unit", hint=f"write '{value} s', '{value} min' or '2 h'"
        )
    parts = interval_parts(value)
    if parts["unit"] != "s":
        raise fault(
            f"{{key}} must be a duration, not '{value}'", hint="write for example '90 s' or '5 min'"
        )
    return float(parts["value"])


Duration = Annotated[
    float, BeforeValidator(_duration), PlainSerializer(lambda seconds: f"{seconds!r} s")
]
"""Seconds; written as ``120s``, ``5 min`` or ``12h``."""


def _usd(value: Any) -> Any:
    # YAML reads $6 as a string.
    if isinstance(value, str):
        raise fault(
            f"{{key}} must be a number of US dollars, not {in_words(value)}",
            hint="write for example 6.00",
        )
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


Usd = Annotated[float, BeforeValidator(_usd), Field(gt=0, allow_inf_nan=False)]
Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]


def auto_or_list(value: Any, what: str, example: str) -> Any:
    """Return ``auto`` or a tuple of names; refuse anything else, including a single name."""
    if value == "auto":
        return value
    if isinstance(value, list | tuple):
        return tuple(value)
    raise fault(
        f"{{key}} must be auto or a list of {what}, not {in_words(value)}",
        hint=f"write for example {example}",
    )


def variables(value: Any) -> Any:
    """Return the variables of a mapping as texts; YAML reads ``OMP_NUM_THREADS: 4`` as a number."""
    if not isinstance(value, Mapping):
        return value
    for name, word in value.items():
        if isinstance(word, bool) or not isinstance(word, str | int | float):
            raise fault(f"{{key}}.{name} must be a text or a number, not {in_words(word)}")
    return {name: str(word) for name, word in value.items()}


Variables = Annotated[dict[str, str], BeforeValidator(variables)]
