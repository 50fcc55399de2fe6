"""The job of ``spot``: steps take time in proportion to a rank's samples, and no processor.

So fewer machines are slower, as with GPUs, and what two cores do beside it hardly counts.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn

NUM_SAMPLES = 4096
SAMPLE_S = 0.03
"""What a sample takes."""


def make_points() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points, ``(B, 8)``, and on which side of a plane each is, ``(B,)``."""
    points_BF = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(3))
    return points_BF, (points_BF.sum(1) > 0).long()


def build_model() -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def slow_loss(outputs_BC: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
    """Return the loss, after as long as the samples take."""
    time.sleep(SAMPLE_S * len(labels_B))
    return F.cross_entropy(outputs_BC, labels_B)
