"""Schema of the group ``search`` of ``%%etrain search``: the space, the metric and the limits."""

from __future__ import annotations

import builtins
import itertools
import keyword
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from etrain_jupyter.config.fields import Interval, Section, check_word, fault, interval_parts, words
from etrain_jupyter.config.schema import MetricConfig
from etrain_jupyter.config.source_map import in_words

Value = bool | int | float | str
"""Value of one name of the space in one trial."""


DEFAULT_TRIALS = 20


class Parameter(Section):
    """Values that one name can have: a choice, a range of integers, or a range of numbers."""

    choice: Annotated[
        list[Value] | None,
        Field(examples=[[64, 128, 256]], json_schema_extra={"not_with": "int low high log"}),
    ] = None
    """Values to choose from."""
    int_range: Annotated[
        list[int] | None,
        Field(
            alias="int",
            min_length=2,
            max_length=2,
            examples=[[1, 8]],
            json_schema_extra={"not_with": "low high"},
        ),
    ] = None
    """Lowest and highest integer."""
    low: Annotated[float | None, Field(allow_inf_nan=False, examples=[1e-5])] = None
    """Lowest number."""
    high: Annotated[float | None, Field(allow_inf_nan=False, examples=[1e-1])] = None
    """Highest number."""
    log: bool = False
    """Sample the range on a logarithmic scale."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        kinds = [self.choice is not None, self.int_range is not None, self.low is not None]
        if (self.low is None) != (self.high is None):
            missing = "high" if self.high is None else "low"
            raise fault(f"the range has no '{missing}'", hint="write {low: 1e-5, high: 1e-1}")
        if sum(kinds) != 1:
            raise fault(
                "a parameter needs exactly one of choice, int, or low and high",
                hint="write {choice: [64, 128]}, {int: [1, 8]} or {low: 1e-5, high: 1e-1}",
            )
        if self.choice is not None:
            self._check_choice(self.choice)
        else:
            self._check_range(*self.bounds)
        return self

    def _check_choice(self, choice: list[Value]) -> None:
        if not choice:
            raise fault("the choice is empty", hint="write for example {choice: [64, 128]}")
        if len({(type(value), value) for value in choice}) < len(choice):
            raise fault(f"the choice {choice} repeats a value", hint="list each value once")
        if self.log:
            raise fault("log belongs to a range, not to a choice", hint="remove 'log'")

    def _check_range(self, low: float, high: float) -> None:
        if not low < high:
            raise fault(
                f"the range from {low:g} to {high:g} is empty",
                hint=f"write {{low: {high:g}, high: {low:g}}}"
                if high < low
                else "write a higher end",
            )
        if self.log and low <= 0:
            raise fault(
                f"a logarithmic range cannot begin at {low:g}", hint="write a low end above 0"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest value of a range."""
        if self.int_range is not None:
            return self.int_range[0], self.int_range[1]
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    @property
    def samples(self) -> tuple[Value, ...]:
        """Values at which to check a configuration: all of a choice, the ends of a range."""
        return tuple(self.choice) if self.choice is not None else self.bounds

    @property
    def grid(self) -> tuple[Value, ...] | None:
        """All values; None for a range of numbers."""
        if self.choice is not None:
            return tuple(self.choice)
        if self.int_range is not None:
            return tuple(range(self.int_range[0], self.int_range[1] + 1))
        return None

    def __str__(self) -> str:
        if self.choice is not None:
            return "one of " + ", ".join(str(value) for value in self.choice)
        low, high = self.bounds
        kind = "integer from" if self.int_range is not None else "from"
        return f"{kind} {low:g} to {high:g}" + (", logarithmic" if self.log else "")


class Budget(Section):
    """Limits of a whole study. Its running trials stop, with checkpoints, at the first one."""

    samples: Annotated[int | None, Field(ge=1, examples=[1_000_000])] = None
    """Training samples over all trials."""
    time_s: Annotated[float | None, Field(alias="time", examples=["2 h"])] = None
    """Duration since the study began, such as 2 h."""
    usd: Annotated[float | None, Field(gt=0, allow_inf_nan=False, examples=[5.0])] = None
    """Cost of all trials in US dollars."""

    @field_validator("time_s", mode="before")
    @classmethod
    def _read_duration(cls, value: Any) -> Any:
        # A number is what the JSON form of a validated budget contains.
        if value is None or isinstance(value, float):
            return value
        parts = interval_parts(value)
        if parts["unit"] != "s":
            raise fault("{key} must be a duration, not " + in_words(value), hint="write '2 h'")
        return parts["value"]


class SearchConfig(MetricConfig):
    """The group ``search`` with every default filled in, except for ``space``."""

    trials: Annotated[int | None, Field(ge=1, examples=[20])] = None
    """Number of trials; by default 20, or all combinations of a grid."""
    method: Literal["asha", "tpe", "random", "grid"] = "asha"
    """Choice of values: asha (random values, poor trials end early), tpe, random or grid."""
    pruner: Literal["asha", "none"] | None = None
    """asha ends poor trials early at rungs; by default asha for method asha, and none otherwise."""
    max: Annotated[Interval | None, Field(examples=["20 epochs"])] = None
    """Length of a whole trial in epochs or steps, instead of the keys epochs and steps."""
    divisor: Annotated[int, Field(ge=2)] = 4
    """At each rung, the best 1/divisor of the trials continue."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the choice of values; the trials' own seed is a key of the cell."""
    concurrent: Annotated[int | None, Field(ge=1, examples=[4])] = None
    """Trials that may run at the same time; by default as many as the pool has workers for."""
    sharing: Literal["fair", "promising"] = "fair"
    """Use of the workers left over: for all trials in turn (fair), or the best ones (promising)."""
    budget: Annotated[Budget, Field(examples=[{"time": "2 h"}])] = Budget()
    """Limits of the whole study: {samples: 1000000, time: 2 h, usd: 5}."""

    @field_validator("method", mode="before")
    @classmethod
    def _known_method(cls, value: Any) -> Any:
        meant = {"adaptive_asha": "asha", "bayes": "tpe", "bayesian": "tpe"}.get(str(value).lower())
        hint = f"write method: {meant}" if meant else ""
        return check_word(
            value, get_args(cls.model_fields["method"].annotation), usual="method: asha", hint=hint
        )

    _words_of_search = words({None: None}, pruner="asha")
    _words_of_sharing = words(sharing="fair")

    @field_validator("metric")
    @classmethod
    def _without_prefix(cls, value: str) -> str:
        name = value.strip().removeprefix("eval_")
        if not name:
            raise fault("{key} is empty", hint="write metric: accuracy")
        return name

    @field_validator("max")
    @classmethod
    def _check_max(cls, value: Interval | None) -> Interval | None:
        if value is not None and value.unit == "s":
            raise fault(
                "{key} must be a number of epochs or steps, so that every trial trains on the same "
                "number of samples",
                hint="write max: 20 epochs; budget: {time: ...} limits the whole study",
            )
        return value

    @property
    def prunes(self) -> bool:
        """True if trials can end at rungs."""
        return (self.pruner or ("asha" if self.method == "asha" else "none")) == "asha"


def check_name(name: str) -> str:
    """Return why a name cannot be one of the space; empty if it can."""
    if not name.isidentifier() or keyword.iskeyword(name):
        return f"'{name}' is not a name of a variable"
    if hasattr(builtins, name) or name.startswith("_"):
        return f"'{name}' is a name of Python itself"
    return ""


def all_combinations(space: Mapping[str, Parameter]) -> list[dict[str, Value]] | None:
    """Return each combination of the values; None if a range of numbers has no end of values."""
    grids = [parameter.grid for parameter in space.values()]
    if any(grid is None for grid in grids):
        return None
    products = itertools.product(*(grid for grid in grids if grid is not None))
    return [dict(zip(space, values, strict=True)) for values in products]


def num_combinations(space: Mapping[str, Parameter]) -> float:
    """Return the number of combinations; infinite with a range of numbers."""
    return math.prod(len(p.grid) if p.grid is not None else math.inf for p in space.values())
