"""The three tasks of ``vision``: data, small models, and the settings of their jobs.

The models learn in processor minutes and have no BatchNorm, so that a step does not depend on how
its batch is divided among the workers. Images are reduced once and stored, because reading a
photograph takes as long as training on a small one.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from etrain_jupyter.recipes import vision

CELLS = ("RBC", "WBC", "Platelets")
CELL_SIZE = (96, 128)
CELL_SPLITS = {"train": ("train",), "test": ("val", "test")}
"""Splits of the cells: the test split alone (72 images) makes a score too noisy."""
NUCLEI_SIZE = (64, 64)
NUM_PHOTOS = {"train": 20_000, "test": 5_000}
MOMENTUM = 0.95
STRIDE = 4
"""Pixels per place of the detector's heat map."""
MAX_FOUND = 60
"""Detections per image."""


@dataclass(frozen=True, kw_only=True)
class VisionTask:
    """A task of the benchmark."""

    name: str
    score: str
    """Score that is compared."""
    model: Callable[[], nn.Module]
    batches: Callable[[], Any]
    """Returns the ``data.collate``."""
    step: Callable[[nn.Module, Any], Any]
    """Returns the loss of a batch, or a dict with it."""
    predict: Callable[[nn.Module, Any], Any]
    score_records: Callable[[Any], dict[str, float]]
    """``eval.predict`` and ``eval.score`` of the recipe."""
    lr: float
    """Learning rate of one worker."""
    batch: int
    """Samples per step of one worker."""
    epochs: int
    decay: Literal["none", "cosine"] = "cosine"
    """Decay of the learning rate."""


# --- data ---


def store(data: Path, folder: Path) -> None:
    """Reduce the images of all tasks and store them in ``folder``."""
    for part in ("train", "test"):
        torch.save(_photos(data / "cifar10" / "cifar10_jpeg.npz", part), folder / f"photos-{part}")
        boxes = [
            sample
            for split in CELL_SPLITS[part]
            for sample in _small(
                vision.read_voc(data / "detection" / "bccd", CELLS, split=split, repair=True),
                CELL_SIZE,
            )
        ]
        torch.save(boxes, folder / f"cells-{part}")
        nuclei = data / "segmentation" / "nuclei"
        split = json.loads((nuclei / "split.json").read_text(encoding="utf-8"))
        masks = vision.read_masks(
            nuclei / "images",
            nuclei / "labels",
            names=split["train" if part == "train" else "held"],
            is_instances=True,
        )
        torch.save(_small(masks, NUCLEI_SIZE), folder / f"nuclei-{part}")


def read(folder: str, name: str, part: str) -> list[Any]:
    """Return the samples of a task that ``store`` has stored."""
    found = torch.load(Path(folder) / f"{name}-{part}", weights_only=False, mmap=True)
    return list(zip(*found, strict=True)) if name == "photos" else found


def _photos(file: Path, part: str) -> tuple[torch.Tensor, list[int]]:
    with np.load(file) as stored:
        data, begins, labels = (stored[f"{part}_{key}"] for key in ("bytes", "offsets", "labels"))
    count = NUM_PHOTOS[part]
    images = [
        torch.from_numpy(np.array(Image.open(io.BytesIO(data[begins[n] : begins[n + 1]]))))
        for n in range(count)
    ]
    return torch.stack(images).permute(0, 3, 1, 2).contiguous(), labels[:count].tolist()


def _small(data: Any, size: tuple[int, int]) -> list[tuple[Any, Any]]:
    resize = v2.Resize(size)
    return [resize(image, target) for image, target, _ in (data[n] for n in range(len(data)))]


# --- models ---


def plain_conv(num_in: int, num_out: int, stride: int = 1) -> nn.Module:
    """Return a convolution with its activation, without normalization."""
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, stride, 1), nn.ReLU())


def init_plain(layers: nn.Module, last: nn.Module) -> None:
    """Initialize layers that have no normalization; the last one is small.

    With the default initial weights, their loss is constant for some hundred steps.
    """
    for module in layers.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        next(last.parameters()).mul_(0.1)


def photo_net() -> nn.Module:
    """Return a classifier, which reduces the photographs to half their size.

    It has no normalization, which would hide an excessive learning rate.
    """
    layers = nn.Sequential(
        *(v2.Normalize([0.5] * 3, [0.25] * 3), nn.AvgPool2d(2)),
        *(plain_conv(3, 16), plain_conv(16, 16), nn.MaxPool2d(2)),
        *(plain_conv(16, 32), plain_conv(32, 32), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    init_plain(layers, layers[-1])
    return layers


class HeatMapDetector(nn.Module):
    """Detect objects as the peaks of a heat map per class, with the interface of torchvision.

    It returns a dict of losses in training and detections in evaluation, and has no normalization,
    like the classifier. Source: Zhou et al.,
    "Objects as Points", 2019, arXiv 1904.07850.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        net = UNet(16, num_classes + 2)
        self.layers = nn.Sequential(Centered(), plain_conv(3, 8, 2), plain_conv(8, 16, 2), net)
        last = net.last[-1]
        assert isinstance(last, nn.Conv2d)
        assert last.bias is not None
        init_plain(self.layers, last)
        nn.init.constant_(last.bias[:num_classes], -3.0)

    def forward(self, images: list[torch.Tensor], targets: Any = None) -> Any:
        """Return the losses in training, and the detections of each image otherwise."""
        output = self.layers(torch.stack(list(images)))
        heat, sizes = output[:, : self.num_classes].sigmoid(), output[:, self.num_classes :]
        if not self.training:
            return [self._found(*one) for one in zip(heat, sizes, strict=True)]
        made = [self._wanted(target, heat.shape[2:]) for target in targets]
        peaks, wanted, places = (torch.stack(parts) for parts in zip(*made, strict=True))
        return {
            "heat": _focal_loss(heat.clamp(1e-4, 1 - 1e-4), peaks),
            "size": ((sizes - wanted).abs() * places).sum() / places.sum().clamp(min=1),
        }

    def _wanted(self, target: Any, grid: Sequence[int]) -> tuple[torch.Tensor, ...]:
        boxes, labels = target["boxes"], target["labels"] - 1
        height, width = grid
        centers, sides = (boxes[:, :2] + boxes[:, 2:]) / 2 / STRIDE, boxes[:, 2:] - boxes[:, :2]
        x, y = centers[:, 0].long().clamp(max=width - 1), centers[:, 1].long().clamp(max=height - 1)
        spread = (sides.amax(dim=1) / STRIDE / 6).clamp(min=0.7)
        squares = (torch.arange(width) - x[:, None]).square()[:, None] + (
            torch.arange(height) - y[:, None]
        ).square()[:, :, None]
        bumps = torch.exp(-squares / (2 * spread.square())[:, None, None])
        peaks = torch.zeros(self.num_classes, height, width)
        for label in range(self.num_classes):
            if (labels == label).any():
                peaks[label] = bumps[labels == label].amax(dim=0)
        wanted, places = torch.zeros(2, height, width), torch.zeros(1, height, width)
        wanted[:, y, x] = sides.T / 32
        places[:, y, x] = 1
        return peaks, wanted, places

    def _found(self, heat: torch.Tensor, sizes: torch.Tensor) -> dict[str, torch.Tensor]:
        is_peak = heat == F.max_pool2d(heat, 3, 1, 1)
        scores, places = (heat * is_peak).flatten().topk(MAX_FOUND)
        width = heat.shape[2]
        label, place = places // heat[0].numel(), places % heat[0].numel()
        center = (torch.stack([place % width, place // width], dim=1) + 0.5) * STRIDE
        half = sizes.flatten(1)[:, place].T.clamp(min=0.03) * 16
        return {
            "boxes": torch.cat([center - half, center + half], dim=1),
            "labels": label + 1,
            "scores": scores,
        }


def _focal_loss(heat: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    is_peak = (peaks > 0.99).float()
    found = is_peak * (1 - heat).square() * heat.log()
    missed = (1 - is_peak) * (1 - peaks).pow(4) * heat.square() * (1 - heat).log()
    return -(found + missed).sum() / is_peak.sum().clamp(min=1)


class Centered(nn.Module):
    """Subtract the mean of each image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of the same shape, ``(B, C, H, W)``."""
        return images - images.mean(dim=(1, 2, 3), keepdim=True)


class UNet(nn.Module):
    """A small U-Net, without normalization like the classifier."""

    def __init__(self, num_in: int, num_out: int, width: int = 8) -> None:
        super().__init__()
        wide, widest = 2 * width, 4 * width
        self.top = nn.Sequential(plain_conv(num_in, width), plain_conv(width, width))
        self.middle = nn.Sequential(plain_conv(width, wide), plain_conv(wide, wide))
        self.bottom = nn.Sequential(plain_conv(wide, widest), plain_conv(widest, widest))
        self.up = plain_conv(widest + wide, wide)
        self.last = nn.Sequential(plain_conv(wide + width, width), nn.Conv2d(width, num_out, 1))
        init_plain(self, self.last[-1])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return ``(B, num_out, H, W)`` of ``(B, num_in, H, W)``."""
        top = self.top(images)
        middle = self.middle(F.max_pool2d(top, 2))
        bottom = self.bottom(F.max_pool2d(middle, 2))
        middle = self.up(torch.cat([F.interpolate(bottom, scale_factor=2), middle], 1))
        return self.last(torch.cat([F.interpolate(middle, scale_factor=2), top], 1))  # type: ignore[no-any-return]


def nuclei_net() -> nn.Module:
    """Return the segmenter of the nuclei: background or nucleus."""
    return nn.Sequential(Centered(), UNet(3, 2))


# --- tasks ---


def photo_batches() -> Any:
    """Return photographs without augmentation, which takes as long as training on them."""
    return vision.classification.Batches(10)


def photo_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch of photographs."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def cell_batches() -> Any:
    """Return the augmentation of photographs with boxes."""
    flips = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()])
    return vision.detection.Batches(1 + len(CELLS), train=flips)


def nuclei_batches() -> Any:
    """Return the augmentation of photographs with masks."""
    flips = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
    return vision.segmentation.Batches(2, train=v2.Compose(flips))


TASKS = {
    "photos": VisionTask(
        name="photos",
        score="accuracy",
        model=photo_net,
        batches=photo_batches,
        step=photo_step,
        predict=vision.classification.predict,
        score_records=vision.classification.score,
        lr=0.0015,
        batch=4,
        epochs=6,
    ),
    "cells": VisionTask(
        name="cells",
        score="map_50",
        model=functools.partial(HeatMapDetector, len(CELLS)),
        batches=cell_batches,
        step=vision.detection.step,
        predict=vision.detection.predict,
        score_records=vision.detection.score,
        lr=0.0015,
        batch=1,
        epochs=120,
    ),
    "nuclei": VisionTask(
        name="nuclei",
        score="mean_iou",
        model=nuclei_net,
        batches=nuclei_batches,
        step=vision.segmentation.step,
        predict=vision.segmentation.predict,
        score_records=vision.segmentation.score,
        lr=0.015,
        batch=1,
        epochs=40,
    ),
}
