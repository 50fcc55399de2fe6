"""Jobs whose evaluations count the batches that they evaluate; importable by other processes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.trainer.whole_set_jobs import accuracy, metrics

NUM_SAMPLES, BATCH, MICRO = 51, 16, 3


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(7))
    x[:, 0] = torch.arange(NUM_SAMPLES) / NUM_SAMPLES
    return x, torch.arange(NUM_SAMPLES) % 3


class Net(nn.Linear):
    """Appends the first sample of each batch of an evaluation to the file ``calls``."""

    def __init__(self, calls: str) -> None:
        super().__init__(4, 3)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            with Path(self.calls).open("a") as file:
                file.write(f"{round(float(x[0, 0]) * NUM_SAMPLES)}\n")
        return super().forward(x)


def names(calls: str) -> dict[str, Any]:
    return {
        "model": functools.partial(Net, calls),
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
        "batch": {"global": BATCH, "micro": MICRO},
        "epochs": 2,
        **more,
    }
