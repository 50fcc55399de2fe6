"""Train on images: augmentation by sample, detection, segmentation, and their scores.

::

    train = vision.read_voc("cells", ["red", "white"], split="train")       data.train
    vision.detection.Batches(3, train=v2.RandomHorizontalFlip())            data.collate
    vision.detection.step                                                   step
    vision.detection.predict, vision.detection.score                        eval.predict, eval.score

``classification`` and ``segmentation`` have the same names.
"""

from etrain_jupyter.recipes.vision import classification, detection, segmentation
from etrain_jupyter.recipes.vision.batches import Sample
from etrain_jupyter.recipes.vision.files import (
    Boxes,
    BoxFiles,
    MaskFiles,
    read_coco,
    read_masks,
    read_voc,
)

__all__ = [
    "BoxFiles",
    "Boxes",
    "MaskFiles",
    "Sample",
    "classification",
    "detection",
    "read_coco",
    "read_masks",
    "read_voc",
    "segmentation",
]
