"""Parse a search from a cell or from Python: an ordinary job, and the group ``search``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.config.cell import ParsedJob, parse_loaded, parse_mapping, parse_section
from etrain_jupyter.config.references import check_references
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.config.source_map import Path, SourceMap, did_you_mean, dotted, in_words
from etrain_jupyter.config.yaml_nodes import PY_TAG, ExpressionError, evaluate, load_body
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.plugins.search.schema import (
    DEFAULT_TRIALS,
    KNOWN_SEARCH_KEYS,
    Parameter,
    SearchConfig,
    Value,
    check_name,
    describe_foreign,
    num_combinations,
)
from etrain_jupyter.plugins.search.template import (
    FUNCTIONS,
    ArithmeticOnlyError,
    TrialTemplate,
    compute,
    pointer_of,
    rebound_names,
    used_names,
)

KEY = "search"
FIXED = ("name", "pool", "log")
"""Keys that are the same for all trials."""


@dataclass(frozen=True, kw_only=True)
class ParsedSearch:
    """A validated search."""

    job: ParsedJob
    """The cell with the values of one example trial."""
    search: SearchConfig
    space: dict[str, Parameter]
    template: TrialTemplate
    warnings: tuple[str, ...] = ()

    @property
    def example(self) -> dict[str, Value]:
        """The values of the example trial."""
        return {name: parameter.samples[0] for name, parameter in self.space.items()}

    @property
    def num_trials(self) -> int:
        """Number of trials."""
        default = num_combinations(self.space) if self.search.method == "grid" else DEFAULT_TRIALS
        return self.search.trials or int(default)


def parse_search_cell(
    body: str,
    *,
    namespace: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    first_line: str = "",
) -> ParsedSearch:
    """Read the body of a search; see ``parse_cell`` for the arguments.

    Raises:
        CellError: If the cell is invalid. The message points at the error.
    """

    def load(names: Mapping[str, Any], only: str) -> tuple[Any, SourceMap]:
        return load_body(body, namespace=names, first_line=first_line, only=only)

    def parse(data: Any, source: SourceMap, names: Mapping[str, Any]) -> ParsedJob:
        return parse_loaded(data, source, namespace=names, overrides=overrides or {})

    return _parse_search(namespace, load, parse)


def parse_search_mapping(mapping: Mapping[str, Any], namespace: Mapping[str, Any]) -> ParsedSearch:
    """Read a search from Python, with the keys of a cell.

    Objects may be given directly. Values with names of the space are texts: an expression such as
    ``"Net(width=width)"``, or ``"!py lr * 2"`` where the cell has ``!py``.

    Raises:
        ConfigError: If the mapping is invalid; ``path`` is that of the first error.
    """

    def load(names: Mapping[str, Any], only: str) -> tuple[Any, SourceMap]:
        return read_mapping(mapping, namespace=names, only=only)

    def parse(data: Any, source: SourceMap, names: Mapping[str, Any]) -> ParsedJob:
        return parse_mapping(data, names, source)

    return _parse_search(namespace, load, parse)


def _parse_search(
    namespace: Mapping[str, Any],
    load: Callable[[Mapping[str, Any], str], tuple[Any, SourceMap]],
    parse: Callable[[Any, SourceMap, Mapping[str, Any]], ParsedJob],
) -> ParsedSearch:
    """Parse a search; ``load`` returns one key or all, ``parse`` the job without ``search``."""
    # The names of the space must exist before the rest of the cell can be evaluated:
    #
    #   group search          -> space        -> example values
    #   notebook + example    -> whole cell   -> ordinary job, checked as such
    #   job + other values    -> checked key by key, where they are inserted
    part, source = load(namespace, KEY)
    search, space = _read_group(part, source)
    names = {**namespace, **{name: p.samples[0] for name, p in space.items()}}
    data, source = load(names, "")
    del data[KEY]
    if search.max is not None:
        data = _with_length(data, search, source)
    job = parse(data, source, names)
    _check_search(search, job.config, space, source)
    template = _make_template(job, namespace, tuple(space))
    check_references(job.config, job.namespace(names), source=source)
    _check_use(job, template, space, source)
    _check_samples(template, space, source)
    _check_same_for_all(job, template, search, source)
    shadows = [name for name in space if name in namespace]
    warnings = [
        f"'{name}' is both a name of search.space and of the notebook. The cell uses the trial's "
        "value; functions of the notebook that read the global variable use the notebook's."
        for name in shadows
    ]
    return ParsedSearch(
        job=job, search=search, space=space, template=template, warnings=tuple(warnings)
    )


def _read_group(data: Any, source: SourceMap) -> tuple[SearchConfig, dict[str, Parameter]]:
    hint = "add for example 'search: {space: {lr: {low: 1e-5, high: 1e-1, log: true}}, ...}'"
    if not isinstance(data, Mapping) or KEY not in data:
        raise source.error((), "key 'search' is missing", hint=hint)
    group = data[KEY]
    if not isinstance(group, Mapping):
        raise source.error((KEY,), f"search must be a group, not {in_words(group)}", hint=hint)
    for key in group:
        if answer := KNOWN_SEARCH_KEYS.get(str(key).lower(), ""):
            raise source.error((KEY, key), f"unknown key '{key}' in 'search'", hint=answer)
    space = _read_space(group.get("space"), source)
    rest = {key: value for key, value in group.items() if key != "space"}
    return parse_section(rest, SearchConfig, source.below((KEY,))), space


def _read_space(data: Any, source: SourceMap) -> dict[str, Parameter]:
    path: Path = (KEY, "space")
    example = "write for example 'space: {width: {choice: [64, 128]}}'"
    if not isinstance(data, Mapping) or not data:
        shown = "empty" if not data else f"not {in_words(data)}"
        raise source.error(path, f"search.space must be a group of names, {shown}", hint=example)
    space = {}
    for name, spec in data.items():
        here = (*path, name)
        problem = check_name(name)
        if problem:
            raise source.error(here, problem, hint="choose another name", at_key=True)
        if answer := describe_foreign(name, spec):
            raise source.error(here, f"'{name}' is not described in our words", hint=answer)
        if not isinstance(spec, Mapping):
            raise source.error(here, f"{name} must be a group, not {in_words(spec)}", hint=example)
        space[name] = parse_section(spec, Parameter, source.below(here))
    return space


def _with_length(data: dict[str, Any], search: SearchConfig, source: SourceMap) -> dict[str, Any]:
    assert search.max is not None
    for key in ("epochs", "steps"):
        if key in data:
            raise source.error(
                (key,),
                f"{key} and search.max={search.max} both set the length of a trial",
                hint="keep one of the two",
                at_key=True,
            )
    if search.max.unit == "steps":
        return {**data, "steps": int(search.max.value)}
    return {**data, "epochs": search.max.value}


def _check_search(
    search: SearchConfig, config: TrainConfig, space: Mapping[str, Parameter], source: SourceMap
) -> None:
    """Check the search against its job."""
    here: Path = (KEY, "metric")
    if config.data.eval is None:
        raise source.error(
            here,
            "a search needs evaluations, but data.eval is not set",
            hint="write data: {train: train_set, eval: eval_set}",
        )
    known = [*(["loss"] if config.eval.loss else []), *config.metrics]
    is_open = config.step is not None or config.eval.score is not None
    if not is_open and search.metric not in known:
        raise source.error(
            here,
            f"no evaluation reports the metric '{search.metric}'",
            hint=did_you_mean(search.metric, known)
            or f"known metrics: {', '.join(known)}; define others in metrics",
        )
    if search.method == "grid":
        _check_grid(search, space, source)
    if "divisor" in search.model_fields_set and not search.prunes:
        raise source.error(
            (KEY, "divisor"),
            f"divisor={search.divisor} has no effect without a pruner: no trial ends early",
            hint="add pruner: asha, or remove the line",
        )


def _check_grid(search: SearchConfig, space: Mapping[str, Parameter], source: SourceMap) -> None:
    ranges = [name for name, parameter in space.items() if parameter.grid is None]
    if ranges:
        raise source.error(
            (KEY, "space", ranges[0]),
            f"method: grid needs a finite number of values, but {ranges[0]} is a range",
            hint=f"write {ranges[0]}: {{choice: [...]}}, or method: random",
        )
    count = num_combinations(space)
    if search.trials is not None and search.trials != count:
        raise source.error(
            (KEY, "trials"),
            f"trials={search.trials} differs from the {count:.0f} combinations of the grid",
            hint="remove the line, or write method: random",
        )


def _make_template(
    job: ParsedJob, namespace: Mapping[str, Any], names: tuple[str, ...]
) -> TrialTemplate:
    computed: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for path, text in job.source.expressions.items():
        if path[0] == KEY or not used_names(text, names):
            continue
        if path[0] in FIXED:
            raise job.source.error(
                path, f"{dotted(path)} is the same for all trials", hint="write a fixed value"
            )
        computed[pointer_of(path)] = text.strip()
        constants |= _constants_of(text, path, job.source, namespace, names)
    plain = {k: v for k, v in job.data.items() if k not in ("name",)}
    return TrialTemplate(data=plain, names=names, computed=computed, constants=constants)


def _constants_of(
    text: str,
    path: Path,
    source: SourceMap,
    namespace: Mapping[str, Any],
    names: tuple[str, ...],
) -> dict[str, Any]:
    """Return the notebook's values in an expression; check that it is arithmetic."""
    found: dict[str, Any] = {}
    functions = ", ".join(FUNCTIONS)
    hint = (
        "the scheduler computes this value for each trial, without the notebook: use numbers, "
        f"arithmetic, 'a if b else c' and {functions}; or give the values themselves as a choice"
    )
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        if not isinstance(node, ast.Name) or node.id in names or node.id not in namespace:
            continue
        value = namespace[node.id]
        if not isinstance(value, bool | int | float | str):
            message = f"!py {text.strip()} uses '{node.id}' together with a name of the space"
            raise source.error(path, message, hint=hint)
        found[node.id] = value
    try:
        compute(text, {**found, **dict.fromkeys(names, 1)})
    except ArithmeticOnlyError as exc:
        message = f"!py {text.strip()} contains more than arithmetic: {exc}"
        raise source.error(path, message, hint=hint) from exc
    except (ArithmeticError, TypeError, ValueError):
        pass  # with the real values it may be valid; see _check_samples
    return found


def _check_use(
    job: ParsedJob, template: TrialTemplate, space: Mapping[str, Parameter], source: SourceMap
) -> None:
    """Point out names that no expression uses, or that an expression defines itself."""
    names = template.names
    expressions = [*job.config.references().values(), *template.computed.values()]
    used = {name for text in expressions for name in used_names(text, names)}
    for name in space:
        if name not in used:
            raise source.error(
                (KEY, "space", name),
                f"'{name}' is used nowhere in the cell, so its values would change nothing",
                hint=f"use it in an expression such as Net({name}={name}), or as a value: "
                f"!py {name}",
                at_key=True,
            )
    for text in expressions:
        for name in rebound_names(text, names):
            raise source.error(
                (KEY, "space", name),
                f"the expression {text} defines its own '{name}'",
                hint="rename one of the two",
                at_key=True,
            )


def _check_same_for_all(
    job: ParsedJob, template: TrialTemplate, search: SearchConfig, source: SourceMap
) -> None:
    """Reject names of the space in keys that cannot differ between trials."""
    score = job.config.eval.score
    if score is not None and used_names(score, template.names):
        raise source.error(
            ("eval", "score"),
            "eval.score cannot use a name of the space: it must score all trials alike",
            hint="remove the name from the expression",
        )
    for key in ("epochs", "steps"):
        if search.prunes and pointer_of((key,)) in template.computed:
            raise source.error(
                (key,),
                f"{key} differs between trials, but method: {search.method} compares them at the "
                "same number of samples",
                hint="write pruner: none, or a fixed number",
            )


def _check_samples(
    template: TrialTemplate, space: Mapping[str, Parameter], source: SourceMap
) -> None:
    """Reject a space if a choice, or an end of a range, gives an invalid configuration."""
    for values, name in _examples(space):
        try:
            template.build(values)
        except ConfigError as exc:
            raise source.error(
                (KEY, "space", name),
                f"{name}={values[name]} gives no valid job: {exc}",
                hint=exc.hint or "remove the value from the space",
            ) from exc


def _examples(space: Mapping[str, Parameter]) -> Iterator[tuple[dict[str, Value], str]]:
    # Vary one name at a time: the product of all values may be huge, and errors name the value.
    base = {name: parameter.samples[0] for name, parameter in space.items()}
    for name, parameter in space.items():
        for value in parameter.samples:
            yield {**base, name: value}, name


def read_mapping(
    mapping: Mapping[str, Any], *, namespace: Mapping[str, Any], only: str = ""
) -> tuple[dict[str, Any], SourceMap]:
    """Return the values of a mapping, with its expressions evaluated, and the expressions.

    Keys other than ``only``, if given, are neither read nor evaluated.

    Raises:
        ConfigError: If an expression is invalid or raises.

    >>> data, source = read_mapping({"optimizer": {"lr": "!py lr * 2"}}, namespace={"lr": 0.5})
    >>> data, source.expressions
    ({'optimizer': {'lr': 1.0}}, {('optimizer', 'lr'): 'lr * 2'})
    """
    expressions: dict[Path, str] = {}

    def read(value: Any, path: Path) -> Any:
        if path[:1] == ("data",) and len(path) > 1 and not isinstance(value, str):
            return value  # a data set, which may be a long list
        if type(value) is dict:
            return {key: read(inner, (*path, key)) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return [read(inner, (*path, number)) for number, inner in enumerate(value)]
        if isinstance(value, str) and value.startswith(f"{PY_TAG} "):
            text = value.removeprefix(PY_TAG).strip()
            expressions[path] = text
            try:
                return evaluate(text, namespace, "where the search is submitted")
            except ExpressionError as exc:
                raise ConfigError(str(exc), path=path, hint=exc.hint) from exc.__cause__
        return value

    chosen = {key: value for key, value in mapping.items() if not only or key == only}
    data = read(chosen, ())
    return data, SourceMap(expressions=expressions)
