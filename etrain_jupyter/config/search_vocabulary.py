"""Answers to the spellings of other systems in the group ``search``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from etrain_jupyter.config.source_map import in_words

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
