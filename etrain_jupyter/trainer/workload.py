"""Workload of a job, built on the rank: model, data, loss, metrics and optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.data import SampleSource, open_samples
from etrain_jupyter.trainer.devices import compute_deterministically
from etrain_jupyter.trainer.objective.measures import Measures, Pass, Portion, share_of_loss
from etrain_jupyter.trainer.objective.one_pass import (
    LossOfOutput,
    Objective,
    OnePass,
    StepFunction,
    eval_mode,
)
from etrain_jupyter.trainer.objective.weight import Weight
from etrain_jupyter.trainer.objective.whole_set import WholeSetMetric, is_torchmetric
from etrain_jupyter.trainer.optimizers import build_optimizer
from etrain_jupyter.trainer.precision import Precision
from etrain_jupyter.trainer.prefetch import to_device, uses_pinned_memory
from etrain_jupyter.trainer.references import References, WorkloadError, check_fit
from etrain_jupyter.trainer.seeds import seed_all
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer
from etrain_jupyter.trainer.state.capture import Stateful
from etrain_jupyter.trainer.state.parts import AVERAGE
from etrain_jupyter.trainer.state.weight_average import WeightAverage
from etrain_jupyter.trainer.sync_batchnorm import SyncedNorms


@dataclass(kw_only=True)
class Workload:
    """The objects with which a rank trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    measures: Measures
    train: SampleSource
    eval: SampleSource | None
    device: torch.device
    weight: Weight | None = None
    """Weight of a batch in the mean; None if every sample counts equally."""
    whole_set: Mapping[str, WholeSetMetric] = field(default_factory=dict)
    """Metrics computed over all of data.eval."""
    predict: Callable[[nn.Module, Any], Any] | None = None
    """The notebook's ``eval.predict``; None if there is none."""
    loss_source: str = "loss"
    """Origin of the loss, for messages."""
    precision: Precision = field(default_factory=Precision)
    norms: SyncedNorms | None = None
    """The model's BatchNorm layers; None without ``sync_batchnorm``."""
    shards: ShardedOptimizer | None = None
    """The shards of the optimizer's state; None without ``shard``."""
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    """Other stateful components, by name, that are saved and sent with the weights."""

    @cached_property
    def module(self) -> nn.Module:
        """The model with its objective, which maps a batch to a loss; DDP wraps this module."""
        return OnePass(self.model, self.objective)

    def forward(
        self,
        module: nn.Module,
        batch: Any,
        count: int,
        num_samples: int,
        *,
        is_measured: bool = True,
    ) -> Pass:
        """Run the forward pass of one batch.

        Args:
            module: This workload's module, possibly wrapped.
            batch: One batch of the samples over which the mean is computed.
            count: Number of samples in the batch.
            num_samples: Number of samples over which the mean is computed, in all batches of all
                ranks.
            is_measured: False to leave out the metrics.

        Returns:
            This batch's shares. ``measures.means`` turns their sums over all batches and ranks into
            means.
        """
        # Compute the weight in host memory, before the batch is moved to the device.
        weight = self.weight.of(batch, count) if self.weight is not None else None
        portion = Portion(count, num_samples, weight)
        with self.precision.autocast():
            passed = module(to_device(batch, self.device))
        # A collate function that drops samples would silently change the mean.
        target = passed.target
        is_row = hasattr(target, "__len__") and not isinstance(target, Mapping)
        if is_row and getattr(target, "shape", None) != () and len(target) != count:
            raise WorkloadError(
                f"a batch of {count} samples has a target of length {len(target)}. data.collate "
                f"must keep every sample, in the first dimension."
            )
        loss = share_of_loss(passed.loss, portion, source=self.loss_source)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise WorkloadError(
                "the loss does not depend on the model's parameters. Compute it from the model's "
                "output, without .detach(), .item() or torch.no_grad()."
            )
        shares = self.measures.shares(passed, portion) if is_measured else []
        return Pass(loss, shares, passed.output, passed.target)

    @property
    def average(self) -> WeightAverage | None:
        """The average of the weights; None without ``ema``."""
        found = self.extras.get(AVERAGE)
        return found if isinstance(found, WeightAverage) else None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Prepare the model for an evaluation: evaluation mode, averaged weights, no gradients."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(eval_mode(self.model))
            stack.enter_context(torch.no_grad())
            if self.average is not None:
                stack.enter_context(self.average.applied())
            yield

    def predict_batch(self, batch: Any) -> Any:
        """Return what ``eval.predict`` returns for a batch; the model is in evaluation mode."""
        assert self.predict is not None
        with self.precision.autocast():
            return self.predict(self.model, to_device(batch, self.device))

    def close(self) -> None:
        """Stop the loader processes of the data sets."""
        self.train.close()
        if self.eval is not None:
            self.eval.close()


def build_workload(
    config: TrainConfig,
    references: References,
    device: torch.device,
    *,
    warn: Callable[[str], None] = print,
) -> Workload:
    """Build the workload from the bundle, identically on every rank.

    Args:
        config: The job.
        references: The notebook's objects.
        device: The device to train on.
        warn: Receives messages about problems that do not stop the job.

    Raises:
        WorkloadError, DataError: If an object does not fit its key.
        Exception: Any error in the notebook's own code.
    """
    if config.reproducible is not None:
        compute_deterministically(device)
    # Every trainer must build the same initial weights, whatever its rank will be.
    seed_all(config.seed, step=0, rank=0)
    model = _build_model(references.evaluate("model")).to(device)
    collate = references.evaluate("data.collate") if config.data.collate else None
    sources = {
        key: open_samples(
            references.evaluate(key),
            name=key,
            collate=collate,
            num_workers=config.data.num_workers,
            pins_memory=uses_pinned_memory(device),
            warn=warn,
        )
        for key in (("data.train", "data.eval") if config.data.eval else ("data.train",))
    }
    precision = Precision(config.precision, device)
    metrics, whole_set = _build_metrics(config, references)
    optimizer = build_optimizer(config.optimizer, references, model)
    return Workload(
        model=model,
        optimizer=optimizer,
        shards=ShardedOptimizer(optimizer, model) if config.shard == "optimizer" else None,
        objective=_build_objective(config, references),
        measures=Measures(metrics, is_weighted=config.weight is not None),
        train=sources["data.train"],
        eval=sources.get("data.eval"),
        device=device,
        weight=_build_weight(config, references, model),
        whole_set=whole_set,
        predict=_callable(references, "eval.predict") if config.eval.predict else None,
        loss_source="step" if config.step else "loss" if config.loss else "the model's loss",
        precision=precision,
        norms=SyncedNorms(model) if config.sync_batchnorm else None,
        extras={**precision.extras, **_build_average(config, model)},
    )


def _build_weight(config: TrainConfig, references: References, model: nn.Module) -> Weight | None:
    if config.weight is None:
        return None
    return Weight(_callable(references, "weight"), model)


def _build_average(config: TrainConfig, model: nn.Module) -> dict[str, Stateful]:
    if config.ema is None:
        return {}
    ema = config.ema
    return {AVERAGE: WeightAverage(model, decay=ema.decay, has_warmup=ema.warmup)}


def _build_objective(config: TrainConfig, references: References) -> Objective:
    if config.step is not None:
        return StepFunction(_callable(references, "step"))
    if config.loss is None:
        return LossOfOutput(None)
    return LossOfOutput(_callable(references, "loss"))


def _build_metrics(
    config: TrainConfig, references: References
) -> tuple[dict[str, Callable[[Any, Any], Any]], dict[str, WholeSetMetric]]:
    # Returns the metrics of single batches, and those that need the whole evaluation set.
    functions: dict[str, Callable[[Any, Any], Any]] = {}
    whole_set: dict[str, WholeSetMetric] = {}
    for name in config.metrics:
        value = _callable(references, f"metrics.{name}")
        if not is_torchmetric(value):
            functions[name] = value
            continue
        if not config.eval.loss:
            raise WorkloadError(
                f"metric {name!r} is from torchmetrics: it is computed in evaluations only, and "
                "eval.loss: false leaves it out. Remove one of the two lines."
            )
        if config.data.eval is None:
            raise WorkloadError(
                f"metric {name!r} is from torchmetrics: it is computed over all of data.eval, "
                "which is missing. Add for example 'data: {train: train_set, eval: eval_set}', or "
                "give a function (output, target)."
            )
        whole_set[name] = WholeSetMetric(name, value)
    return functions, whole_set


def _build_model(value: Any) -> nn.Module:
    model = value if isinstance(value, nn.Module) else value() if callable(value) else value
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"model gave {model!r}, a {type(model).__name__}, which is not an nn.Module. Give a "
            "module, its class, or a function that returns one."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise WorkloadError(
            f"model gave a {type(model).__name__} with no parameter that requires a gradient, so "
            "there is nothing to train. Set requires_grad of at least one parameter."
        )
    return model.train()


def _callable(references: References, key: str) -> Callable[..., Any]:
    value = references.evaluate(key)
    # For example, ``loss: nn.CrossEntropyLoss``, without parentheses.
    if isinstance(value, type) and issubclass(value, nn.Module):
        value = value()
    if not callable(value):
        raise WorkloadError(
            f"{key} is a {type(value).__name__}, which cannot be called. Give a function, a "
            "module, or a module's class."
        )
    check_fit(key, value)
    return value  # type: ignore[no-any-return]
