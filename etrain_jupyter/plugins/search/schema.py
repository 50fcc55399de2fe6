"""Schema of the group ``search`` of ``%%etrain search``: the space, the metric and the limits."""

from __future__ import annotations

import builtins
import itertools
import keyword
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from etrain_jupyter.config.fields import Interval, Section, check_word, fault, interval_parts, words
from etrain_jupyter.config.keys import ExtraGroup, KeyHelp, KeyPath
from etrain_jupyter.config.schema import MetricConfig
from etrain_jupyter.config.source_map import in_words

Value = bool | int | float | str
"""Value of one name of the space in one trial."""


DEFAULT_TRIALS = 20
SPACE: KeyPath = ("search", "space")

_ANSWERS = {
    "num_samples max_trials n_trials num_trials": "use 'trials'",
    "max_concurrent_trials max_concurrent n_jobs": "use 'concurrent'",
    "smaller_is_better direction goal": "use 'mode: min' or 'mode: max'",
    "name searcher algorithm search_alg sampler": "use 'method: asha', tpe, random or grid",
    "scheduler": "use 'pruner: asha', or method: asha",
    "time_budget_s timeout": "use 'budget: {time: 2 h}'",
    "max_length max_t max_resource max_time time_metric": "use 'max: 20 epochs'",
    "reduction_factor eta": "use 'divisor'",
    "grace_period min_t min_resource min_time": "the first rung is at the first evaluation: use "
    "'eval: {every: 2 epochs}' at the top level",
    "num_rungs max_rungs brackets bracket_rungs stop_once": "the rungs follow from 'divisor', and "
    "--dry-run shows them: remove the line",
    "epochs steps max_steps": "use 'max: 20 epochs', or epochs or steps at the top level",
    "storage study_name load_if_exists": "the study is stored in its own folder of the run store: "
    "remove the line",
    "random_state source_trial_id": "use 'seed'",
    "param_space hyperparameters parameters": "use 'space'",
    "max_slots resources_per_trial": "use 'workers: {min: 1, max: 2}' at the top level, per trial",
}
KNOWN_SEARCH_KEYS = {key: text for keys, text in _ANSWERS.items() for key in keys.split()}
"""Key of another tool for searches -> hint about ours."""

_CALL = re.compile(r"(?:\w+\.)*(\w+)\((.*)\)", re.DOTALL)
_KINDS = {
    "choice grid_search CategoricalDistribution suggest_categorical": "choice",
    "uniform quniform FloatDistribution suggest_float suggest_uniform": "float",
    "loguniform qloguniform suggest_loguniform": "log float",
    "randint qrandint IntDistribution suggest_int": "int",
    "lograndint qlograndint": "log int",
}
_KIND_OF = {call: kind for calls, kind in _KINDS.items() for call in calls.split()}


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


def _describe(path: KeyPath) -> KeyHelp | None:
    """Describe the keys that are not fields of the schema."""
    if path == ("search",):
        return KeyHelp(
            path=path,
            takes="group of keys",
            is_required=True,
            meaning="Space, metric and limits of a hyper-parameter search, in `%%etrain search` "
            "only.",
            example="search: {space: {lr: {low: 1e-5, high: 1e-1, log: true}}, metric: loss}",
        )
    if path == SPACE:
        return KeyHelp(
            path=path,
            takes="group of names",
            is_required=True,
            meaning="Values to search. Each name can be used in every expression and `!py` value.",
            example="space: {width: {choice: [64, 128]}, lr: {low: 1e-5, high: 1e-1, log: true}}",
        )
    if path[:-1] == SPACE:
        return KeyHelp(
            path=path,
            takes="choice, range of integers or range of numbers",
            meaning="Name in expressions and `!py` values of the cell, with one value per trial.",
            example=f"{path[-1]}: {{low: 1e-5, high: 1e-1, log: true}}",
        )
    return None


GROUP = ExtraGroup(
    section=SearchConfig,
    names=SPACE,
    named=Parameter,
    describe=_describe,
    forms=("{choice: [", "{int: [", "{low: "),
    answers=KNOWN_SEARCH_KEYS,
)
"""The group ``search`` in the body, for the editor."""


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


def describe_foreign(name: str, spec: Any) -> str:
    """Return our spelling for a parameter in that of Determined, W&B or Ray; empty if unknown.

    >>> describe_foreign("lr", {"type": "log", "minval": -4, "maxval": -1, "base": 10})
    'write lr: {low: 0.0001, high: 0.1, log: true}'
    >>> describe_foreign("lr", "tune.loguniform(1e-4, 1e-1)")
    'write lr: {low: 1e-4, high: 1e-1, log: true}'
    >>> describe_foreign("lr", 0.1)
    'only names that vary belong to the space: write the number 0.1 where lr is used'
    """
    ours = ""
    if isinstance(spec, str):
        ours = _from_call(spec)
    elif isinstance(spec, list):
        ours = f"{{choice: {spec}}}"
    elif isinstance(spec, Mapping):
        ours = _from_group(spec)
    elif isinstance(spec, bool | int | float):
        return (
            f"only names that vary belong to the space: write {in_words(spec)} where {name} is used"
        )
    return f"write {name}: {ours}" if ours else ""


def _from_call(text: str) -> str:
    match = _CALL.fullmatch(text.strip())
    if match is None:
        return ""
    kind, arguments = _KIND_OF.get(match[1]), match[2].strip()
    if match[1].startswith("suggest_"):  # the first argument is the name
        arguments = arguments.partition(",")[2].strip()
    if kind is None:
        return "{low: 0.1, high: 1.0}, {int: [1, 8]} or {choice: [1, 2]}, the kinds of parameters"
    if kind == "choice":
        return f"{{choice: {arguments}}}"
    low, high = [*(part.strip() for part in arguments.split(",")), "...", "..."][:2]
    is_log = kind.startswith("log") or re.search(r"log\s*=\s*True", arguments)
    suffix = ", log: true" if is_log else ""
    if kind.endswith("int"):
        return f"{{int: [{low}, {high}]{suffix}}} (both ends included)"
    return f"{{low: {low}, high: {high}{suffix}}}"


def _from_group(spec: Mapping[str, Any]) -> str:
    values = spec.get("vals", spec.get("values", spec.get("grid_search")))
    if values is not None:
        return f"{{choice: {values}}}"
    if spec.get("type") == "const" or "val" in spec:
        return f"{{choice: [{spec.get('val')}]}}"
    inner = next((name for name, group in spec.items() if isinstance(group, Mapping)), None)
    if inner is not None:
        return f"{inner} as a name of its own: groups of names are not nested"
    low, high = spec.get("minval", spec.get("min")), spec.get("maxval", spec.get("max"))
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return ""
    if spec.get("type") == "log":
        base = spec.get("base", 10)
        return f"{{low: {base**low:g}, high: {base**high:g}, log: true}}"
    if spec.get("type") == "int":
        return f"{{int: [{low}, {high}]}}"
    suffix = ", log: true" if "log" in str(spec.get("distribution", "")) else ""
    return f"{{low: {low:g}, high: {high:g}{suffix}}}"
