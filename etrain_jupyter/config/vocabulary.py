"""Names known without an import: the optimizers in torch.optim, and keys of other tools.

The kernel checks a cell without importing torch; a test compares these literals with torch. The
keys of other tools and the hints about them are in ``other_tools.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from etrain_jupyter.config.source_map import did_you_mean, in_words

DEFAULT_LR = {
    "Adadelta": 1.0,
    "Adafactor": 0.01,
    "Adagrad": 0.01,
    "Adam": 0.001,
    "AdamW": 0.001,
    "Adamax": 0.002,
    "ASGD": 0.01,
    "Muon": 0.001,
    "NAdam": 0.002,
    "RAdam": 0.001,
    "RMSprop": 0.01,
    "Rprop": 0.01,
    "SGD": 0.001,
}
"""Available optimizers, with torch's default learning rates."""

EXTRA_LR = {"LAMB": 0.001, "LARS": 0.001}
"""Optimizers of the optional pytorch-optimizer package, with its default learning rates."""

NAMED_LR = DEFAULT_LR | EXTRA_LR
"""All available optimizers."""

REFUSED = {
    "LBFGS": "it evaluates the loss several times per step, but gradients are exchanged only once",
    "SparseAdam": "it needs sparse gradients, which are not exchanged between workers",
}
"""Unsupported optimizers from torch.optim, and the reasons."""

ELEMENTWISE = frozenset(
    (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
)
"""Optimizers that update each element separately, so that ``shard`` can divide their state."""

PRECISIONS = ("fp32", "bf16", "fp16")
OTHER_PRECISIONS = {
    **dict.fromkeys(("float32", "32", "full", "f32", "torch.float32"), "fp32"),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "mixed", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "16", "half", "f16", "16-mixed", "torch.float16"), "fp16"),
}
"""Names for precisions in other systems."""

_COMMON = "foreach maximize differentiable "
_OPTIONS = {
    "Adadelta": _COMMON + "rho eps weight_decay capturable",
    "Adafactor": "beta2_decay eps d weight_decay foreach maximize",
    "Adagrad": _COMMON + "lr_decay weight_decay initial_accumulator_value eps fused",
    "Adam": _COMMON + "betas eps weight_decay amsgrad capturable fused decoupled_weight_decay",
    "AdamW": _COMMON + "betas eps weight_decay amsgrad capturable fused",
    "Adamax": _COMMON + "betas eps weight_decay capturable",
    "ASGD": _COMMON + "lambd alpha t0 weight_decay capturable",
    "LAMB": "betas weight_decay weight_decouple fixed_decay rectify grad_averaging max_grad_norm "
    "adam pre_norm eps foreach maximize",
    "LARS": "weight_decay momentum dampening trust_coefficient nesterov foreach maximize",
    "Muon": "weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn",
    "NAdam": _COMMON + "betas eps weight_decay momentum_decay decoupled_weight_decay capturable",
    "RAdam": _COMMON + "betas eps weight_decay decoupled_weight_decay capturable",
    "RMSprop": _COMMON + "alpha eps weight_decay momentum centered capturable",
    "Rprop": _COMMON + "etas step_sizes capturable",
    "SGD": _COMMON + "momentum dampening weight_decay nesterov fused",
}
OPTIONS = {name: frozenset(words.split()) for name, words in _OPTIONS.items()}
"""Keywords of each optimizer, in addition to ``params`` and ``lr``."""


SWITCHES = frozenset(
    (
        *("adam", "amsgrad", "capturable", "centered", "decoupled_weight_decay", "differentiable"),
        *("fixed_decay", "foreach", "fused", "grad_averaging", "maximize", "nesterov"),
        *("pre_norm", "rectify", "weight_decouple"),
    )
)
"""Keywords whose values are true or false."""


def find_optimizer(text: str) -> str:
    """Return the optimizer that ``text`` names, ignoring case; ``text`` itself if it is unknown."""
    known = [*NAMED_LR, *REFUSED]
    return next((name for name in known if name.casefold() == text.strip().casefold()), text)


def check_options(name: str, options: Mapping[str, Any], fault: Callable[..., Exception]) -> None:
    """Reject keywords that optimizer ``name`` does not have, and values that are not numbers."""
    for key, value in options.items():
        path = ("optimizer", key)
        if key not in OPTIONS[name]:
            hint = known_elsewhere(path)
            hint = hint or did_you_mean(key, ["name", "lr", *OPTIONS[name]])
            known = f"known options: name, lr, {', '.join(sorted(OPTIONS[name]))}"
            message = f"optimizer {name} has no option '{key}'"
            raise fault(message, hint=hint or known, path=path, at_key=True)
        items = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, int | float | None) for item in items):
            raise fault(
                f"optimizer.{key} must be a number or a list of numbers, not {in_words(value)}",
                path=path,
            )
        if (
            key in ("weight_decay", "momentum", "eps")
            and isinstance(value, int | float)
            and value < 0
        ):
            raise fault(f"optimizer.{key} must be 0 or more, not {value}", path=path)


@cache
def keys_of_other_tools(part: str) -> Mapping[str, str]:
    """Return keys of other tools with their hints; a key in a group has the form ``a.b``."""
    text = Path(__file__).with_name("other_tools.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text)[part]
    return {key: entry["hint"] for entry in entries for key in entry["keys"].split()}


def known_elsewhere(path: Sequence[str]) -> str:
    """Return the hint for a key of another tool; empty if the key is unknown.

    A key in a group, such as ``data.batch_size``, may have its own hint. Otherwise the hint for the
    same key at the top level applies.
    """
    known, key = keys_of_other_tools("cell"), str(path[-1]).replace("-", "_").lower()
    return known.get(".".join([*path[:-1], key])) or known.get(key, "")
