"""Image classification: batches, and accuracy over the whole set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.vision import batches
from etrain_jupyter.recipes.vision.batches import Sample, Transform

_TOP = 5


class Batches(batches.Batches[tuple[torch.Tensor, torch.Tensor]]):
    """Make batches of images and class ids; a ``data.collate``.

    A batch is ``(images, labels)`` of shapes ``(B, C, H, W)`` and ``(B,)``, so ``loss`` can be
    ``F.cross_entropy``.

    Args:
        num_classes: Number of classes; ids are 0 to ``num_classes - 1``.
        train: Transform of ``torchvision.transforms.v2`` for the images of ``data.train``.
        eval: Transform for the images of ``data.eval``.
        channels: Number of channels of each image.
    """

    def _check(self, target: Any, image: Any, where: str) -> int:
        is_tensor = isinstance(target, torch.Tensor) and target.ndim == 0
        try:
            label = int(target) if not isinstance(target, torch.Tensor) or is_tensor else None
        except (TypeError, ValueError):
            label = None
        if label is None or label != target:
            raise RecipeError(
                f"the target of {where} is a {type(target).__name__}, not a class id. Return an "
                "integer."
            )
        if not 0 <= label < self.num_classes:
            raise RecipeError(
                f"{where} has the class id {label}, but num_classes={self.num_classes} allows 0 to "
                f"{self.num_classes - 1}. Fix the label, or set num_classes."
            )
        return label

    def _transform(self, transform: Transform, image: Any, target: Any) -> tuple[Any, Any]:
        # Transforms of one argument, such as those of torchvision's pretrained weights, also work.
        return transform(image), target

    def _join(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._stack(samples), torch.tensor([sample.target for sample in samples])


def predict(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Predict the classes of a batch; an ``eval.predict``.

    Returns:
        ``classes``: the five best classes of each image, best first, shape ``(B, 5)`` (fewer if
        there are fewer classes); ``target``: the class ids, shape ``(B,)``.
    """
    images, target = batch
    logits = model(images)
    return {"classes": logits.topk(min(_TOP, logits.shape[-1])).indices, "target": target}


def score(records: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Compute the accuracy over the whole set; an ``eval.score``.

    Returns:
        ``accuracy``, and ``top5_accuracy`` if there are more than five classes; from 0 to 1.
    """
    classes = torch.stack([record["classes"] for record in records])
    is_right = classes == torch.stack([record["target"] for record in records])[:, None]
    scores = {"accuracy": is_right[:, 0].double().mean().item()}
    if classes.shape[1] == _TOP:
        scores["top5_accuracy"] = is_right.any(dim=1).double().mean().item()
    return scores
