"""Jobs with noisy or compressed gradients; importable by other processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NUM_SAMPLES, PER_WORKER = 96, 8


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return x, (x[:, :1] + 0.3 * torch.randn(NUM_SAMPLES, 1, generator=generator) > 0).long()[:, 0]


class Net(nn.Module):
    """Matrices large enough for a low-rank approximation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def names() -> dict[str, Any]:
    return {
        "model": Net,
        "data.train": make_data(),
        "loss": F.cross_entropy,
    }


def keys(**more: Any) -> dict[str, Any]:
    """Return a cell's body with these keys changed."""
    return {
        "model": "Net",
        "data": {"train": "d"},
        "loss": "f",
        "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
        "batch": {"per_worker": PER_WORKER},
        "epochs": 4,
        **more,
    }
