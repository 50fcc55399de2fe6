"""The two models of the benchmark ``search``, and the digits that they classify."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

NUM_TRAIN = 1280
BATCH = 128
STEP_S = 0.05
"""Minimum duration in seconds of a step on one worker. Decisions arrive while a trial continues, so
a trial of milliseconds would end before them."""
NUM_CLASSES = 10


class Cnn(nn.Module):
    """Two convolutions over a digit of 8 x 8 pixels, with its own seed."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, NUM_CLASSES),
        )

    def forward(self, x_BHW: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``(B, 10)``."""
        logits_BK: torch.Tensor = self.layers(x_BHW[:, None])
        return logits_BK


class Transformer(nn.Module):
    """A transformer of two layers over the rows of a digit, with its own seed."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(8, 4 * width)
        self.position = nn.Parameter(torch.randn(8, 4 * width) / 10)
        layer = nn.TransformerEncoderLayer(
            4 * width, nhead=4, dim_feedforward=8 * width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(4 * width, NUM_CLASSES)

    def forward(self, x_BHW: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``(B, 10)``."""
        rows_BHD = self.encoder(self.embed(x_BHW) + self.position)
        logits_BK: torch.Tensor = self.head(rows_BHD.mean(1))
        return logits_BK


MODELS: dict[str, type[nn.Module]] = {"cnn": Cnn, "transformer": Transformer}


def make_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,280 handwritten digits of scikit-learn for training, and the other 517."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images_BHW = torch.tensor(digits.images, dtype=torch.float32) / 16
    classes_B = torch.tensor(digits.target)
    first, rest = slice(0, NUM_TRAIN), slice(NUM_TRAIN, None)
    return (
        TensorDataset(images_BHW[first], classes_B[first]),
        TensorDataset(images_BHW[rest], classes_B[rest]),
    )


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, after waiting ``STEP_S`` seconds for each ``BATCH`` samples."""
    if torch.is_grad_enabled():
        time.sleep(STEP_S * len(target) / BATCH)
    return F.cross_entropy(output, target)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return 1 for each digit that was recognized."""
    return (output.argmax(-1) == target).float()
