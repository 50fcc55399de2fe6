"""Models and data that every system trains. The data are synthetic, so nothing is downloaded.

Shapes: ``B`` samples, ``C=1`` channel, ``H=W=28`` pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

NUM_SAMPLES = 16_384
NUM_CLASSES = 10
GLOBAL_BATCH_SIZE = 128
LEARNING_RATE = 0.01
MOMENTUM = 0.9


def make_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images of ten patterns, ``(B, C, H, W)``, and their labels, ``(B,)``."""
    generator = torch.Generator().manual_seed(0)
    patterns_KCHW = torch.randn(NUM_CLASSES, 1, 28, 28, generator=generator)
    labels_B = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
    noise_BCHW = torch.randn(NUM_SAMPLES, 1, 28, 28, generator=generator)
    return patterns_KCHW[labels_B] + noise_BCHW, labels_B


def build_cnn() -> nn.Module:
    """Return a CNN of 50 thousand parameters, whose step is dominated by computation."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, NUM_CLASSES),
    )


def build_mlp() -> nn.Module:
    """Return an MLP of 10 million parameters, with a large share of gradient exchange."""
    return _mlp(2048)


def build_small() -> nn.Module:
    """Return a model with a negligible step, for benchmarks that do not measure training."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, NUM_CLASSES))


def build_wide() -> nn.Module:
    """Return an MLP of 59 million parameters, for costs that grow with the state."""
    return _mlp(5248)


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(28 * 28, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, NUM_CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": build_cnn, "mlp": build_mlp}

PHOTOS = "photos"
"""Workload of ``photos.py``, which needs torchvision."""

LARGE_MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": build_mlp, "wide": build_wide}
"""Models with a state that is large enough to measure the cost of saving it."""


def patient_loss(logits_BK: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
    """Sleep for 40 ms without using a CPU, then return the cross entropy."""
    time.sleep(0.04)
    return nn.functional.cross_entropy(logits_BK, labels_B)
