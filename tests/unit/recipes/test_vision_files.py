from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from etrain_jupyter.errors import RecipeError
from tests.capabilities import skip_without

skip_without("torchvision")

from PIL import Image  # noqa: E402

from etrain_jupyter.recipes import vision  # noqa: E402

CLASSES = ("cat", "dog")


def write_voc(root: Path, name: str, *objects: tuple[str, int, int, int, int]) -> None:
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    Image.new("L", (32, 24), 128).save(root / "JPEGImages" / f"{name}.jpg")
    sides = ("xmin", "ymin", "xmax", "ymax")
    written = "".join(
        f"<object><name>{label}</name><bndbox>"
        + "".join(f"<{side}>{value}</{side}>" for side, value in zip(sides, box, strict=True))
        + "</bndbox></object>"
        for label, *box in objects
    )
    (root / "Annotations" / f"{name}.xml").write_text(
        "<annotation><filename>other.jpg</filename>"
        f"<size><width>32</width><height>24</height></size>{written}</annotation>"
    )


def test_voc_annotations_are_read_by_split(tmp_path: Path) -> None:
    write_voc(tmp_path, "b", ("dog", 1, 2, 10, 20), ("cat", 3, 3, 9, 9))
    write_voc(tmp_path, "a")
    (tmp_path / "ImageSets" / "Main" / "train.txt").write_text("b  1\n")

    data = vision.read_voc(tmp_path, CLASSES, split="train")
    [sample] = [data[index] for index in range(len(data))]

    assert sample.image.shape == (3, 24, 32)
    assert sample.image.dtype == torch.uint8
    assert sample.file == str(tmp_path / "JPEGImages" / "b.jpg")
    assert sample.target["boxes"].tolist() == [[1, 2, 10, 20], [3, 3, 9, 9]]
    assert sample.target["labels"].tolist() == [2, 1]
    assert repr(data) == "1 images with boxes: 1 dog, 1 cat"
    everything = vision.read_voc(tmp_path, CLASSES)
    assert [Path(row.file).stem for row in everything.rows] == ["a", "b"]
    assert everything[0].target["boxes"].shape == (0, 4)
    assert data.classes == ("background", "cat", "dog")


def test_repair_clips_and_drops_boxes(tmp_path: Path) -> None:
    write_voc(tmp_path, "a", ("cat", -1, 2, 33, 20), ("dog", 4, 4, 4, 4), ("dog", 40, 1, 50, 9))

    data = vision.read_voc(tmp_path, CLASSES, repair=True)

    assert data[0].target["boxes"].tolist() == [[0, 2, 32, 20]]
    assert repr(data) == "1 images with boxes: 1 cat; 1 clipped; 2 dropped"
    with pytest.raises(RecipeError, match=r"sample 0 \(.*a\.jpg\).*-1\.0.*repair=True"):
        vision.read_voc(tmp_path, CLASSES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotation>", r"sample 0 \(.*a\.xml\) is not a VOC annotation: no element found"),
        ("<annotation/>", r"is not a VOC annotation: <size/width> is missing"),
        (
            "<a><size><width>9</width><height>9</height></size><object><name>cow</name><bndbox>"
            "<xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></object></a>",
            "has the class 'cow', but classes are cat, dog",
        ),
        (
            "<a><size><width>9</width><height>9</height></size><object><name>cat</name><bndbox>"
            "<xmin>1</xmin><ymin>inf</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></object></a>",
            "coordinate that is not finite",
        ),
    ],
)
def test_invalid_annotation_is_named(tmp_path: Path, text: str, message: str) -> None:
    write_voc(tmp_path, "a")
    (tmp_path / "Annotations" / "a.xml").write_text(text)

    with pytest.raises(RecipeError, match=message):
        vision.read_voc(tmp_path, CLASSES)


def test_missing_annotations_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Annotations has no annotation"):
        vision.read_voc(tmp_path, CLASSES)
    with pytest.raises(RecipeError, match=r"val\.txt cannot be read: No such file"):
        vision.read_voc(tmp_path, CLASSES, split="val")


def test_corrupt_image_is_named_and_an_absent_one_is_left_to_the_engine(tmp_path: Path) -> None:
    for name in "abc":
        write_voc(tmp_path, name, ("cat", 1, 1, 9, 9))
    images = tmp_path / "JPEGImages"
    whole = (images / "a.jpg").read_bytes()
    (images / "a.jpg").write_bytes(whole[: len(whole) - 40])
    (images / "b.jpg").write_bytes(b"text")
    (images / "c.jpg").unlink()
    data = vision.read_voc(tmp_path, CLASSES)

    with pytest.raises(
        RecipeError, match=r"sample 0 \(.*a\.jpg\) cannot be decoded: .*[Tt]runcated"
    ):
        data[0]
    with pytest.raises(RecipeError, match=r"sample 1 \(.*b\.jpg\) cannot be decoded: cannot ident"):
        data[1]
    with pytest.raises(FileNotFoundError):
        data[2]


def test_annotation_of_another_image_is_named(tmp_path: Path) -> None:
    write_voc(tmp_path, "a", ("cat", 1, 1, 9, 9))
    Image.new("RGB", (24, 32)).save(tmp_path / "JPEGImages" / "a.jpg")

    with pytest.raises(RecipeError, match=r"is for height and width \(24, 32\).* has \(32, 24\)"):
        vision.read_voc(tmp_path, CLASSES)[0]


def coco() -> dict[str, Any]:
    return {
        "images": [
            {"id": 7, "file_name": "b.png", "height": 24, "width": 32},
            {"id": 3, "file_name": "a.png", "height": 24, "width": 32},
        ],
        "annotations": [
            {"image_id": 7, "category_id": 18, "bbox": [1, 2, 10, 20], "iscrowd": 1},
            {"image_id": 7, "category_id": 17, "bbox": [0, 0, 32, 24]},
        ],
        "categories": [{"id": 18, "name": "dog"}, {"id": 17, "name": "cat"}],
    }


def test_coco_annotations_are_read(tmp_path: Path) -> None:
    (tmp_path / "boxes.json").write_text(json.dumps(coco()))
    Image.new("RGB", (32, 24)).save(tmp_path / "b.png")

    data = vision.read_coco(tmp_path, tmp_path / "boxes.json")

    assert data.classes == ("background", "cat", "dog")
    assert data[0].target["boxes"].tolist() == [[1, 2, 11, 22], [0, 0, 32, 24]]
    assert data[0].target["labels"].tolist() == [2, 1]
    assert data[0].target["iscrowd"].tolist() == [1, 0]
    assert len(data.rows[1].labels) == 0


def test_other_json_is_no_coco_file(tmp_path: Path) -> None:
    path = tmp_path / "boxes.json"
    category, image = coco(), coco()
    category["annotations"][1]["category_id"] = 5
    image["annotations"][1]["image_id"] = 9
    for text, message in (
        ("{}", "not a COCO file of boxes: KeyError: 'categories'"),
        ("[", "JSONDecodeError"),
        (json.dumps(category), r"annotation 1 of .*boxes\.json has the category_id 5, which the"),
        (json.dumps(image), r"annotation 1 of .*boxes\.json has the image_id 9, which the file"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            vision.read_coco(tmp_path, path)


def write_masks(root: Path) -> tuple[Path, Path]:
    images, masks = root / "images", root / "masks"
    images.mkdir()
    masks.mkdir()
    for name in ("b", "a"):
        Image.new("RGB", (4, 3)).save(images / f"{name}.jpg")
        numbers = torch.arange(12, dtype=torch.int32).reshape(3, 4) * (300 if name == "a" else 1)
        Image.fromarray(numbers.numpy().astype("uint16")).save(masks / f"{name}.png")
    (images / "notes.txt").write_text("no image")
    return images, masks


def test_masks_are_paired_by_name(tmp_path: Path) -> None:
    images, masks = write_masks(tmp_path)

    data = vision.read_masks(images, masks)

    assert [Path(sample.file).name for sample in (data[0], data[1])] == ["a.jpg", "b.jpg"]
    assert data[1].target.tolist() == torch.arange(12).reshape(3, 4).tolist()
    assert data[0].target.max() == 3300
    nuclei = vision.read_masks(images, masks, names=["b"], is_instances=True)
    assert (len(nuclei), int(nuclei[0].target.sum())) == (1, 11)
    assert repr(nuclei) == "1 images with masks"


def test_image_without_a_mask_is_named(tmp_path: Path) -> None:
    images, masks = write_masks(tmp_path)
    (masks / "b.png").unlink()

    with pytest.raises(RecipeError, match=r"sample 1, 'b', has no file in .*masks"):
        vision.read_masks(images, masks)
    with pytest.raises(RecipeError, match="absent is not a folder"):
        vision.read_masks(images, tmp_path / "absent")
    Image.new("RGB", (4, 3)).save(masks / "a.png")
    with pytest.raises(RecipeError, match=r"mask of sample 0 \(.*a\.png\) has 3 channels"):
        vision.read_masks(images, masks, names=["a"])[0]
