"""Build the optimizer, by name or with a function from the notebook."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from etrain_jupyter.config.schema import OptimizerConfig
from etrain_jupyter.config.vocabulary import EXTRA_LR
from etrain_jupyter.trainer.references import References, WorkloadError, check_fit, listed

Optimizers = Callable[..., torch.optim.Optimizer]

PACKAGE = "pytorch_optimizer"
_IN_PACKAGE: dict[str, tuple[str, dict[str, Any]]] = {
    # As in the paper and in Google's own code, the trust ratio also scales the decay, and the rate
    # is not divided by a bias correction (the package divides it unless adam_debias is set). You et
    # al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020.
    "LAMB": ("Lamb", {"weight_decouple": False, "adam_debias": True}),
    "LARS": ("LARS", {}),
}
"""Class and our defaults for the optimizers that torch.optim does not have."""

_FUSED = ("Adam", "AdamW")
"""Optimizers whose fused kernel is much faster than torch's default: on one core, it updates 22
million weights in 14 ms instead of 105 ms (torch 2.13)."""
_IMPLEMENTATIONS = ("fused", "foreach", "differentiable", "capturable")
"""Options that select an implementation, or exclude the fused one."""


def build_optimizer(
    config: OptimizerConfig, references: References, model: nn.Module
) -> torch.optim.Optimizer:
    """Build the optimizer of a model's trainable parameters.

    Raises:
        WorkloadError: If the optimizer is not available, or does not fit the parameters.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.name is None:
        made = _call(references.evaluate("optimizer"), model)
        if not isinstance(made, torch.optim.Optimizer):
            raise WorkloadError(
                f"optimizer returned a {type(made).__name__}. Give a function (parameters), "
                "(named_parameters) or (model) that returns one optimizer."
            )
        _check_parameters(made, model)
        return made
    kind, defaults = _find(config.name)
    options = {**defaults, "lr": config.lr, **config.options}
    kernel = {"fused": True} if _can_be_fused(config, parameters) else {}
    if config.name == "Muon":
        _check_dimensions(model)
    try:
        return kind(_groups(config, parameters), **options, **kernel)
    except (TypeError, ValueError, NotImplementedError) as exc:
        raise WorkloadError(f"optimizer {config.name} does not take {options}: {exc}") from exc


def _call(function: Callable[..., Any], model: nn.Module) -> Any:
    """Call the notebook's function with the object that its first parameter names."""
    check_fit("optimizer", function)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # built-in code has no signature
        first = ""
    # A function whose first parameter is "self" is a method of the model's class, such as
    # configure_optimizers of a LightningModule.
    given = {"model": model, "self": model, "named_parameters": named, "named_params": named}
    return function(given.get(first, [p for _, p in named]))


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {id(p) for p in model.parameters()}
    others = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in own]
    if others:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        names = listed([name for name, p in model.named_parameters() if p.requires_grad])
        raise WorkloadError(
            f"optimizer updates {len(others)} of {total} tensors that are not parameters of the "
            f"model (shapes {listed([str(tuple(p.shape)) for p in others])}). The model's "
            f"parameters are {names}. Build the optimizer from the parameters that the function "
            "receives, not from another instance of the model. Make the parameters of a loss part "
            "of the model."
        )


def _can_be_fused(config: OptimizerConfig, parameters: list[nn.Parameter]) -> bool:
    if config.name not in _FUSED or any(name in config.options for name in _IMPLEMENTATIONS):
        return False
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)


def _find(name: str) -> tuple[Optimizers, dict[str, Any]]:
    if name not in EXTRA_LR:
        kind = getattr(torch.optim, name, None)
        if kind is None:
            raise WorkloadError(f"torch {torch.__version__} has no optimizer {name}.")
        return kind, {}
    class_name, defaults = _IN_PACKAGE[name]
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError as exc:
        raise WorkloadError(
            f"optimizer {name} needs the package pytorch-optimizer, which is not installed where "
            "the workers run. Install it there: pip install 'etrain-jupyter[optim]'"
        ) from exc
    return getattr(package, class_name), defaults


def _groups(config: OptimizerConfig, parameters: list[nn.Parameter]) -> list[Any]:
    if config.no_decay is None:
        return parameters
    # Weight decay applies only to matrices: biases and normalization scales are vectors.
    decayed = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": decayed},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check_dimensions(model: nn.Module) -> None:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    others = [f"{name} {tuple(p.shape)}" for name, p in named if p.ndim != 2]
    if others:
        raise WorkloadError(
            f"optimizer Muon updates only matrices, but {len(others)} of {len(named)} parameters "
            f"are not: {', '.join(others[:3])} ... Freeze them with requires_grad_(False), or "
            "use AdamW."
        )
