"""Workload of ``spot``: step time is proportional to a rank's samples and uses no CPU.

So a job with fewer machines is slower, as with GPUs, and other load on the few cores of the
benchmark machine hardly matters.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn

NUM_SAMPLES = 4096
SAMPLE_S = 0.03
"""Seconds per sample."""


def make_points() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of shape ``(B, 8)`` and labels for the side of a plane, ``(B,)``."""
    points_BF = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(3))
    return points_BF, (points_BF.sum(1) > 0).long()


def build_model() -> nn.Module:
    """Return a small network with batch normalization."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def slow_loss(outputs_BC: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
    """Sleep in proportion to the number of samples, then return the cross-entropy loss."""
    time.sleep(SAMPLE_S * len(labels_B))
    return F.cross_entropy(outputs_BC, labels_B)
