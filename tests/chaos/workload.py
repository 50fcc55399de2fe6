"""Small job for the chaos tests: BatchNorm and dropout, steps of a few milliseconds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NUM_SAMPLES, BATCH = 230, 8  # 29 steps per epoch; the last one has 6 samples
STEPS_PER_EPOCH = 29


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float()


def body(**changes: Any) -> dict[str, Any]:
    """Return the body of a cell with these keys changed."""
    return {
        "model": Net,
        "data": {"train": make_data, "eval": make_data},
        "loss": F.cross_entropy,
        "metrics": {"accuracy": accuracy},
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "batch": {"global": BATCH},
        "epochs": 3,
        "workers": {"min": 1, "max": 4},
        **changes,
    }
