from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from etrain_jupyter.errors import RecipeError
from tests.capabilities import skip_without

skip_without("torchvision")

from etrain_jupyter.recipes.vision import classification, detection, segmentation  # noqa: E402


def test_accuracy_is_that_of_all_samples() -> None:
    logits = torch.eye(8)[[1, 2, 3]] + torch.tensor([0.0, 0.5, 0, 0, 0.4, 0, 0.3, 0.2])

    records = classification.predict(lambda _: logits, (torch.zeros(3), torch.tensor([1, 0, 4])))
    rows = [dict(zip(records, row, strict=True)) for row in zip(*records.values(), strict=True)]

    assert classification.score(rows) == {
        "accuracy": pytest.approx(1 / 3),
        "top5_accuracy": pytest.approx(2 / 3),
    }


def test_two_classes_have_no_top_five() -> None:
    row = {"classes": torch.tensor([1, 0]), "target": torch.tensor(1)}

    assert classification.score([row]) == {"accuracy": 1}


@pytest.mark.parametrize(("num", "is_dict"), [(2, False), (5, True)])
def test_mean_iou_equals_that_of_torchmetrics(num: int, is_dict: bool) -> None:
    metrics = pytest.importorskip("torchmetrics.classification")
    generator = torch.Generator().manual_seed(num)
    logits = torch.randn(4, num, 5, 6, generator=generator)
    masks = torch.randint(0, num, (4, 5, 6), generator=generator)
    masks[0, 0] = segmentation.IGNORED
    metric = metrics.MulticlassJaccardIndex(num, average=None, ignore_index=segmentation.IGNORED)
    expected = metric(logits, masks)

    output = {"out": logits} if is_dict else logits
    records = list(segmentation.predict(lambda _: output, (masks, masks)))
    scores = segmentation.score(records, classes=[f"c{n}" for n in range(num)])

    both = sum(int(record[:, 0].sum()) for record in records)
    assert scores["mean_iou"] == pytest.approx(expected.mean().item())
    assert [scores[f"iou_c{n}"] for n in range(num)] == pytest.approx(expected.tolist())
    assert scores["pixel_accuracy"] == both / (4 * 30 - 6)


def test_class_that_is_nowhere_does_not_count() -> None:
    masks = torch.tensor([[[0, 1], [1, 1]]])
    logits = torch.nn.functional.one_hot(masks, 3).permute(0, 3, 1, 2).float()

    records = list(segmentation.predict(lambda _: logits, (masks, masks)))

    assert segmentation.score(records, classes=["a", "b", "c"]) == {
        "mean_iou": 1,
        "pixel_accuracy": 1,
        "iou_a": 1,
        "iou_b": 1,
    }
    with pytest.raises(RecipeError, match="2 names for 3 classes"):
        segmentation.score(records, classes=["a", "b"])


def test_segmentation_loss_ignores_pixels_and_adds_half_of_the_auxiliary_loss() -> None:
    masks = torch.tensor([[[0, 1], [255, 255]]])
    logits = torch.zeros(1, 2, 2, 2)

    loss = segmentation.step(lambda _: {"out": logits, "aux": logits}, (masks, masks))
    empty = segmentation.step(lambda _: logits, (masks, torch.full_like(masks, 255)))

    assert loss.item() == pytest.approx(1.5 * math.log(2))
    assert empty.item() == 0
    with pytest.raises(RecipeError, match=r"logits of the shape \(1, 1, 2, 2\).*2 classes"):
        segmentation.step(lambda _: logits[:, :1], (masks, masks))


def found(*boxes: tuple[float, ...]) -> dict[str, torch.Tensor]:
    rows = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 6)
    return {"boxes": rows[:, :4], "labels": rows[:, 4].long(), "scores": rows[:, 5]}


def target(*boxes: tuple[float, ...]) -> dict[str, torch.Tensor]:
    rows = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 5)
    return {"boxes": rows[:, :4], "labels": rows[:, 4].long()}


def test_mean_average_precision_ranks_the_detections_of_all_images() -> None:
    pytest.importorskip("pycocotools")
    images = [torch.zeros(3, 8, 8)] * 3
    targets = [target((0, 0, 50, 50, 1)), target((10, 10, 60, 60, 1), (0, 0, 9, 9, 2)), target()]
    detections = [
        found((0, 0, 50, 50, 1, 0.9), (100, 100, 150, 150, 1, 0.1)),
        found((10, 10, 60, 60, 1, 0.5), (0, 0, 9, 9, 2, 0.8)),
        found((0, 0, 50, 50, 1, 0.7)),
    ]

    records = detection.predict(lambda _: detections, (images, targets))
    scores = detection.score(records, classes=["background", "cat", "dog"])

    # Class 1: the second of three detections is wrong, so precision is 1 up to a recall of 1/2,
    # and 2/3 beyond it, at 51 and 50 of the 101 points of COCO.
    cat = (51 * 1 + 50 * 2 / 3) / 101
    assert scores["map_cat"] == pytest.approx(cat, abs=1e-4)
    assert scores["map_dog"] == 1
    assert scores["map"] == pytest.approx((cat + 1) / 2, abs=1e-4)
    assert scores["map_50"] == pytest.approx(scores["map"])
    assert scores["mar_100"] == 1


def test_best_detections_are_kept() -> None:
    detections = [found((0, 0, 5, 5, 1, 0.1), (0, 0, 6, 6, 1, 0.9), (0, 0, 7, 7, 1, 0.5))]

    [record] = detection.predict(lambda _: detections, ([], [target()]), max_detections=2)

    assert record["found"]["boxes"][:, 2].tolist() == [6, 7]


def test_set_without_boxes_has_no_average_precision() -> None:
    records = detection.predict(lambda _: [found()], ([], [target()]))

    with pytest.raises(RecipeError, match=r"none of the 1 images of data\.eval has a box"):
        detection.score(records)


def test_losses_of_a_detector_are_summed() -> None:
    losses = {"classification": torch.tensor(2.0), "bbox_regression": torch.tensor(0.5)}

    assert detection.step(lambda images, targets: losses, ([], [])) == {**losses, "loss": 2.5}
    with pytest.raises(RecipeError, match="returns a Tensor in training"):
        detection.step(lambda images, targets: torch.zeros(()), ([], []))


def small_detectors() -> dict[str, Any]:
    from torchvision.models import detection as models

    arguments = {"weights": None, "weights_backbone": None, "num_classes": 3}
    return {
        "Faster R-CNN": lambda: models.fasterrcnn_mobilenet_v3_large_320_fpn(
            **arguments, min_size=64, max_size=64
        ),
        "SSD": lambda: models.ssdlite320_mobilenet_v3_large(**arguments),
    }


@pytest.mark.parametrize("name", ["Faster R-CNN", "SSD"])
def test_detectors_of_torchvision_train_and_predict_unchanged(name: str) -> None:
    torch.manual_seed(0)
    model = small_detectors()[name]()
    samples = [
        (torch.rand(3, 48, 64), {"boxes": [[4, 4, 40, 40]], "labels": [1]}),
        (torch.rand(3, 64, 48), {"boxes": [], "labels": []}),
    ]
    batches = detection.Batches(3)

    losses = detection.step(model, batches(samples))
    losses["loss"].backward()
    with torch.no_grad():
        records = detection.predict(model.eval(), batches.evaluation(samples))

    assert torch.isfinite(losses["loss"])
    assert losses["loss"] == sum(value for key, value in losses.items() if key != "loss")
    assert [len(record["target"]["labels"]) for record in records] == [1, 0]
