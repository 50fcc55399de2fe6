"""Data sets of image files: annotations in VOC and COCO format, and masks.

For CIFAR-10 and for one folder per class, use ``torchvision.datasets.CIFAR10`` and ``ImageFolder``.
"""

from __future__ import annotations

import contextlib
import json
import os
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.vision.batches import Sample, name_of
from etrain_jupyter.recipes.vision.detection import check_boxes
from etrain_jupyter.recipes.vision.installed import tv_tensors, v2

Location = str | os.PathLike[str]
_SIDES = ("xmin", "ymin", "xmax", "ymax")
_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """The annotation of an image for detection."""

    file: str
    """The image."""
    size: tuple[int, int]
    """Height and width in pixels."""
    boxes: torch.Tensor
    """Left, top, right and bottom in pixels, shape ``(N, 4)``, float32."""
    labels: torch.Tensor
    """Class ids from 1, shape ``(N,)``, int64."""
    iscrowd: torch.Tensor
    """1 for a region of many objects, shape ``(N,)``, int64."""
    num_clipped: int = 0
    """Number of boxes that were clipped."""
    num_dropped: int = 0
    """Number of empty boxes that were dropped."""


class BoxFiles:
    """Images with boxes, read from their files when a worker needs them.

    A sample is an image of bytes and a dict with ``boxes``, ``labels`` and ``iscrowd``.

    Args:
        rows: Annotations of the images.
        classes: Names of the classes; the first one is the background.

    Raises:
        RecipeError: If the list is empty, or a box or label is invalid. The message names it.
    """

    def __init__(self, rows: Iterable[Boxes], classes: Sequence[str]) -> None:
        self.rows = list(rows)
        self.classes = tuple(classes)
        if not self.rows:
            raise RecipeError("the data set has 0 images. Check the path of the annotations.")
        for index, row in enumerate(self.rows):
            check_boxes(
                row.boxes,
                row.labels,
                size=row.size,
                num_classes=len(classes),
                where=name_of(index, row.file),
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        image = read_image(row.file, index)
        if tuple(image.shape[1:]) != row.size:
            raise RecipeError(
                f"the annotation of {name_of(index, row.file)} is for height and width {row.size}, "
                f"but the image has {tuple(image.shape[1:])}. Fix the annotation."
            )
        boxes = tv_tensors.BoundingBoxes(row.boxes, format="XYXY", canvas_size=row.size)
        return Sample(
            image, {"boxes": boxes, "labels": row.labels, "iscrowd": row.iscrowd}, row.file
        )

    def __repr__(self) -> str:
        names = Counter(self.classes[label] for row in self.rows for label in row.labels.tolist())
        counts = ", ".join(f"{num:,} {name}" for name, num in names.most_common())
        repairs = {
            "clipped": sum(row.num_clipped for row in self.rows),
            "dropped": sum(row.num_dropped for row in self.rows),
        }
        notes = "".join(f"; {num} {name}" for name, num in repairs.items() if num)
        return f"{len(self):,} images with boxes: {counts or 'none'}{notes}"


class MaskFiles:
    """Images with masks, read from their files when a worker needs them.

    A sample is an image of bytes and a mask of class ids, shape ``(H, W)``.

    Args:
        pairs: Files of each image and of its mask.
        is_instances: True if the masks number the objects; then every number except 0 becomes 1.

    Raises:
        RecipeError: If the list is empty.
    """

    def __init__(
        self, pairs: Iterable[tuple[Location, Location]], *, is_instances: bool = False
    ) -> None:
        self.pairs = [(os.fspath(image), os.fspath(mask)) for image, mask in pairs]
        self._is_instances = is_instances
        if not self.pairs:
            raise RecipeError("the data set has 0 images. Check the paths of the images and masks.")

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        image, mask = self.pairs[index]
        with _naming(index, mask), Image.open(mask) as opened:
            ids = np.asarray(opened)  # a palette image gives its indices, which are the class ids
        if ids.ndim != 2:
            raise RecipeError(
                f"the mask of {name_of(index, mask)} has {ids.shape[-1]} channels. Save one "
                "channel with class ids."
            )
        if self._is_instances:
            ids = ids != 0
        return Sample(
            read_image(image, index), tv_tensors.Mask(torch.from_numpy(ids.astype(np.int64))), image
        )

    def __repr__(self) -> str:
        return f"{len(self):,} images with masks"


def read_voc(
    folder: Location, classes: Sequence[str], *, split: str | None = None, repair: bool = False
) -> BoxFiles:
    """Read annotations in the format of PASCAL VOC.

    Args:
        folder: Folder with ``JPEGImages``, ``Annotations`` and, for a split, ``ImageSets/Main``.
        classes: Names of the classes without the background, in the order of their ids from 1.
        split: Name of a list in ``ImageSets/Main``, for example ``trainval``; None for all
            annotations.
        repair: True to clip boxes to their image and to drop empty ones; ``print(data)`` counts
            them. False to raise an error that names the first one.

    Raises:
        RecipeError: If a file is missing or invalid, or a class is not in ``classes``.
    """
    root = Path(folder)
    listed = root / "ImageSets" / "Main" / f"{split}.txt"
    if split is None:
        names = sorted(path.stem for path in (root / "Annotations").glob("*.xml"))
    else:
        names = [line.split()[0] for line in _text(listed).splitlines() if line.strip()]
    rows = [
        _voc_row(root, name, index, list(classes), repair=repair)
        for index, name in enumerate(names)
    ]
    if not rows:
        raise RecipeError(f"{root / 'Annotations'} has no annotation. Check the path.")
    return BoxFiles(rows, ("background", *classes))


def read_coco(images: Location, annotations: Location, *, repair: bool = False) -> BoxFiles:
    """Read annotations in the format of COCO.

    The categories become classes from 1, in the order of their ids.

    Args:
        images: Folder of the images.
        annotations: File with ``images``, ``annotations`` and ``categories``.
        repair: True to clip boxes to their image and to drop empty ones; ``print(data)`` counts
            them. False to raise an error that names the first one.

    Raises:
        RecipeError: If the file is missing or invalid.
    """
    path = Path(annotations)
    try:
        content = json.loads(_text(path))
        categories = sorted(content["categories"], key=lambda category: category["id"])
        label_of = {category["id"]: place for place, category in enumerate(categories, 1)}
        found: dict[Any, list[Mapping[str, Any]]] = {image["id"]: [] for image in content["images"]}
        for number, annotation in enumerate(content["annotations"]):
            for key, known in (("image_id", found), ("category_id", label_of)):
                if annotation[key] not in known:
                    raise RecipeError(
                        f"annotation {number} of {path} has the {key} {annotation[key]!r}, which "
                        "the file does not define. Fix the annotation, or leave it out."
                    )
            found[annotation["image_id"]].append(annotation)
        rows = []
        for index, image in enumerate(content["images"]):
            corners = (annotation["bbox"] for annotation in found[image["id"]])
            boxes = [[x, y, x + width, y + height] for x, y, width, height in corners]
            labels = [label_of[annotation["category_id"]] for annotation in found[image["id"]]]
            crowds = [int(annotation.get("iscrowd", 0)) for annotation in found[image["id"]]]
            file = str(Path(images) / image["file_name"])
            size = (int(image["height"]), int(image["width"]))
            rows.append(
                _row(file, size, boxes, labels, crowds, name_of(index, file), repair=repair)
            )
        names = [category["name"] for category in categories]
    except (KeyError, TypeError, ValueError) as exc:
        raise RecipeError(
            f"{path} is not a COCO file of boxes: {type(exc).__name__}: {exc}. It needs images "
            "(id, file_name, height, width), annotations (image_id, category_id, bbox) and "
            "categories (id, name)."
        ) from exc
    return BoxFiles(rows, ("background", *names))


def read_masks(
    images: Location,
    masks: Location,
    *,
    names: Iterable[str] | None = None,
    is_instances: bool = False,
) -> MaskFiles:
    """Pair the images of a folder with the masks of the same names in another folder.

    Args:
        images: Folder of the images.
        masks: Folder of the masks: one channel with class ids.
        names: Names of the files without suffix, in the order of the samples; None for all images,
            by name.
        is_instances: True if the masks number the objects instead of classes; then every number
            except 0 becomes class 1.

    Raises:
        RecipeError: If an image or a mask is missing.
    """
    by_name, masks_by_name = _by_stem(Path(images)), _by_stem(Path(masks))
    pairs = []
    for index, name in enumerate(sorted(by_name) if names is None else names):
        for folder, found in ((images, by_name), (masks, masks_by_name)):
            if name not in found:
                raise RecipeError(
                    f"sample {index}, {name!r}, has no file in {os.fspath(folder)}. Images and "
                    "masks must have the same names."
                )
        pairs.append((by_name[name], masks_by_name[name]))
    return MaskFiles(pairs, is_instances=is_instances)


def read_image(file: Location, index: int) -> Any:
    """Return an image as ``tv_tensors.Image`` of three channels, uint8, shape ``(3, H, W)``.

    Args:
        file: The file.
        index: Number of the sample, for messages.

    Raises:
        RecipeError: If the file is corrupt.
        FileNotFoundError: If the file is missing.
    """
    with _naming(index, os.fspath(file)), Image.open(file) as opened:
        return v2.functional.to_image(opened.convert("RGB"))


@contextlib.contextmanager
def _naming(index: int, file: str) -> Iterator[None]:
    """Name the sample in errors while its file is decoded."""
    try:
        yield
    except FileNotFoundError:
        raise  # the engine adds how data sets of files travel to workers
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as exc:
        raise RecipeError(
            f"{name_of(index, file)} cannot be decoded: {exc}. Replace the file, or leave it out "
            "of the data set."
        ) from exc


def _voc_row(root: Path, name: str, index: int, classes: list[str], *, repair: bool) -> Boxes:
    path = root / "Annotations" / f"{name}.xml"
    where = name_of(index, str(path))
    try:
        content = ET.fromstring(_text(path))
        width, height = (int(_child(content, f"size/{side}")) for side in ("width", "height"))
        objects = [
            (_child(item, "name"), [float(_child(item, f"bndbox/{side}")) for side in _SIDES])
            for item in content.iter("object")
        ]
    except (ET.ParseError, ValueError) as exc:
        raise RecipeError(
            f"{where} is not a VOC annotation: {exc}. Fix the file, or leave it out."
        ) from exc
    unknown = sorted({label for label, _ in objects} - set(classes))
    if unknown:
        raise RecipeError(
            f"{where} has the class {unknown[0]!r}, but classes are {', '.join(classes)}. Add it."
        )
    # Take only the suffix: a copied annotation often keeps the file name of its original.
    suffix = Path(content.findtext("filename") or "").suffix or ".jpg"
    file = str(root / "JPEGImages" / f"{name}{suffix}")
    boxes = [box for _, box in objects]
    labels = [classes.index(label) + 1 for label, _ in objects]
    return _row(file, (height, width), boxes, labels, [0] * len(boxes), where, repair=repair)


def _row(
    file: str,
    size: tuple[int, int],
    boxes: list[list[float]],
    labels: list[int],
    crowds: list[int],
    where: str,
    *,
    repair: bool,
) -> Boxes:
    tensor = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    if not torch.isfinite(tensor).all():
        raise RecipeError(f"{where} has a box with a coordinate that is not finite. Fix the box.")
    keeps = torch.ones(len(boxes), dtype=torch.bool)
    is_clipped = ~keeps
    if repair:
        height, width = size
        limits = torch.tensor([width, height, width, height], dtype=torch.float32)
        clipped = tensor.clamp(min=0).minimum(limits)
        keeps = (clipped[:, 2:] > clipped[:, :2]).all(dim=1)
        is_clipped = keeps & (clipped != tensor).any(dim=1)
        tensor = clipped
    ids, crowd = (torch.tensor(values, dtype=torch.int64)[keeps] for values in (labels, crowds))
    return Boxes(
        file=file,
        size=size,
        boxes=tensor[keeps],
        labels=ids,
        iscrowd=crowd,
        num_clipped=int(is_clipped.sum()),
        num_dropped=int((~keeps).sum()),
    )


def _child(element: ET.Element, path: str) -> str:
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"<{path}> is missing")
    return text.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise RecipeError(f"{path} cannot be read: {reason}. Check the path.") from exc


def _by_stem(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise RecipeError(f"{folder} is not a folder. Check the path.")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    return {path.stem: path for path in files}
