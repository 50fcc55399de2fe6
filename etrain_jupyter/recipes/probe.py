"""The smallest possible job: one linear layer, for checking that a pool can train."""

from __future__ import annotations

import torch
from torch import nn

NUM_SAMPLES, NUM_FEATURES = 8, 4


class Probe(nn.Linear):
    """A linear layer with two outputs."""

    def __init__(self) -> None:
        super().__init__(NUM_FEATURES, 2)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of shape ``(8, 4)`` and labels of shape ``(8,)``."""
    features = torch.linspace(-1, 1, NUM_SAMPLES * NUM_FEATURES).reshape(NUM_SAMPLES, -1)
    return features, (features.sum(dim=1) > 0).long()
