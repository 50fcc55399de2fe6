"""The workload ``photos`` of ``paired``: a ResNet of torchvision on augmented JPEG images.

Both systems read the same data set with the same ``collate``. The images are synthetic. It needs
torchvision.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.transforms import v2

from etrain_jupyter.recipes import vision

NUM_PHOTOS = 8_192
NUM_CLASSES = 10
SIZE = 32


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """JPEG images in memory, decoded when they are read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(NUM_PHOTOS, 3, 8, 8, generator=generator)
        images = (F.interpolate(coarse, SIZE, mode="bilinear") * 255).to(torch.uint8)
        self._files = [encode_jpeg(image) for image in images]
        self._labels = torch.randint(NUM_CLASSES, (NUM_PHOTOS,), generator=generator).tolist()

    def __len__(self) -> int:
        return NUM_PHOTOS

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return decode_jpeg(self._files[number], ImageReadMode.RGB), self._labels[number]


def build() -> nn.Module:
    """Return a ResNet of 4.9 million parameters."""
    net: nn.Module = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=NUM_CLASSES)
    return net


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return augmented images ``(B, 3, H, W)`` and labels ``(B,)``."""
    return _batches(samples)


_batches = vision.classification.Batches(
    NUM_CLASSES,
    train=v2.Compose([v2.RandomCrop(SIZE, padding=4), v2.RandomHorizontalFlip()]),
)
