from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.data.batch_key import EVALUATION, fetching
from etrain_jupyter.errors import RecipeError
from etrain_jupyter.trainer.data import Share, open_samples
from tests.capabilities import skip_without

skip_without("torchvision")

from PIL import Image  # noqa: E402
from torchvision import tv_tensors  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

from etrain_jupyter.recipes import vision  # noqa: E402
from etrain_jupyter.recipes.vision import classification, detection, segmentation  # noqa: E402

SIZE = (24, 32)
AUGMENT = v2.Compose(
    [
        v2.RandomHorizontalFlip(),
        v2.RandomAffine(10, translate=(0.1, 0.1)),
        v2.ColorJitter(brightness=0.5),
    ]
)


def image_of(index: int, *, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (channels, *SIZE), dtype=torch.uint8, generator=generator)


def boxes_of(index: int) -> dict[str, torch.Tensor]:
    boxes = torch.tensor([[2.0, 3, 12, 20], [14, 1, 30, 23]])[: index % 3]
    return {"boxes": boxes, "labels": torch.tensor([1, 2])[: index % 3]}


def mask_of(index: int) -> torch.Tensor:
    return (image_of(index)[0] > 128).long()


TASKS: dict[str, tuple[Any, Any]] = {
    "classification": (classification.Batches(10, train=AUGMENT), lambda index: index % 10),
    "detection": (detection.Batches(3, train=AUGMENT), boxes_of),
    "segmentation": (segmentation.Batches(2, train=AUGMENT), mask_of),
}


def make(task: str, indices: Sequence[int], *, seed: int = 0, epoch: int = 0) -> list[bytes]:
    """Return the content of each sample of a batch."""
    collate, target = TASKS[task]
    with fetching(seed=seed, epoch=epoch, samples=indices):
        images, targets = collate([(image_of(index), target(index)) for index in indices])
    return [content((image, target)) for image, target in zip(images, targets, strict=True)]


def content(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(name.encode() + content(value[name]) for name in sorted(value))
    return b"".join(content(part) for part in value)


@pytest.mark.parametrize("task", TASKS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_sample_looks_the_same_in_any_batch(task: str, data: Any) -> None:
    indices = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True))
    seed, epoch = data.draw(st.integers(-3, 3)), data.draw(st.integers(0, 3))
    whole = make(task, indices, seed=seed, epoch=epoch)
    cut = data.draw(st.integers(0, len(indices)))
    torch.manual_seed(data.draw(st.integers(0, 5)))  # the state of another worker

    parts = [
        sample
        for part in (indices[cut:], indices[:cut])
        if part
        for sample in make(task, part, seed=seed, epoch=epoch)
    ]

    assert parts[len(indices) - cut :] + parts[: len(indices) - cut] == whole


@pytest.mark.parametrize("task", TASKS)
def test_sample_differs_by_seed_and_epoch_but_not_in_evaluations(task: str) -> None:
    indices = [4, 7, 8, 11]

    first, second, other = (
        make(task, indices, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))
    )

    assert len({*first, *second, *other}) == 12
    assert make(task, indices, epoch=EVALUATION) == make(task, indices, epoch=EVALUATION, seed=1)


def test_random_states_of_the_process_do_not_change() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]

    make("detection", [2, 5])

    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_job_gives_seed_epoch_and_sample_to_the_transforms(num_workers: int) -> None:
    collate, _ = TASKS["classification"]
    data = [(image_of(index), index % 10) for index in range(8)]
    source = open_samples(data, name="data.train", collate=collate, num_workers=num_workers)
    share = Share([6, 1, 3], seed=9, job_seed=5, epoch=2)

    [(indices, (images, labels))] = list(source.batches([share]))
    source.close()

    expected = make("classification", [6, 1, 3], seed=5, epoch=2)
    assert indices.tolist() == [6, 1, 3]
    assert [content(row) for row in zip(images, labels, strict=True)] == expected


def test_boxes_and_masks_move_with_the_image() -> None:
    image = torch.zeros(3, *SIZE, dtype=torch.uint8)
    image[:, 4:10, 2:8] = 255
    flip = v2.RandomHorizontalFlip(1.0)
    target = {"boxes": [[2, 4, 8, 10]], "labels": [1], "masks": tv_tensors.Mask(image[:1] // 255)}

    [found], [boxes] = detection.Batches(2, train=flip)([(image, target)])
    images, masks = segmentation.Batches(2, train=flip)([(image, image[0] // 255)])

    assert boxes["boxes"].tolist() == [[24, 4, 30, 10]]
    assert found[:, 4:10, 24:30].min() == 1
    assert found.sum() == 3 * 36
    assert torch.equal(boxes["masks"][0], masks[0].to(torch.uint8))
    assert torch.equal(images[0], found)
    assert type(found) is type(boxes["boxes"]) is torch.Tensor


def test_box_that_leaves_the_image_is_clipped_or_removed() -> None:
    crop = v2.Lambda(lambda value: v2.functional.crop(value, 0, 0, 24, 10))
    target = {"boxes": [[4, 4, 20, 20], [12, 2, 20, 9], [9.5, 2, 20, 9]], "labels": [1, 2, 2]}

    _, [found] = detection.Batches(3, train=crop)([(image_of(0), target)])

    assert found["boxes"].tolist() == [[4, 4, 10, 20]]
    assert found["labels"].tolist() == [1]


def test_box_smaller_than_the_minimum_is_removed_with_all_its_rows() -> None:
    target = {
        "boxes": [[0, 0, 6, 9], [2, 2, 5, 9]],
        "labels": [1, 2],
        "area": torch.tensor([54, 21]),
    }

    _, [found] = detection.Batches(3, min_size=4)([(image_of(0), target)])

    assert found["boxes"].tolist() == [[0, 0, 6, 9]]
    assert found["labels"].tolist() == [1]
    assert found["area"].tolist() == [54]
    with pytest.raises(RecipeError, match="min_size=0"):
        detection.Batches(3, min_size=0)


def test_transform_that_removes_only_some_rows_of_a_box_is_refused() -> None:
    target = {
        "boxes": [[0, 0, 6, 9], [2, 2, 5, 9]],
        "labels": [1, 2],
        "area": torch.tensor([54, 21]),
    }
    collate = detection.Batches(3, train=v2.SanitizeBoundingBoxes(min_size=4))

    with pytest.raises(
        RecipeError, match=r"sample 0 has 1 boxes, but 'area' still .* set min_size"
    ):
        collate([(image_of(0), target)])


@pytest.mark.parametrize("target", [{"boxes": [], "labels": []}, {"image_id": 3}])
def test_image_without_boxes_is_a_valid_sample(target: dict[str, Any]) -> None:
    _, [found] = detection.Batches(2, train=AUGMENT)([(image_of(0), target)])

    assert found["boxes"].shape == (0, 4)
    assert found["labels"].shape == (0,)
    assert found["labels"].dtype == torch.int64


def test_crowds_are_scored_but_not_trained() -> None:
    target = {
        "boxes": [[1, 1, 9, 9], [4, 4, 20, 20]],
        "labels": torch.tensor([1, 1]),
        "iscrowd": torch.tensor([0, 1]),
    }
    batches = detection.Batches(2)

    _, [trained] = batches([(image_of(0), target)])
    _, [scored] = batches.evaluation([(image_of(0), target)])

    assert trained["boxes"].tolist() == [[1, 1, 9, 9]]
    assert scored["iscrowd"].tolist() == [0, 1]


def test_each_kind_of_sample_has_its_own_transform() -> None:
    batches = classification.Batches(
        2, train=v2.Resize((8, 8)), eval=v2.Compose([v2.Resize((4, 4)), v2.Grayscale()]), channels=3
    )
    samples = [(Image.fromarray(image_of(0).permute(1, 2, 0).numpy()), np.int64(1))]

    assert batches(samples)[0].shape == (1, 3, 8, 8)
    images, labels = batches.evaluation(samples)
    assert images.shape == (1, 1, 4, 4)
    assert images.dtype == torch.float32
    assert 0 <= images.min() < images.max() <= 1
    assert labels.tolist() == [1]


def test_collate_travels_to_the_workers() -> None:
    collate = cloudpickle.loads(cloudpickle.dumps(TASKS["detection"][0]))

    assert content(collate([(image_of(1), boxes_of(1))])) == content(
        TASKS["detection"][0]([(image_of(1), boxes_of(1))])
    )


class NotTogether(v2.Transform):
    """Resize the image without its target, as transforms of other libraries would."""

    def forward(self, image: Any, target: Any) -> Any:
        return v2.functional.resize(image, [8, 8]), target


INVALID: dict[str, tuple[Any, Any, Any, str]] = {
    "class id": (
        classification.Batches(3),
        image_of(0),
        3,
        r"class id 3, but.* allows 0 to 2",
    ),
    "negative": (classification.Batches(3), image_of(0), -1, r"has the class id -1"),
    "no class": (classification.Batches(3), image_of(0), "cat", r"is a str, not a class id"),
    "fraction": (classification.Batches(3), image_of(0), 1.5, r"is a float, not a class id"),
    "dtype": (classification.Batches(3), image_of(0).long(), 1, r"dtype torch\.int64.*uint8"),
    "gray": (classification.Batches(3), image_of(0, channels=1), 1, r"\(1, 24, 32\).*\(3, height"),
    "alpha": (
        *(classification.Batches(3), Image.new("RGBA", (4, 4)), 1),
        r"\(4, 4, 4\) instead of \(3, height, width\).*convert\('RGB'\)",
    ),
    "array": (classification.Batches(3), image_of(0).numpy(), 1, r"is a ndarray. Return a PIL"),
    "outside": (
        *(detection.Batches(3), image_of(0), {"boxes": [[2, 3, 33, 20]], "labels": [1]}),
        r"box \[2\.0, 3\.0, 33\.0, 20\.0\], which is not inside .* width 32 and height 24",
    ),
    "degenerate": (
        *(detection.Batches(3), image_of(0), {"boxes": [[2, 3, 2, 20]], "labels": [1]}),
        r"of width 0 and height 17\..*both sides must be positive",
    ),
    "NaN": (
        *(detection.Batches(3), image_of(0), {"boxes": [[2, 3, float("nan"), 20]], "labels": [1]}),
        r"of width nan",
    ),
    "label": (
        *(detection.Batches(3), image_of(0), {"boxes": [[2, 3, 8, 20]], "labels": [3]}),
        r"has the class id 3, but num_classes=3 allows 1 to 2; 0 is the background",
    ),
    "background": (
        *(detection.Batches(3), image_of(0), {"boxes": [[2, 3, 8, 20]], "labels": [0]}),
        r"has the class id 0",
    ),
    "counts": (
        *(detection.Batches(3), image_of(0), {"boxes": [[2, 3, 8, 20]], "labels": [1, 1]}),
        r"boxes of the shape \(1, 4\) and labels of the shape \(2,\)",
    ),
    "float labels": (
        *(detection.Batches(3), image_of(0), {"boxes": [[2, 3, 8, 20]], "labels": [1.0]}),
        r"labels of sample 41 \(cat\.png\) are torch\.float32",
    ),
    "no boxes": (
        *(detection.Batches(3), image_of(0), {"annotation": {}}),
        r"is a dict with the keys 'annotation'.*wrap_dataset_for_transforms_v2",
    ),
    "no dict": (detection.Batches(3), image_of(0), [], r"is a list\. Return a dict with boxes"),
    "boxes left behind": (
        *(detection.Batches(3, eval=NotTogether(), train=NotTogether()), image_of(0)),
        *(boxes_of(1), r"height and width \(24, 32\), but the image has \(8, 8\)"),
    ),
    "mask size": (
        *(segmentation.Batches(2), image_of(0), torch.zeros(24, 31, dtype=torch.int64)),
        r"mask of sample 41 \(cat\.png\) has the shape \(24, 31\).*\(24, 32\)",
    ),
    "mask dtype": (
        segmentation.Batches(2),
        image_of(0),
        torch.zeros(SIZE),
        r"dtype torch\.float32",
    ),
    "mask of 16 bits": (
        *(segmentation.Batches(2), image_of(0), torch.full(SIZE, 300, dtype=torch.uint16)),
        r"has the class id 300, but num_classes=2",
    ),
    "mask array": (
        *(segmentation.Batches(2), image_of(0), mask_of(0).numpy()),
        r"is a ndarray\. Return a PIL image, or a tensor of class ids",
    ),
    "mask id": (
        *(segmentation.Batches(2), image_of(0), torch.full(SIZE, 7)),
        r"has the class id 7, but num_classes=2 allows 0 to 1, and 255",
    ),
    "mask left behind": (
        *(segmentation.Batches(2, eval=NotTogether(), train=NotTogether()), image_of(0)),
        *(
            mask_of(0),
            r"mask of sample 41 .* has the shape \(24, 32\), and its image",
        ),
    ),
}


@pytest.mark.parametrize(("collate", "image", "target", "message"), INVALID.values(), ids=INVALID)
def test_invalid_sample_is_named_with_its_file(
    collate: Any, image: Any, target: Any, message: str
) -> None:
    sample = vision.Sample(image, target, "cat.png")

    with (
        fetching(seed=0, epoch=0, samples=[41]),
        pytest.raises(RecipeError, match=message) as raised,
    ):
        collate([sample])

    assert "sample 41 (cat.png)" in str(raised.value)


def test_images_of_different_sizes_are_named() -> None:
    samples = [(image_of(0), 0), (image_of(1)[:, :8], 0)]

    with pytest.raises(RecipeError, match=r"sample 1 has the shape \(3, 8, 32\).*add v2\.Resize"):
        classification.Batches(2)(samples)


def test_other_samples_and_arguments_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"sample 0 is a dict\. Return \(image, target\)"):
        classification.Batches(2)([{"image": image_of(0)}])  # type: ignore[list-item]
    with pytest.raises(RecipeError, match="num_classes=1 and channels=3 must be at least 2 and 1"):
        segmentation.Batches(1)
