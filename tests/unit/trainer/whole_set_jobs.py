"""Jobs with metrics of torchmetrics; importable by other processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, Metric, MinMaxMetric
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef

NUM_SAMPLES, BATCH = 50, 16


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(NUM_SAMPLES, 4, generator=generator), torch.arange(NUM_SAMPLES) % 3


class Largest(Metric):
    """A metric with states of every supported reduction: max, min, mean and cat."""

    full_state_update = False

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("smallest", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("factor", torch.tensor(2.0), dist_reduce_fx="mean")
        self.add_state("rows", torch.zeros(0), dist_reduce_fx="cat")
        self.add_state("parts", [], dist_reduce_fx=None)

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.largest = torch.maximum(self.largest, output.max())
        self.smallest = torch.minimum(self.smallest, output.min())
        self.rows = torch.cat([self.rows, target.float()])
        self.parts.append(target)

    def compute(self) -> torch.Tensor:
        # Depends on the order of the samples.
        places = torch.arange(len(self.rows), dtype=torch.float64)
        checked = (self.rows * places).sum() + (torch.cat(self.parts) * places).sum()
        return checked + self.factor * (self.largest - self.smallest)


def metrics() -> dict[str, Metric]:
    return {
        "f1": MulticlassF1Score(3, average="macro"),
        "auroc": MulticlassAUROC(3),
        "spread": Largest(),
    }


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float()


def names() -> dict[str, Any]:
    return {
        "model": lambda: nn.Linear(4, 3),
        "data.train": make_data(),
        "data.eval": make_data(),
        "loss": F.cross_entropy,
        "metrics.accuracy": accuracy,
        **{f"metrics.{name}": metric for name, metric in metrics().items()},
    }


def keys(**more: Any) -> dict[str, Any]:
    return {
        "model": "Net",
        "data": {"train": "d", "eval": "d"},
        "loss": "f",
        "metrics": {name: "m" for name in ("accuracy", *metrics())},
        "batch": {"global": BATCH, "micro": 3},
        "epochs": 2,
        **more,
    }


UNFIT = {
    "several values": MulticlassF1Score(3, average=None),
    "wrapped": MinMaxMetric(MeanSquaredError()),
    "sum of two": MeanMetric() + MaxMetric(),
    "merged by None": PearsonCorrCoef(),
}
