"""The features of a job's steps, in the order in which they act."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.rules.samples.balance import Balance, SampleCost
from etrain_jupyter.trainer.feature import Features, Step, StepFeature
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.loop.learning_rate import LearningRate
from etrain_jupyter.trainer.rank_times import RankTimes
from etrain_jupyter.trainer.state.weight_fingerprint import WeightFingerprint
from etrain_jupyter.trainer.workload import Workload


def features_of(
    workload: Workload,
    config: TrainConfig,
    *,
    times: RankTimes,
    rates: LearningRate,
    speeds: SpeedShares | None,
    named: Callable[[], Mapping[str, torch.Tensor]],
) -> Features:
    """Return the features of a job.

    Args:
        workload: The objects that the job trains with.
        config: The job.
        times: Accounts for the times of the steps.
        rates: The learning rates.
        speeds: Shares of the samples by speed; None if they are even.
        named: Returns all weights by name, with their averages.
    """
    averages = workload.average.tensors.values() if workload.average is not None else ()
    precision, clip = workload.precision, config.clip_grad_norm
    # The order matters before an update:
    #
    #     noise, rates     use the gradients as summed, still multiplied by the loss scale
    #     weight, scale    gradients become those of the mean loss
    #     clip             by the norm of these gradients
    #     shards           change nothing before all ranks can update
    features = (
        times,
        WeightFingerprint(workload.model, averages, named),
        speeds,
        None if rates.is_constant else rates,
        workload.weight,
        precision if precision.is_scaled else None,
        ClipNorm(clip) if clip is not None else None,
        workload.shards,
        workload.average,
    )
    return Features([feature for feature in features if feature is not None])


class ClipNorm(StepFeature):
    """Bound the norm of the gradients, for ``clip_grad_norm``."""

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm

    def before_update(self, step: Step) -> None:
        """Scale the gradients down if their norm is larger."""
        if step.is_updated:
            nn.utils.clip_grad_norm_(step.model.parameters(), self._max_norm)


class SpeedShares(StepFeature):
    """Share the samples of a step by the measured speeds of the ranks, for ``batch.split: auto``.

    All ranks know the time per sample of each rank from the step header, and compute the same
    shares; see ``rules.samples.balance``.
    """

    def __init__(self) -> None:
        self._cost = SampleCost()

    def begin(self, group: RankGroup) -> None:
        """Measure again, because this rank's share has changed."""
        self._cost.begin()

    def num_fields(self, world_size: int) -> int:
        """Return the number of fields: a time per sample and its error for each rank."""
        return 2 * world_size

    def header_fields(self, step: Step, fields_F: NDArray[np.float64]) -> None:
        """Set this rank's time per sample, and its error."""
        mine, size = step.group.rank, step.group.world_size
        fields_F[mine], fields_F[size + mine] = self._cost.seconds, self._cost.error

    def after_report(self, step: Step) -> None:
        """Measure the step."""
        times = step.times
        self._cost.add(times.data_s + times.compute_s + times.optimizer_s, step.num_own)

    def change(self, step: Step, balance: Balance | None) -> str:
        """Decide after a step whether to change the shares.

        Returns:
            A message if they change from the next step on; otherwise, an empty string.
        """
        costs, size = step.fields_of(self), step.group.world_size
        if balance is None or not balance.observe(costs[:size], costs[size:]):
            return ""
        self._cost.begin()
        costs_ms = ", ".join(f"{1e3 * cost:.3g}" if cost else "unknown" for cost in costs[:size])
        counts = ", ".join(map(str, balance.counts))
        return (
            f"step {step.number}: from the next step on, the ranks train on {counts} samples each, "
            f"by their measured times per sample (ms): {costs_ms}"
        )
