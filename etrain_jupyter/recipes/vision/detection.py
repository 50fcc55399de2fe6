"""Object detection: batches, losses, and mean average precision over the whole set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.vision import batches
from etrain_jupyter.recipes.vision.batches import Sample, Transform, plain
from etrain_jupyter.recipes.vision.installed import tv_tensors, v2

Target = dict[str, torch.Tensor]
"""``boxes`` of shape ``(N, 4)`` (left, top, right, bottom, in pixels), ``labels`` of shape ``(N,)``
and possibly other tensors with one row per box, such as ``iscrowd`` or ``masks``."""
DetectionBatch = tuple[list[torch.Tensor], list[Target]]
_SCORES = ("map", "map_50", "map_75", "mar_100")


class Batches(batches.Batches[DetectionBatch]):
    """Make batches for the detectors of torchvision; a ``data.collate``.

    A batch is ``(images, targets)``: a list of images of shape ``(C, H, W)``, of any sizes, and a
    list of dicts. A transform changes images, boxes and masks alike. Boxes that it moves outside
    the image are clipped, and removed if less than ``min_size`` is left. An image may have no box.
    Boxes with ``iscrowd`` are scored but not trained.

    Args:
        num_classes: Number of classes including the background, which is class 0. Labels are 1 to
            ``num_classes - 1``.
        train: Transform of ``torchvision.transforms.v2`` for the samples of ``data.train``.
        eval: Transform for the samples of ``data.eval``.
        channels: Number of channels of each image.
        min_size: Boxes with a side shorter than this after the transform, in pixels, are removed.

    Raises:
        RecipeError: If an argument is out of range.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        train: Transform | None = None,
        eval: Transform | None = None,
        channels: int = 3,
        min_size: float = 1.0,
    ) -> None:
        super().__init__(num_classes, train=train, eval=eval, channels=channels)
        # A side of 0 is a box without an area, for which torchvision's detectors raise an error.
        if not min_size > 0:
            raise RecipeError(f"min_size={min_size} must be greater than 0 pixels.")
        self._min_size = min_size

    def _check(self, target: Any, image: Any, where: str) -> dict[str, Any]:
        if isinstance(target, Mapping) and list(target) == ["image_id"]:
            # torchvision's CocoDetection leaves out both keys if an image has no boxes.
            target = {"boxes": [], "labels": torch.zeros(0, dtype=torch.int64)}
        if not isinstance(target, Mapping) or not {"boxes", "labels"} <= target.keys():
            keys = f" with the keys {', '.join(map(repr, target))}" if target else ""
            raise RecipeError(
                f"the target of {where} is a {type(target).__name__}{keys}. Return a dict with "
                "boxes and labels. For data sets of torchvision, use "
                "torchvision.datasets.wrap_dataset_for_transforms_v2(data)."
            )
        boxes, labels = _tensor(target["boxes"]), torch.as_tensor(target["labels"])
        labels = labels if labels.numel() else labels.long()  # an empty list is a float tensor
        size = (int(image.shape[1]), int(image.shape[2]))
        check_boxes(boxes, labels, size=size, num_classes=self.num_classes, where=where)
        others = {
            name: value
            for name, value in target.items()
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == len(labels)
        }
        return {
            **others,
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": labels.long(),
        }

    def _finish(self, target: Any, image: Any, where: str, is_training: bool) -> Target:
        boxes = target["boxes"]
        if boxes.canvas_size != tuple(image.shape[1:]):
            raise RecipeError(
                f"after its transform, the boxes of {where} are for an image of height and width "
                f"{boxes.canvas_size}, but the image has {tuple(image.shape[1:])}. Use transforms "
                "of torchvision.transforms.v2, which change both."
            )
        _check_rows(target, where)
        boxes = v2.functional.clamp_bounding_boxes(
            v2.functional.convert_bounding_box_format(boxes, new_format="XYXY")
        )
        _, keeps = v2.functional.sanitize_bounding_boxes(
            plain(boxes), format="XYXY", canvas_size=boxes.canvas_size, min_size=self._min_size
        )
        if is_training and "iscrowd" in target:
            keeps &= target["iscrowd"] == 0
        return {**{n: plain(v)[keeps] for n, v in target.items()}, "boxes": plain(boxes)[keeps]}

    def _join(self, samples: Sequence[Sample]) -> DetectionBatch:
        return [plain(sample.image) for sample in samples], [sample.target for sample in samples]


def _check_rows(target: Mapping[str, Any], where: str) -> None:
    """Raise RecipeError if a transform has removed boxes but not the rows of other tensors."""
    count = len(target["boxes"])
    longer = [repr(name) for name, value in target.items() if len(value) != count]
    if longer:
        raise RecipeError(
            f"after its transform, {where} has {count} boxes, but {' and '.join(longer)} still "
            "have one row for each box before it. v2.SanitizeBoundingBoxes removes only the rows "
            "of boxes, labels and masks. Leave it out, and set min_size of Batches, which removes "
            "small boxes with all their rows."
        )


def check_boxes(
    boxes: torch.Tensor,
    labels: torch.Tensor,
    *,
    size: tuple[int, int],
    num_classes: int,
    where: str,
) -> None:
    """Check the boxes of an image before they reach the loss.

    On a GPU, a label that is out of range stops the process with an assertion of the device, which
    names no sample.

    Args:
        boxes: Left, top, right and bottom in pixels, shape ``(N, 4)``.
        labels: Class ids, shape ``(N,)``.
        size: Height and width of the image.
        num_classes: Number of classes, including the background.
        where: Name of the sample, for messages.

    Raises:
        RecipeError: If a box or a label is invalid.
    """
    if boxes.ndim != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
        raise RecipeError(
            f"{where} has boxes of the shape {tuple(boxes.shape)} and labels of the shape "
            f"{tuple(labels.shape)}. Return shapes (N, 4) and (N,), with N=0 for an image without "
            "boxes."
        )
    if labels.is_floating_point():
        raise RecipeError(f"the labels of {where} are {labels.dtype}. Return them as integers.")
    height, width = size
    for box, label in zip(boxes.tolist(), labels.tolist(), strict=True):
        left, top, right, bottom = box
        shown = f"{where} has the box {[round(value, 2) for value in box]}"
        if not (right > left and bottom > top):
            raise RecipeError(
                f"{shown} of width {right - left:g} and height {bottom - top:g}. Boxes are (left, "
                "top, right, bottom), and both sides must be positive. Fix or remove the "
                "box, or read the data with repair=True."
            )
        if left < 0 or top < 0 or right > width or bottom > height:
            raise RecipeError(
                f"{shown}, which is not inside its image of width {width} and height {height}. Fix "
                "the box, or read the data with repair=True."
            )
        if not 1 <= label < num_classes:
            raise RecipeError(
                f"{where} has the class id {label}, but num_classes={num_classes} allows 1 to "
                f"{num_classes - 1}; 0 is the background. Fix the label, or set num_classes."
            )


def step(model: Any, batch: DetectionBatch) -> dict[str, torch.Tensor]:
    """Compute the losses of a detector of torchvision; a ``step``.

    Returns:
        ``loss``, the sum of the model's losses, and each of them by its name.

    Raises:
        RecipeError: If the model returns no dict of losses.
    """
    losses = model(*batch)
    if not isinstance(losses, Mapping) or not losses:
        raise RecipeError(
            f"the model returns a {type(losses).__name__} in training. Use a detector that returns "
            "a dict of losses, as those of torchvision do, or write a step of your own."
        )
    return {**losses, "loss": torch.stack([loss.float() for loss in losses.values()]).sum()}


def predict(
    model: Any, batch: DetectionBatch, *, max_detections: int = 100
) -> list[dict[str, Target]]:
    """Detect the objects in a batch; an ``eval.predict``.

    Args:
        model: Returns for each image a dict with ``boxes``, ``labels`` and ``scores``.
        batch: Images and targets.
        max_detections: Maximum number of detections to keep per image, best first. Mean average
            precision counts 100.

    Returns:
        For each image ``found`` and ``target``, on the CPU.
    """
    images, targets = batch
    return [
        {
            "found": _best(found, max_detections),
            "target": {name: target[name].cpu() for name in _SCORED if name in target},
        }
        for found, target in zip(model(images), targets, strict=True)
    ]


def score(
    records: Sequence[Mapping[str, Target]], *, classes: Sequence[str] | None = None
) -> dict[str, float]:
    """Compute the mean average precision over the whole set; an ``eval.score``.

    torchmetrics computes it with pycocotools, as the evaluation of COCO does.

    Args:
        records: Detections and targets of each image, as ``predict`` returns them.
        classes: Names of the classes, the background first, for one score per class.

    Returns:
        ``map`` (mean over IoU thresholds from 0.5 to 0.95), ``map_50``, ``map_75``, ``mar_100``
        (the mean recall of 100 detections per image), and ``map_NAME`` for each class with boxes.

    Raises:
        RecipeError: If the set has no boxes, or a package is missing.
    """
    if not any(len(record["target"]["labels"]) for record in records):
        raise RecipeError(
            f"none of the {len(records)} images of data.eval has a box, so average precision is "
            "undefined. Add images with boxes."
        )
    metric = _new_metric(class_metrics=classes is not None)
    metric.update([record["found"] for record in records], [record["target"] for record in records])
    values = metric.compute()
    scores = {name: float(values[name]) for name in _SCORES}
    if classes is not None:
        labels = values["classes"].reshape(-1).tolist()
        for label, value in zip(labels, values["map_per_class"].reshape(-1).tolist(), strict=True):
            if value >= 0:  # otherwise, no target has this class
                scores[f"map_{classes[label]}"] = value
    return scores


_SCORED = ("boxes", "labels", "iscrowd")


def _new_metric(*, class_metrics: bool) -> Any:
    try:
        from torchmetrics.detection import MeanAveragePrecision

        return MeanAveragePrecision(class_metrics=class_metrics)
    except ImportError as exc:
        raise RecipeError(
            f"mean average precision cannot be computed: {exc}. Install torchmetrics and "
            'pycocotools on the workers: pip install "etrain-jupyter[vision]"'
        ) from exc


def _best(found: Mapping[str, torch.Tensor], most: int) -> Target:
    order = found["scores"].argsort(descending=True, stable=True)[:most]
    kept = {name: found[name][order].detach().cpu() for name in ("boxes", "labels", "scores")}
    # pycocotools needs at least single precision, and the job may use bf16.
    return {**kept, "boxes": kept["boxes"].float(), "scores": kept["scores"].float()}


def _tensor(boxes: Any) -> torch.Tensor:
    """Return boxes as left, top, right and bottom; an empty list has the shape ``(0, 4)``."""
    if isinstance(boxes, tv_tensors.BoundingBoxes):
        return plain(v2.functional.convert_bounding_box_format(boxes, new_format="XYXY")).float()
    tensor = torch.as_tensor(boxes, dtype=torch.float32)
    return tensor.reshape(0, 4) if tensor.numel() == 0 else tensor
