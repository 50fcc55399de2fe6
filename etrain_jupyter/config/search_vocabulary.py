"""Answers to the spellings of other systems in the group ``search``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANSWERS = {
    "num_samples max_trials n_trials num_trials": "use 'trials'",
    "max_concurrent_trials max_concurrent n_jobs": "use 'concurrent'",
    "smaller_is_better": "use 'mode: min' or 'mode: max'",
    "direction": "use 'mode: min' or 'mode: max'",
    "name searcher algorithm search_alg sampler": "use 'method: asha', tpe, random or grid",
    "scheduler": "use 'pruner: asha', or method: asha",
    "time_budget_s timeout": "use 'budget: {time: 2 h}'",
    "max_length max_t max_resource max_time time_metric": "use 'max: 20 epochs'",
    "reduction_factor eta": "use 'divisor'",
    "random_state source_trial_id": "use 'seed'",
    "param_space hyperparameters parameters": "use 'space'",
    "max_slots resources_per_trial": "use 'workers: {min: 1, max: 2}' at the top level, per trial",
}
KNOWN_SEARCH_KEYS = {key: text for keys, text in _ANSWERS.items() for key in keys.split()}
"""Key of Determined, Ray Tune or Optuna -> hint about ours."""

_CALL = re.compile(r"(?:\w+\.)?(loguniform|uniform|randint|lograndint|choice|grid_search)\((.*)\)")


def describe_foreign(name: str, spec: Any) -> str:
    """Return our spelling for a parameter in that of Determined, W&B or Ray; empty if unknown.

    >>> describe_foreign("lr", {"type": "log", "minval": -4, "maxval": -1, "base": 10})
    'write lr: {low: 0.0001, high: 0.1, log: true}'
    >>> describe_foreign("lr", "tune.loguniform(1e-4, 1e-1)")
    'write lr: {low: 1e-4, high: 1e-1, log: true}'
    """
    ours = ""
    if isinstance(spec, str):
        ours = _from_call(spec)
    elif isinstance(spec, list):
        ours = f"{{choice: {spec}}}"
    elif isinstance(spec, Mapping):
        ours = _from_group(spec)
    return f"write {name}: {ours}" if ours else ""


def _from_call(text: str) -> str:
    match = _CALL.fullmatch(text.strip())
    if match is None:
        return ""
    kind, arguments = match[1], match[2].strip()
    if kind in ("choice", "grid_search"):
        return f"{{choice: {arguments}}}"
    low, _, high = (part.strip() for part in arguments.partition(","))
    suffix = ", log: true" if kind.startswith("log") else ""
    if "randint" in kind:
        return f"{{int: [{low}, {high}]{suffix}}} (both ends included)"
    return f"{{low: {low}, high: {high}{suffix}}}"


def _from_group(spec: Mapping[str, Any]) -> str:
    values = spec.get("vals", spec.get("values"))
    if values is not None:
        return f"{{choice: {values}}}"
    if spec.get("type") == "const" or "val" in spec:
        return f"{{choice: [{spec.get('val')}]}}"
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
