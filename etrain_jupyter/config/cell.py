"""Parse a cell or a mapping into a frozen ``TrainConfig``, with the position of errors."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from etrain_jupyter.config.schema import (
    REFERENCES,
    Interval,
    OptimizerConfig,
    Section,
    TrainConfig,
)
from etrain_jupyter.config.source_map import (
    NOWHERE,
    Path,
    SourceMap,
    did_you_mean,
    dotted,
    in_words,
)
from etrain_jupyter.config.vocabulary import (
    NAMED_LR,
    REFUSED,
    find_optimizer,
    known_elsewhere,
)
from etrain_jupyter.config.yaml_nodes import load_body
from etrain_jupyter.errors import ConfigError

S = TypeVar("S", bound=Section)

EXAMPLES = {
    "data": "data: {train: train_set}",
    "metrics": "metrics: {accuracy: accuracy}",
    "batch": "batch: {global: 256}",
    "workers": "workers: {min: 1, max: 4}",
    "checkpoint": "checkpoint: {every: 200 steps}",
    "eval": "eval: {every: 1 epoch}",
    "early_stopping": "early_stopping: {metric: loss, patience: 3}",
    "log": "log: {every: 10 steps}",
    "optimizer": "optimizer: {name: AdamW, lr: 3e-4}",
    "model": "model: Net()",
}

SHORT_EXAMPLES = {"batch": "batch: 256", "workers": "workers: 4"}
"""Examples for the groups that accept a number as shorthand."""


@dataclass(frozen=True, kw_only=True)
class ParsedJob:
    """A validated job: its configuration, live objects and source positions."""

    config: TrainConfig
    namespace_extra: Mapping[str, Any] = field(default_factory=dict)
    """Objects that were passed directly instead of by name, keyed by their names in ``config``."""
    source: SourceMap = NOWHERE
    """Position of each key in the cell."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The cell as plain data, with names in place of objects."""
    warnings: tuple[str, ...] = ()
    """Messages about names in the cell, for the user to read before the job starts."""

    def namespace(self, notebook: Mapping[str, Any]) -> dict[str, Any]:
        """Return the notebook's names and those in ``namespace_extra``."""
        return {**notebook, **self.namespace_extra}


def parse_cell(
    body: str,
    *,
    namespace: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    first_line: str = "",
) -> ParsedJob:
    """Read the body of a cell.

    Args:
        body: The cell without its first line.
        namespace: The notebook's names, for ``!py`` and for naming the objects that it returns.
        overrides: Values of the first line's flags, which take precedence over the body.
        first_line: The ``%%etrain`` line, shown in errors about it.

    Raises:
        CellError: If the cell is invalid. The message points at the first error.
    """
    data, source = load_body(body, namespace=namespace, first_line=first_line)
    return parse_loaded(data, source, namespace=namespace, overrides=overrides or {})


def parse_loaded(
    data: Any, source: SourceMap, *, namespace: Mapping[str, Any], overrides: Mapping[str, Any]
) -> ParsedJob:
    """Validate a body that has been loaded from its text; see ``parse_cell``."""
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise source.error(
            (),
            f"the body must be lines of 'key: value', not {in_words(data)}",
            hint="%etrain template prints one",
        )
    #   body -> load_body -> _merged (flags win) -> _check_keys -> LiveObjects.named -> TrainConfig
    #
    # The keys are checked before pydantic runs, because it would report an unknown key without a
    # suggestion.
    # Only !py values may be objects; text in the body is always an expression.
    live = LiveObjects(namespace, source.computed)
    return _parse(_merged(data, overrides), source.without(overrides), live)


def parse_mapping(
    mapping: Mapping[str, Any], namespace: Mapping[str, Any], source: SourceMap = NOWHERE
) -> ParsedJob:
    """Read a job from Python, where objects may be given directly instead of by name.

    Raises:
        ConfigError: If the mapping is invalid; ``path`` is that of the first error.

    >>> parse_mapping({"model": "Net", "data": {"train": "d"}, "loss": "f"}, {}).config.epochs
    1.0
    """
    return _parse(dict(mapping), source, LiveObjects(namespace, frozenset({()})))


def _parse(data: dict[str, Any], source: SourceMap, live: LiveObjects) -> ParsedJob:
    _check_keys(data, TrainConfig, (), source, top=TrainConfig)
    named = live.named(data)
    warning = _resolve_optimizer(named, live)
    config = _validate(named, TrainConfig, source)
    return ParsedJob(
        config=config,
        namespace_extra=live.extra,
        source=source,
        data=named,
        warnings=(warning,) if warning else (),
    )


def _resolve_optimizer(data: dict[str, Any], live: LiveObjects) -> str:
    """Prefer an object of the notebook to an optimizer of the same name; return a warning.

    Changes ``data`` for an object of the notebook.
    """
    given = data.get("optimizer")
    text = given.get("name") if isinstance(given, Mapping) else given
    if not isinstance(text, str) or (name := find_optimizer(text)) not in (*NAMED_LR, *REFUSED):
        return ""
    own = live.find(text.strip())
    is_torchs = str(getattr(own, "__module__", "")).partition(".")[0] == "torch"
    # optimizer: adam      a function of the notebook  -> it is used
    # {name: adam, ...}    the options are torch's     -> torch's optimizer is used
    # an imported class, torch's module adam, a number -> torch's optimizer is used, no warning
    if not (callable(own) and not is_torchs) and not hasattr(own, "param_groups"):
        return ""
    if isinstance(given, Mapping):
        return (
            f"optimizer.name={text} is {name} of torch.optim, not '{text}' of the notebook. "
            f"To use that, write optimizer: {text}"
        )
    data["optimizer"] = {"reference": text}
    return (
        f"optimizer: {text} is the notebook's '{text}', not {name} of torch.optim. To use that, "
        f"write optimizer: {{name: {name}}}"
    )


def parse_section(data: Mapping[str, Any], section: type[S], source: SourceMap = NOWHERE) -> S:
    """Read a group of keys other than a job, with the same error messages and positions.

    Raises:
        ConfigError: If it is invalid. The error is the first one, at its position in ``source``.
    """
    _check_keys(data, section, (), source, top=section)
    return _validate(data, section, source)


def _validate(data: Mapping[str, Any], section: type[S], source: SourceMap) -> S:
    try:
        return section.model_validate(data)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        ranked = [(error["type"] == "missing", _in_cell_words(error, source)) for error in errors]
        # Report the first error in the cell. Missing keys have no position, so they come last.
        places = [(rank, getattr(e, "line", 0), getattr(e, "column", 0)) for rank, e in ranked]
        raise ranked[places.index(min(places))][1] from None


def _merged(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(data)
    # A flag replaces one key of a group, such as workers.max, and keeps the other keys.
    for key, value in overrides.items():
        inner = result.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        result[key] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


# ------------------------------------------------------------------------------------- unknown keys


def keys_of(section: type[Section]) -> dict[str, type[Section] | None]:
    """Map the keys of a group, as spelled in the cell, to their nested groups, or to None."""
    result: dict[str, type[Section] | None] = {}
    for name, info in section.model_fields.items():
        result[info.alias or name] = _group_of(info.annotation)
    return result


def _group_of(kind: Any) -> type[Section] | None:
    # An optional group is a union; Interval is a group for pydantic, but a scalar in the cell.
    if isinstance(kind, type):
        return kind if issubclass(kind, Section) and kind is not Interval else None
    groups = [part for part in get_args(kind) if _group_of(part)]
    return groups[0] if groups else None


def shorthand_at(path: Path) -> str:
    """Return the key that a bare number sets in a top-level group; empty if the group has none."""
    group = keys_of(TrainConfig).get(str(path[0])) if len(path) == 1 else None
    return group.shorthand if group is not None else ""


def _check_keys(
    data: Mapping[Any, Any],
    section: type[Section],
    path: Path,
    source: SourceMap,
    *,
    top: type[Section],
) -> None:
    known = keys_of(section)
    for key, value in data.items():
        inner = (*path, key)
        if key not in known:
            raise _unknown_key(key, data, path, source, top, known=tuple(known))
        group = known[key]
        # The keys of an optimizer depend on its name, so its validator checks them.
        if group is not None and group is not OptimizerConfig and isinstance(value, Mapping):
            _check_keys(value, group, inner, source, top=top)


def _unknown_key(
    key: Any,
    group: Mapping[Any, Any],
    path: Path,
    source: SourceMap,
    top: type[Section],
    *,
    known: tuple[str, ...],
) -> ConfigError:
    where = f" in '{dotted(path)}'" if path else ""
    message = f"unknown key '{key}'{where}"
    # Try the most specific hint first: a comma in an expression, a key from another system, a
    # spelling mistake, the right key in the wrong group.
    hint = _torn_expression(key, group)
    if top is TrainConfig:
        hint = hint or known_elsewhere((*map(str, path), str(key)))
    hint = hint or did_you_mean(str(key), known) or _other_level(str(key), path, top)
    return source.error(
        (*path, key), message, hint=hint or f"known keys{where}: {', '.join(known)}", at_key=True
    )


def _torn_expression(key: Any, group: Mapping[Any, Any]) -> str:
    # In a {} mapping, a comma ends the value, even within the brackets of an expression:
    # {model: Net(1, 2)} has the key "model" with the value "Net(1", and the key "2)" with no value.
    keys = list(group)
    before = group[keys[keys.index(key) - 1]] if keys.index(key) > 0 else None
    if isinstance(before, str) and any(
        before.count(a) > before.count(b) for a, b in ("()", "[]", "{}")
    ):
        return (
            f"put quotes around the expression that starts with '{before}': a comma ends a "
            "value here"
        )
    return ""


def _other_level(key: str, path: Path, top: type[Section]) -> str:
    if path and key in keys_of(top):
        return f"'{key}' is a top-level key, not a key of '{dotted(path)}': remove its indentation"
    for name, group in keys_of(top).items():
        if group is not None and (name,) != path and key in keys_of(group):
            return f"'{key}' belongs in '{name}': write {name}: {{{key}: ...}}"
    return ""


# ------------------------------------------------------------------------------- pydantic, in words


def _in_cell_words(error: ErrorDetails, source: SourceMap) -> ConfigError:
    path: Path = error["loc"]
    # The message is from our own validators. Only the name of the key is missing.
    if error["type"] == "etrain":
        context = error["ctx"]
        path = tuple(context["path"] or path)
        message = context["message"].replace("{key}", dotted(path) or "the body")
        message = message.replace("{name}", str(path[-1]) if path else "")
        hint, at_key = context["hint"], context["at_key"]
        return source.error(path, message, hint=hint, at_key=at_key)
    # pydantic appends "[key]" if the key of a dict is invalid; the cell has no such part.
    path = tuple(part for part in path if part != "[key]")
    key, value = dotted(path), error["input"]
    if error["type"] == "missing":
        return _missing(path, source)
    if value is None:
        return source.error(
            path, f"{key} is empty", hint=_example(path) or "give a value, or remove the line"
        )
    if error["type"] not in _WANTED:
        return source.error(path, f"{key}: {error['msg']}")
    wanted = _WANTED[error["type"]](error.get("ctx", {}))
    if shorthand_at(path) and error["type"] == "model_type":
        wanted = f"a whole number or {wanted}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    shown = str(value) if is_number and error["type"] != "string_type" else in_words(value)
    return source.error(path, f"{key} must be {wanted}, not {shown}", hint=_value_hint(error, path))


_WANTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda _: "a whole number",
    "int_from_float": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "bool_type": lambda _: "true or false",
    "string_type": lambda _: "a text",
    "dict_type": lambda _: "a group of keys",
    "model_type": lambda _: "a group of keys",
    "model_attributes_type": lambda _: "a group of keys",
    "finite_number": lambda _: "a finite number",
    "greater_than": lambda ctx: f"above {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"{ctx['ge']:g} or more",
    "less_than": lambda ctx: f"below {ctx['lt']:g}",
}


def _value_hint(error: ErrorDetails, path: Path) -> str:
    value = error["input"]
    if error["type"] in ("int_type", "float_type") and isinstance(value, str):
        # YAML 1.2 reads 1_000 and "1000" as text.
        bare = value.replace("_", "").replace(",", "")
        try:
            float(bare)
        except ValueError:
            return ""
        return f"write {bare}" if bare != value else "remove the quotes"
    if error["type"] == "string_type":
        return "put it in quotes" if isinstance(value, int | float) else ""
    is_group = error["type"] in ("dict_type", "model_type", "model_attributes_type")
    return _example(path) if is_group else ""


def _example(path: Path) -> str:
    if len(path) != 1 or path[0] not in EXAMPLES:
        return ""
    short = f"'{SHORT_EXAMPLES[str(path[0])]}' or " if path[0] in SHORT_EXAMPLES else ""
    return f"write for example {short}'{EXAMPLES[str(path[0])]}'"


def _missing(path: Path, source: SourceMap) -> ConfigError:
    key = dotted(path)
    example = EXAMPLES.get(str(path[0]), key)
    return source.error(path, f"key '{key}' is missing", hint=f"add for example '{example}'")


# ------------------------------------------------------------------------- objects instead of names


class LiveObjects:
    """Replace objects in a configuration with names.

    An object that has a name in the notebook keeps it. Any other object gets a descriptive name
    that the notebook does not use, so that the configuration remains readable.
    """

    def __init__(self, namespace: Mapping[str, Any], computed: frozenset[Path]) -> None:
        # Values at and below the `computed` paths may be objects; the path () covers everything.
        self._namespace = namespace
        self._computed = computed
        self.extra: dict[str, Any] = {}

    def named(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``data`` with each object replaced by its name."""
        return {key: self._walk(value, (key,)) for key, value in data.items()}

    def find(self, name: str) -> Any:
        """Return the object that a name refers to; None if there is none."""
        return self.extra.get(name, self._namespace.get(name))

    def _walk(self, value: Any, path: Path) -> Any:
        if _is_reference(path, value):
            # Text is already an expression; a number is an error, which pydantic reports.
            is_object = value is not None and not isinstance(value, str | int | float)
            may_be_object = any(path[: len(start)] == start for start in self._computed)
            return self._name_for(value, path) if is_object and may_be_object else value
        if isinstance(value, Mapping):
            return {key: self._walk(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            is_plain = type(value) in (list, tuple)
            return type(value)(plain_value(item) for item in value) if is_plain else value
        return plain_value(value)

    def _name_for(self, value: Any, path: Path) -> str:
        # Prefer a name from the notebook, which the user recognizes.
        for name, known in {**self._namespace, **self.extra}.items():
            if known is value and not name.startswith("_") and name.isidentifier():
                return name
        given = getattr(value, "__name__", None) or f"{dotted(path)}_{type(value).__name__}".lower()
        # The name becomes part of an expression, so it must be a valid identifier and not a
        # keyword.
        base = re.sub(r"\W", "_", str(given)).strip("_") or "object"
        base = f"the_{base}" if base[0].isdigit() or keyword.iskeyword(base) else base
        # A new name must not shadow a builtin that an expression uses.
        taken = {*self._namespace, *self.extra, *dir(builtins)}
        name = next(n for n in (base, *(f"{base}_{i}" for i in range(2, 10**6))) if n not in taken)
        self.extra[name] = value
        return name


def _is_reference(path: Path, value: Any) -> bool:
    if path == ("optimizer",):
        return not isinstance(value, Mapping)
    is_metric = len(path) == 2 and path[0] == "metrics"
    return is_metric or dotted(path) in (*REFERENCES, "optimizer.reference")


def plain_value(value: Any) -> Any:
    """Return a NumPy or torch scalar as a Python number, and anything else unchanged."""
    is_scalar = hasattr(value, "dtype") and getattr(value, "shape", None) in ((), [])
    return value.item() if is_scalar and hasattr(value, "item") else value
