"""Semantic segmentation: batches, loss, and mean IoU over the whole set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.vision import batches
from etrain_jupyter.recipes.vision.batches import Sample, plain
from etrain_jupyter.recipes.vision.installed import tv_tensors, v2

IGNORED = 255
"""Class id of pixels that are neither trained nor scored."""
_AUX_WEIGHT = 0.5
"""Weight of the auxiliary loss in the training script of torchvision."""


class Batches(batches.Batches[tuple[torch.Tensor, torch.Tensor]]):
    """Make batches of images and masks; a ``data.collate``.

    A batch is ``(images, masks)`` of shapes ``(B, C, H, W)`` and ``(B, H, W)``; masks are int64. A
    transform changes image and mask alike.

    Args:
        num_classes: Number of classes, including the background. Ids are 0 to ``num_classes - 1``,
            and 255 for pixels to ignore.
        train: Transform of ``torchvision.transforms.v2`` for the samples of ``data.train``.
        eval: Transform for the samples of ``data.eval``.
        channels: Number of channels of each image.
    """

    def _check(self, target: Any, image: Any, where: str) -> Any:
        mask = _tensor(target, where)
        if mask.ndim == 3 and mask.shape[0] == 1:
            mask = mask[0]
        if mask.shape != image.shape[1:]:
            raise RecipeError(
                f"the mask of {where} has the shape {tuple(mask.shape)}, but its image has height "
                f"and width {tuple(image.shape[1:])}. Fix the files: both must have one size."
            )
        if mask.is_floating_point() or mask.is_complex():
            raise RecipeError(
                f"the mask of {where} has the dtype {mask.dtype}. Return class ids as integers."
            )
        mask = mask.long()  # torch cannot compare unsigned 16-bit integers
        is_valid = ((mask >= 0) & (mask < self.num_classes)) | (mask == IGNORED)
        if not is_valid.all():
            raise RecipeError(
                f"the mask of {where} has the class id {int(mask[~is_valid][0])}, but num_classes="
                f"{self.num_classes} allows 0 to {self.num_classes - 1}, and {IGNORED} to ignore a "
                "pixel. Fix the mask, or set num_classes."
            )
        return tv_tensors.Mask(plain(mask))

    def _finish(self, target: Any, image: Any, where: str, is_training: bool) -> torch.Tensor:
        if target.shape != image.shape[1:]:
            raise RecipeError(
                f"after its transform, the mask of {where} has the shape {tuple(target.shape)}, "
                f"and its image {tuple(image.shape[1:])}. Use transforms of "
                "torchvision.transforms.v2, which change both."
            )
        return plain(target)

    def _join(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._stack(samples), torch.stack([sample.target for sample in samples])


def _tensor(mask: Any, where: str) -> torch.Tensor:
    if isinstance(mask, torch.Tensor):
        return mask
    if not hasattr(mask, "getbands"):
        raise RecipeError(
            f"the mask of {where} is a {type(mask).__name__}. Return a PIL image, or a tensor of "
            "class ids of shape (height, width)."
        )
    return v2.functional.pil_to_tensor(mask)  # type: ignore[no-any-return]


def step(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Compute the mean cross entropy over the pixels of a batch; a ``step``.

    Args:
        model: Returns logits of shape ``(B, num_classes, H, W)``, or a dict with these as ``out``,
            as the models of torchvision do. Its ``aux`` counts half.
        batch: Images and masks.

    Returns:
        The loss, a scalar; 0 if all pixels of the batch are ignored.
    """
    images, masks = batch
    output = model(images)
    loss = _cross_entropy(logits_of(output), masks)
    if isinstance(output, Mapping) and "aux" in output:
        loss = loss + _AUX_WEIGHT * _cross_entropy(output["aux"], masks)
    return loss


def predict(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Count the pixels of each class in a batch; an ``eval.predict``.

    Returns:
        For each sample and class, three numbers of pixels: both predicted and labeled as this
        class, predicted as it, and labeled as it. Shape ``(B, num_classes, 3)``, int64.
    """
    images, masks = batch
    logits = logits_of(model(images))
    num_classes, is_counted = logits.shape[1], masks != IGNORED
    found = logits.argmax(dim=1)
    columns = (
        torch.where(is_counted & (found == masks), masks, num_classes),
        torch.where(is_counted, found, num_classes),
        torch.where(is_counted, masks, num_classes),
    )
    # The last bin counts the pixels that belong to no other bin.
    counts = [
        torch.stack([torch.bincount(row, minlength=num_classes + 1) for row in column.flatten(1)])
        for column in columns
    ]
    return torch.stack(counts, dim=-1)[:, :num_classes]


def score(
    records: Sequence[torch.Tensor], *, classes: Sequence[str] | None = None
) -> dict[str, float]:
    """Compute the mean intersection over union over the whole set; an ``eval.score``.

    A class that is in no mask and in no prediction is left out of the mean.

    Args:
        records: Counts of each sample, as ``predict`` returns them.
        classes: Names of the classes, for one score per class.

    Returns:
        ``mean_iou`` and ``pixel_accuracy``, and ``iou_NAME`` for each name; from 0 to 1.

    Raises:
        RecipeError: If the number of names differs from that of the classes.
    """
    both, found, labeled = torch.stack(list(records)).sum(dim=0).double().unbind(dim=-1)
    iou = both / (found + labeled - both)  # NaN for a class that is nowhere
    scores = {
        "mean_iou": iou.nanmean().item(),
        "pixel_accuracy": (both.sum() / labeled.sum()).item(),
    }
    if classes is not None:
        if len(classes) != len(iou):
            raise RecipeError(
                f"there are {len(classes)} names for {len(iou)} classes. Name the background, too."
            )
        named = zip(classes, iou.tolist(), strict=True)
        scores |= {f"iou_{name}": value for name, value in named if not math.isnan(value)}
    return scores


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits in the output of a model: a tensor, or a dict with ``out``."""
    logits = output["out"] if isinstance(output, Mapping) else output
    if logits.ndim != 4 or logits.shape[1] < 2:
        raise RecipeError(
            f"the model returns logits of the shape {tuple(logits.shape)} instead of (batch, "
            "num_classes, height, width). A model for one object and the background has 2 classes."
        )
    return logits  # type: ignore[no-any-return]


def _cross_entropy(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    # The mean over no pixel would be NaN.
    total = F.cross_entropy(logits.float(), masks, ignore_index=IGNORED, reduction="sum")
    return total / (masks != IGNORED).sum().clamp(min=1)
