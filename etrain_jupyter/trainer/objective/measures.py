"""Means over the samples of a step or an evaluation, each a sum of the passes' shares.

Shapes: ``M`` means: the loss, the metrics and, with ``weight``, the mean weight of a sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from etrain_jupyter.trainer.objective.one_pass import Passed
from etrain_jupyter.trainer.references import WorkloadError

Metric = Callable[[Any, Any], Any]


class Means(NamedTuple):
    """Means of a step or an evaluation."""

    loss: float
    """The mean loss; NaN if all weights were 0."""
    metrics: dict[str, float]
    weight: float
    """Mean weight of a sample, in the unit of ``Weight``; 1.0 if ``weight`` is not set."""


class Pass(NamedTuple):
    """Result of one batch."""

    loss: torch.Tensor
    """The batch's share of the mean loss, a scalar to differentiate."""
    shares: list[torch.Tensor]
    """The batch's shares of the other means, scalars; see ``Measures``."""
    output: Any
    """The model's output; None if the notebook defines ``step``."""
    target: Any


class Portion(NamedTuple):
    """Contribution of one pass to the means."""

    size: int
    """Number of samples in the pass."""
    num_samples: int
    """Number of samples in all passes."""
    weight: float | None
    """Weight of the pass; None if every sample counts equally."""

    @property
    def of_samples(self) -> float:
        """Fraction of all samples."""
        return self.size / self.num_samples

    @property
    def of_weight(self) -> float:
        """Factor by which the pass's mean loss contributes to the mean of all passes."""
        return self.of_samples if self.weight is None else self.weight / self.num_samples


class Measures:
    """Average the values of the passes, by name.

    Per-sample values are averaged over the samples. A single number for a batch is already a mean,
    and is averaged like the loss: weighted by ``weight`` if it is set. Neither average depends on
    how the samples are split into batches. The first pass, in the warm-up, determines the names and
    the kind of each value; all ranks run this pass on the same samples.
    """

    def __init__(self, metrics: Mapping[str, Metric], *, is_weighted: bool) -> None:
        self._metrics = metrics
        self._is_weighted = is_weighted
        self._is_mean: dict[str, bool] | None = None
        self.spent_s = 0.0
        """Time in the metric functions since the start of the process, in seconds. On a GPU, the
        functions may only queue their work."""

    @property
    def names(self) -> list[str]:
        """Names of the metrics, including those that ``step`` returns."""
        return list(self._is_mean or self._metrics)

    @property
    def num_columns(self) -> int:
        """``M``, the number of means."""
        return 1 + len(self._is_mean or self._metrics) + self._is_weighted

    @torch.no_grad()
    def shares(self, passed: Passed, portion: Portion) -> list[torch.Tensor]:
        """Return a pass's shares of all means except the loss, shape ``(M - 1,)``.

        Raises:
            WorkloadError: If a metric is not a number, or the names differ from those in the first
                pass.
        """
        began_at = time.perf_counter()
        functions = self._metrics.items()
        values = {name: f(passed.output, passed.target) for name, f in functions}
        self.spent_s += time.perf_counter() - began_at
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
        # The means are columns of the step header. If batches had different names, ranks would add
        # up different metrics in one column.
        if self._is_mean is None:
            self._is_mean = is_mean
        if is_mean.keys() != self._is_mean.keys():
            raise WorkloadError(
                f"step returned {_listed(is_mean)} in addition to the loss, but the first call "
                f"returned {_listed(self._is_mean)}. Return the same names for every batch, in "
                "training and in evaluation."
            )
        # Without a weight, both kinds are averaged over samples and need not be distinguished.
        if self._is_weighted and is_mean != self._is_mean:
            name = next(n for n in is_mean if is_mean[n] != self._is_mean[n])
            raise WorkloadError(
                f"metric {name!r} returned one number per batch in one pass and one value per "
                "sample in another. With weight they are averaged differently: always return the "
                "same kind."
            )

    def means(self, columns: Sequence[float]) -> Means:
        """Return the means from summed shares.

        Args:
            columns: Sums of the shares over all passes and ranks, shape ``(M,)``.
        """
        # columns: loss | metrics, in the order of the first pass | weight, if there is one
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
    """Return a pass's share of the mean loss: a scalar to differentiate.

    Args:
        value: The notebook's loss: a mean, or one value per sample, shape ``()`` or ``(size,)``.
        portion: The contribution of the pass.
        source: Origin of the value, for messages.

    Raises:
        WorkloadError: If the value is neither.
    """
    if not isinstance(value, torch.Tensor):
        raise WorkloadError(
            f"{source} returned {value!r}, a {type(value).__name__}. Return a tensor: the mean "
            f"over the batch, or one value per sample."
        )
    if value.ndim and value.shape != (portion.size,):
        raise WorkloadError(
            f"{source} returned a tensor of shape {tuple(value.shape)} for {portion.size} samples. "
            f"Return the mean over the batch, or one value per sample: shape ({portion.size},)."
        )
    if portion.weight == 0:
        # Do not multiply by zero, because the mean over no samples is NaN, and NaN times zero is
        # NaN.
        return value.sum().masked_fill(torch.ones_like(value.sum(), dtype=torch.bool), 0.0)
    if value.ndim == 0:
        # A single batch is multiplied by exactly 1.0, so the result is bit-identical to a plain
        # loop's.
        return value * portion.of_weight
    if portion.weight is None:
        return value.sum() / portion.num_samples
    return value.mean() * portion.of_weight


def _checked(name: str, value: Any, count: int) -> torch.Tensor:
    try:
        result = torch.as_tensor(value, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as exc:
        raise WorkloadError(
            f"metric {name!r} returned a {type(value).__name__}, which is not a number. Return "
            "the mean over the batch, or one value per sample."
        ) from exc
    if result.ndim and result.shape[0] != count:
        raise WorkloadError(
            f"metric {name!r} returned shape {tuple(result.shape)} for {count} samples. Return one "
            f"value per sample: shape ({count},)."
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
