"""What the notebook gave us, built on the rank: model, data, loss, metrics, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.ranks.data import SampleSource, inputs_and_target, open_samples, to_device
from etrain_jupyter.ranks.determinism import compute_deterministically
from etrain_jupyter.ranks.optimizers import build_optimizer
from etrain_jupyter.ranks.precision import Precision
from etrain_jupyter.ranks.references import References, WorkloadError
from etrain_jupyter.ranks.seeds import seed_all
from etrain_jupyter.ranks.state.capture import Stateful


@dataclass(kw_only=True)
class Workload:
    """Everything that a rank trains with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], torch.Tensor]
    metrics: Mapping[str, Callable[[Any, Any], Any]]
    train: SampleSource
    eval: SampleSource | None
    device: torch.device
    precision: Precision = field(default_factory=Precision)
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    """What else has a state that goes where the weights go: a gradient scaler, a scheduler."""

    def forward(
        self, module: nn.Module, batch: Any, count: int, num_samples: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Put one batch through ``module``.

        Args:
            module: The model, perhaps wrapped.
            batch: Some of the samples that are averaged over.
            count: How many samples the batch was made of.
            num_samples: How many are averaged over, in all batches of all ranks.

        Returns:
            This batch's share of the mean loss and of the mean of each metric, scalars: summed over
            batches and ranks they are the means over ``num_samples``.
        """
        inputs, target = inputs_and_target(to_device(batch, self.device))
        if hasattr(target, "__len__") and len(target) != count:
            raise WorkloadError(
                f"a batch of {count} samples has a target of length {len(target)}. data.collate "
                f"must keep every sample, in the first dimension."
            )
        with self.precision.autocast():
            output = module(*inputs)
            loss = self.loss(output, target)
        share = self._share_of_loss(loss, count, num_samples)
        if torch.is_grad_enabled() and not share.requires_grad:
            raise WorkloadError(
                "the loss does not depend on the model's parameters. Compute it from the model's "
                "output, without .detach(), .item() or torch.no_grad()."
            )
        with torch.no_grad():
            metrics = [
                _sum_of_metric(name, function(output, target), count) / num_samples
                for name, function in self.metrics.items()
            ]
        return share, metrics

    def close(self) -> None:
        """End the data sets' loader processes."""
        self.train.close()
        if self.eval is not None:
            self.eval.close()

    @staticmethod
    def _share_of_loss(value: Any, count: int, num_samples: int) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise WorkloadError(
                f"loss returned {value!r}, a {type(value).__name__}. Return a tensor: the mean "
                f"over the batch, or one value a sample."
            )
        if value.ndim == 0:
            # Multiplied by exactly 1.0 where one batch is all there is: the plain loop to the bit.
            return value * (count / num_samples)
        if value.shape == (count,):
            return value.sum() / num_samples
        raise WorkloadError(
            f"loss returned a tensor of shape {tuple(value.shape)} for {count} samples. Return "
            "the mean over the "
            f"batch, or one value a sample: shape ({count},)."
        )


def _sum_of_metric(name: str, value: Any, count: int) -> torch.Tensor:
    result = torch.as_tensor(value, dtype=torch.float64).detach()
    if result.ndim == 0:
        return result * count
    if result.shape[0] == count:
        return result.reshape(count, -1).mean(dim=1).sum()
    raise WorkloadError(
        f"metric {name!r} returned shape {tuple(result.shape)} for {count} samples. Return one "
        "value a sample: "
        f"shape ({count},)."
    )


def build_workload(config: TrainConfig, references: References, device: torch.device) -> Workload:
    """Build everything from the bundle, the same on every rank.

    Raises:
        WorkloadError, DataError: If an object is not what its key needs.
        Exception: Whatever the notebook's own code raises.
    """
    if config.reproducible is not None:
        compute_deterministically(device)
    seed_all(config.seed, step=0, rank=0)
    model = _build_model(references.evaluate("model")).to(device)
    collate = references.evaluate("data.collate") if config.data.collate else None
    sources = {
        key: open_samples(
            references.evaluate(key),
            name=key,
            collate=collate,
            num_workers=config.data.num_workers,
        )
        for key in (("data.train", "data.eval") if config.data.eval else ("data.train",))
    }
    precision = Precision(config.precision, device)
    return Workload(
        model=model,
        optimizer=build_optimizer(config.optimizer, references, model),
        loss=_callable(references.evaluate("loss"), "loss"),
        metrics={
            name: _callable(references.evaluate(f"metrics.{name}"), f"metric {name!r}")
            for name in config.metrics
        },
        train=sources["data.train"],
        eval=sources.get("data.eval"),
        device=device,
        precision=precision,
        extras=precision.extras,
    )


def _build_model(value: Any) -> nn.Module:
    model = value if isinstance(value, nn.Module) else value() if callable(value) else value
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"model gave {model!r}, a {type(model).__name__}, which is no nn.Module. Let it be a "
            "module, its class, "
            f"or a function that returns one."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise WorkloadError(
            "model has no parameter that requires a gradient: there is nothing to train."
        )
    return model.train()


def _callable(value: Any, what: str) -> Callable[..., Any]:
    if isinstance(value, type) and issubclass(value, nn.Module):
        value = value()
    if not callable(value):
        raise WorkloadError(f"{what} is a {type(value).__name__}, which cannot be called.")
    return value  # type: ignore[no-any-return]
