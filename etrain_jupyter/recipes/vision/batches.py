"""Make batches of images on the worker: augment, check and join samples.

torchvision's transforms draw from the global random generators. Here, these are seeded for each
sample with a function of the job's seed, the epoch and the sample. So a sample looks the same on
any worker, in any batch, and after a step that was undone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from etrain_jupyter.data.batch_key import EVALUATION, BatchKey, batch_key
from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.vision.installed import tv_tensors, v2
from etrain_jupyter.trainer.seeds import seed_of, seeded

Transform = Callable[..., Any]
"""Takes an image and its target, and returns both; for classification, the image alone. For
example ``v2.Compose([...])``."""
Batch = TypeVar("Batch")


class Sample(NamedTuple):
    """An image with its target. The data sets of torchvision return the same without ``file``."""

    image: Any
    """A PIL image, or a tensor of shape ``(C, H, W)``: uint8, or float between 0 and 1."""
    target: Any
    """A class id; a dict with ``boxes`` and ``labels``; or a mask of shape ``(H, W)``."""
    file: str = ""
    """File of the image, for messages."""


class Batches(Generic[Batch]):
    """A ``data.collate`` for samples that are images with a target.

    A training sample goes through ``train``, and a sample of ``data.eval`` through ``eval``. Then
    an image of bytes becomes float32 between 0 and 1.

    Outside a job, samples are numbered by their position in the list, and seed and epoch are 0.

    Args:
        num_classes: Number of classes, including the background of detectors.
        train: Transform of ``torchvision.transforms.v2`` for training samples; None for none.
        eval: Transform for samples of ``data.eval``; None for none.
        channels: Number of channels of each image.

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
    ) -> None:
        if num_classes < 2 or channels < 1:
            raise RecipeError(
                f"num_classes={num_classes} and channels={channels} must be at least 2 and 1. "
                "Count the background as a class."
            )
        self.num_classes = num_classes
        self._train = train
        self._eval = eval
        self._channels = channels

    def __call__(self, samples: Sequence[Sequence[Any]]) -> Batch:
        """Return a batch.

        Args:
            samples: Each is ``(image, target)``, or a ``Sample``.

        Raises:
            RecipeError: If a sample is invalid. The message names it.
        """
        first = BatchKey(seed=0, epoch=0, samples=tuple(range(len(samples))))
        return self._batch(samples, batch_key() or first)

    def evaluation(self, samples: Sequence[Sequence[Any]]) -> Batch:
        """Return a batch as in an evaluation, to look at predictions outside a job."""
        key = BatchKey(seed=0, epoch=EVALUATION, samples=tuple(range(len(samples))))
        return self._batch(samples, key)

    def _batch(self, samples: Sequence[Sequence[Any]], key: BatchKey) -> Batch:
        made = [
            self._make(sample, index, key)
            for sample, index in zip(samples, key.samples, strict=True)
        ]
        return self._join(made)

    def _make(self, sample: Sequence[Any], index: int, key: BatchKey) -> Sample:
        if not isinstance(sample, tuple | list) or len(sample) not in (2, 3):
            raise RecipeError(
                f"sample {index} is a {type(sample).__name__}. Return (image, target) from the "
                "data set."
            )
        where = name_of(index, str(sample[2]) if len(sample) == 3 else "")
        image = self._image(sample[0], where)
        target = self._check(sample[1], image, where)
        is_training = key.epoch != EVALUATION
        transform = self._train if is_training else self._eval
        if transform is not None:
            with seeded(seed_of(key.seed, "augment", key.epoch, index)):
                image, target = self._transform(transform, image, target)
            if not isinstance(image, torch.Tensor):
                image = v2.functional.to_image(image)
        if not image.is_floating_point():
            image = v2.functional.to_dtype(image, torch.float32, scale=True)
        return Sample(image, self._finish(target, image, where, is_training), where)

    def _transform(self, transform: Transform, image: Any, target: Any) -> tuple[Any, Any]:
        changed: tuple[Any, Any] = transform(image, target)
        return changed

    def _image(self, image: Any, where: str) -> Any:
        """Return the image as ``tv_tensors.Image``, after checking its type and channels."""
        if not isinstance(image, torch.Tensor):
            if not hasattr(image, "getbands"):
                raise RecipeError(
                    f"the image of {where} is a {type(image).__name__}. Return a PIL image, or a "
                    "tensor of shape (channels, height, width)."
                )
            image = v2.functional.to_image(image)
        if image.dtype != torch.uint8 and not image.is_floating_point():
            raise RecipeError(
                f"the image of {where} has the dtype {image.dtype}. Convert it to uint8 (0 to 255) "
                "or to float32 (0 to 1)."
            )
        if image.ndim != 3 or image.shape[0] != self._channels:
            raise RecipeError(
                f"the image of {where} has the shape {tuple(image.shape)} instead of "
                f"({self._channels}, height, width). Convert it, for example with "
                "image.convert('RGB'), or set channels."
            )
        return tv_tensors.Image(image)

    def _stack(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Join images of one size, shape ``(B, C, H, W)``.

        Raises:
            RecipeError: If their sizes differ.
        """
        shape = samples[0].image.shape
        for sample in samples:
            if sample.image.shape != shape:
                raise RecipeError(
                    f"{sample.file} has the shape {tuple(sample.image.shape)} after its transform, "
                    f"and {samples[0].file} has {tuple(shape)}. Images of a batch must have one "
                    "size: add v2.Resize((height, width)) to train and to eval."
                )
        return torch.stack([plain(sample.image) for sample in samples])

    @abstractmethod
    def _check(self, target: Any, image: Any, where: str) -> Any:
        """Check the target of an image, and return it as torchvision's transforms expect it."""

    def _finish(self, target: Any, image: Any, where: str, is_training: bool) -> Any:
        """Return the target after the transform."""
        return target

    @abstractmethod
    def _join(self, samples: Sequence[Sample]) -> Batch:
        """Join finished samples; ``file`` of each one is its name for messages."""


def name_of(index: int, file: str) -> str:
    """Return the name of a sample for messages."""
    return f"sample {index} ({file})" if file else f"sample {index}"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of torchvision as a tensor of torch, which models and pickle expect."""
    return tensor.as_subclass(torch.Tensor)
