"""Jobs whose weights must not depend on the ranks; importable by other processes."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

NUM_SAMPLES, BATCH, SHARDS = 50, 16, 4
# The last step of an epoch has 2 samples: all shards but one are empty.
STEPS = 6


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(NUM_SAMPLES, 4, generator=generator), torch.arange(NUM_SAMPLES) % 3


class Net(nn.Module):
    """Dropout, BatchNorm, a layer that no sample uses, and one that only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.rare = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.front(x)
        if x[0, 0] > 0.8:
            hidden = self.rare(hidden)
        return self.head(hidden) * self.scale.float()


class Deep(nn.Module):
    """More parameters than fit into one bucket or one message."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 1100), nn.ReLU(), nn.Linear(1100, 1100), nn.ReLU(), nn.Linear(1100, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Noisy:
    """A data set that augments its samples with all random generators."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(4) + float(np.random.rand()) + random.random()
        return torch.arange(4) / 4 + index / NUM_SAMPLES + noise, index % 3


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float()


def smooth_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


def _names(**names: Any) -> dict[str, Any]:
    return {
        "model": Net,
        "data.train": make_data(),
        "data.eval": make_data(),
        "loss": smooth_loss,
        "metrics.accuracy": accuracy,
        **names,
    }


def plain() -> dict[str, Any]:
    return _names()


def deep() -> dict[str, Any]:
    return _names(model=Deep)


def noisy() -> dict[str, Any]:
    return _names(**{"data.train": Noisy(), "data.eval": Noisy()})


class Matrices(nn.Module):
    """Only two-dimensional parameters, which some optimizers require."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16, bias=False), nn.Dropout(0.2), nn.Linear(16, 3, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def matrices() -> dict[str, Any]:
    return _names(model=Matrices)


class Recomputing(nn.Module):
    """One layer used twice, whose activations are recomputed in the backward pass."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_(self.training)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def recomputing() -> dict[str, Any]:
    return _names(model=functools.partial(Recomputing, use_reentrant=False))


def recomputing_in_pieces() -> dict[str, Any]:
    return _names(model=functools.partial(Recomputing, use_reentrant=True))


def keys(**more: Any) -> dict[str, Any]:
    """Return a job's configuration."""
    return {
        "model": "Net",
        "data": {"train": "d", "eval": "d"},
        "loss": "f",
        "metrics": {"accuracy": "a"},
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "batch": {"global": BATCH},
        "steps": STEPS,
        "reproducible": {"shards": SHARDS},
        **more,
    }
