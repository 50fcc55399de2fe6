"""What is told of passes beside the gradient: shares of means, and the means that they add up to.

Shapes: ``M`` the loss, the metrics and, with ``weight``, what a sample counts for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from etrain_jupyter.trainer.objective.one_pass import Passed
from etrain_jupyter.trainer.references import WorkloadError

Metric = Callable[[Any, Any], Any]


class Means(NamedTuple):
    """The averages of a step or of an evaluation."""

    loss: float
    """NaN if nothing counted."""
    metrics: dict[str, float]
    weight: float
    """What a sample counted for on average, in the unit of ``Weight``; 1.0 where there is none."""


class Portion(NamedTuple):
    """What a pass contributes to the means."""

    size: int
    """Its samples."""
    num_samples: int
    """Those of all passes."""
    weight: float | None
    """What it counts for; None where samples count."""

    @property
    def of_samples(self) -> float:
        """What part of all samples it is."""
        return self.size / self.num_samples

    @property
    def of_weight(self) -> float:
        """By what its mean loss is multiplied."""
        return self.of_samples if self.weight is None else self.weight / self.num_samples


class Measures:
    """The numbers of a pass, by name, and how each is averaged.

    One value a sample is averaged over samples. One number for the batch is a mean already: it is
    averaged as the loss is, by ``weight`` where that is given. Both come out the same however a
    batch is cut. Which names there are, and which of the two each is, the first pass settles: the
    warm-up, which all ranks make with the same samples.

    Args:
        metrics: Functions of output and target.
        is_weighted: Whether there is a ``weight``.
    """

    def __init__(self, metrics: Mapping[str, Metric], *, is_weighted: bool) -> None:
        self._metrics = metrics
        self._is_weighted = is_weighted
        self._is_mean: dict[str, bool] | None = None

    @property
    def names(self) -> list[str]:
        """The metrics' names, those that ``step`` returns too."""
        return list(self._is_mean or self._metrics)

    @property
    def num_columns(self) -> int:
        """``M``."""
        return 1 + len(self._is_mean or self._metrics) + self._is_weighted

    @torch.no_grad()
    def shares(self, passed: Passed, portion: Portion) -> list[torch.Tensor]:
        """Return a pass's shares of all means but the loss's, shape ``(M - 1,)``.

        Raises:
            WorkloadError: If a metric is no number, or names differ from the first pass's.
        """
        functions = self._metrics.items()
        values = {name: f(passed.output, passed.target) for name, f in functions}
        tensors = {
            name: _checked(name, value, portion.size)
            for name, value in (*values.items(), *passed.values.items())
        }
        self._compare({name: value.ndim == 0 for name, value in tensors.items()})
        found = [_share_of(tensors[name], portion) for name in self._is_mean or ()]
        if self._is_weighted:
            found.append(torch.tensor(portion.of_weight, dtype=torch.float64))
        return found

    def _compare(self, is_mean: dict[str, bool]) -> None:
        if self._is_mean is None:
            self._is_mean = is_mean
        if is_mean.keys() != self._is_mean.keys():
            raise WorkloadError(
                f"step returned {_listed(is_mean)} beside the loss, and {_listed(self._is_mean)} "
                "at first. Return the same names for every batch, in training and in evaluation."
            )
        if self._is_weighted and is_mean != self._is_mean:
            name = next(n for n in is_mean if is_mean[n] != self._is_mean[n])
            raise WorkloadError(
                f"metric {name!r} is now one number for a batch and now one value a sample. With "
                "weight they are averaged differently: always return the same."
            )

    def means(self, columns: Sequence[float]) -> Means:
        """Return what shares that were added up come to.

        Args:
            columns: The sums, shape ``(M,)``.
        """
        loss, *rest = columns
        weight = rest.pop() if self._is_weighted else 1.0
        kinds = dict(self._is_mean or {})
        metrics = {
            name: _over(value, weight) if is_mean else value
            for (name, is_mean), value in zip(kinds.items(), rest, strict=True)
        }
        return Means(_over(loss, weight), metrics, weight)


def _over(value: float, weight: float) -> float:
    return value / weight if weight else float("nan")


def share_of_loss(value: Any, portion: Portion, *, source: str) -> torch.Tensor:
    """Return a pass's share of the mean loss, to be differentiated.

    Args:
        value: What the notebook's code gave: a mean, or one value a sample.
        portion: What the pass contributes.
        source: What gave it, for messages.

    Raises:
        WorkloadError: If it is neither.
    """
    if not isinstance(value, torch.Tensor):
        raise WorkloadError(
            f"{source} returned {value!r}, a {type(value).__name__}. Return a tensor: the mean "
            f"over the batch, or one value a sample."
        )
    if value.ndim and value.shape != (portion.size,):
        raise WorkloadError(
            f"{source} returned a tensor of shape {tuple(value.shape)} for {portion.size} samples. "
            f"Return the mean over the batch, or one value a sample: shape ({portion.size},)."
        )
    if portion.weight == 0:
        # Not multiplied: the mean over nothing is NaN, and NaN times zero is NaN.
        return value.sum().masked_fill(torch.ones_like(value.sum(), dtype=torch.bool), 0.0)
    if value.ndim == 0:
        # Multiplied by exactly 1.0 where one batch is all there is: the plain loop to the bit.
        return value * portion.of_weight
    if portion.weight is None:
        return value.sum() / portion.num_samples
    return value.mean() * portion.of_weight


def _checked(name: str, value: Any, count: int) -> torch.Tensor:
    try:
        result = torch.as_tensor(value, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as exc:
        raise WorkloadError(
            f"metric {name!r} returned a {type(value).__name__}, which is no number. Return the "
            "mean over the batch, or one value a sample."
        ) from exc
    if result.ndim and result.shape[0] != count:
        raise WorkloadError(
            f"metric {name!r} returned shape {tuple(result.shape)} for {count} samples. Return one "
            "value a sample: "
            f"shape ({count},)."
        )
    return result


def _share_of(value: torch.Tensor, portion: Portion) -> torch.Tensor:
    if value.ndim:
        return value.reshape(portion.size, -1).mean(dim=1).sum() / portion.num_samples
    if portion.weight is None:
        return value * portion.size / portion.num_samples
    if portion.weight == 0:
        return torch.zeros_like(value)
    return value * portion.of_weight


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
