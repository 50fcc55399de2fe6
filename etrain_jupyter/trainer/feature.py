"""A step in progress, and the features that act on it.

A feature is an optional part of a step, in a file of its own. A default step has two features: the
time accounting and the fingerprint of the weights. ``trainer.features`` lists a job's features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.trainer.control.faults import Places
from etrain_jupyter.trainer.data import Delivered
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.objective.measures import Means, Pass
from etrain_jupyter.trainer.step_header import RequestFlags, StepHeader
from etrain_jupyter.trainer.times import StepTimes, Stopwatch


class StepFeature:
    """One optional part of a step. Its methods are called in this order; all are empty by default.

    ::

        begin             a generation has formed
        before_forward
        header_fields     the last forward pass is done, and the step header is about to be sent
        after_sum         gradients and header are sums over the ranks, the same on all ranks
        before_update     everything can still be undone
        after_update      the weights have changed
        after_commit      the counters have advanced
        settle            wait for the update's exchanges; raises only if a peer is lost
        after_report      the times of the step are known
        undo              replaces the rest after any error before the commit
    """

    def begin(self, group: RankGroup) -> None:
        """Begin a generation."""

    def num_fields(self, world_size: int) -> int:
        """Return the number of fields in the step header, which is summed over the ranks."""
        return 0

    def before_forward(self, step: Step) -> None:
        """Prepare the step."""

    def header_fields(self, step: Step, fields_F: NDArray[np.float64]) -> None:
        """Set this rank's fields, shape ``(num_fields,)``, which are initially zero.

        On a GPU, another thread may call this, after copies that ``before_forward`` has started.
        """

    def after_sum(self, step: Step) -> None:
        """Use the sums. To undo the step, raise the same error on all ranks."""

    def before_update(self, step: Step) -> None:
        """Change the gradients before the optimizer uses them."""

    def after_update(self) -> None:
        """Act on the updated weights, which may be complete only in the next generation."""

    def after_commit(self, step: Step) -> None:
        """Keep the step's changes."""

    def settle(self, step: Step) -> None:
        """Wait for the update's exchanges.

        Raises:
            CommunicationError: A peer is lost; the step still counts.
        """

    def after_report(self, step: Step) -> None:
        """Use the step's times."""

    def undo(self, step: Step) -> None:
        """Restore the state from before the step."""


class Features:
    """The features of a job, in the order in which they act."""

    def __init__(self, features: Sequence[StepFeature]) -> None:
        self._features = tuple(features)
        self.before_forward = self._moments("before_forward")
        self.after_sum = self._moments("after_sum")
        self.before_update = self._moments("before_update")
        self.after_update = self._moments("after_update")
        self.after_commit = self._moments("after_commit")
        self.settle = self._moments("settle")
        self.after_report = self._moments("after_report")
        self.undo = self._moments("undo")
        self.fields: dict[StepFeature, slice] = {}
        """Place of each feature's fields in the step header of this generation."""
        self.num_fields = 0

    def _moments(self, name: str) -> tuple[Callable[..., Any], ...]:
        # Leave out empty methods, so that a feature costs nothing at moments that it does not use.
        has_own = (f for f in self._features if getattr(type(f), name) is not _EMPTY[name])
        return tuple(getattr(feature, name) for feature in has_own)

    def begin(self, group: RankGroup) -> None:
        """Begin a generation."""
        self.fields, self.num_fields = {}, 0
        for feature in self._features:
            feature.begin(group)
            if count := feature.num_fields(group.world_size):
                self.fields[feature] = slice(self.num_fields, self.num_fields + count)
                self.num_fields += count

    def header_fields(self, step: Step, fields_F: NDArray[np.float64]) -> None:
        """Set the fields of all features."""
        for feature, place in self.fields.items():
            feature.header_fields(step, fields_F[place])


_EMPTY = vars(StepFeature)


class NonFiniteLoss(NamedTuple):
    """One rank's report of a non-finite loss."""

    loss: float
    """The mean over all ranks."""
    is_source: bool
    """True if this rank's own share was not finite."""


class NonFiniteLossError(ArithmeticError):
    """The mean loss of the step in flight is not finite; the step is undone."""

    def __init__(self, report: NonFiniteLoss) -> None:
        super().__init__(f"the mean loss is {report.loss}")
        self.report = report


@dataclass(kw_only=True)
class Step:
    """A step in progress on this rank."""

    number: int
    """Number of the step, from 1."""
    position: int
    """Samples trained on before it, over all epochs."""
    span: StepRange
    """The samples of all ranks."""
    header: StepHeader
    buffers_before: list[torch.Tensor]
    """Copies of the running buffers from before the step."""
    batches: Iterator[Delivered]
    """Delivered micro-batches of this step and all later steps."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[nn.Module, Any, int, int], Pass]
    """Runs a batch through the module; see ``Workload.forward``."""
    scale: Callable[[torch.Tensor], torch.Tensor] | None
    """Multiplies a loss by the loss scale; None if there is none."""
    group: RankGroup
    job_seed: int
    watch: Stopwatch
    places: Places
    """Reports the main thread's place, and injects faults."""
    features: Features
    collect_requests: Callable[[Step], RequestFlags]
    """Returns this rank's requests to all ranks; called when the header is sent."""
    mean_of_squares: float | None = None
    """Squared norm of each rank's mean gradient, averaged over the ranks. The gradients are still
    multiplied by the loss scale. None if it is not measured in this step."""
    num_own: int = 0
    """Number of samples that this rank has processed so far."""
    means: Means = field(default_factory=lambda: Means(math.nan, {}, 1.0))
    """Loss and metrics; valid once the header is summed."""
    is_prepared: bool = False
    """True if this rank must not apply the update on its own: with ``shard: optimizer``, the next
    generation decides whether the step counts."""
    is_updated: bool = False
    """False if all ranks skip the update. Before the update, True means that it is due."""
    times: StepTimes = field(default_factory=StepTimes)
    """Times of the step's parts; valid once the step is committed."""
    elapsed_s: float = 0.0
    """Time since the end of the last step or evaluation, in seconds."""
    metrics_began_s: float
    """``measures.spent_s`` at the beginning of the step: evaluations use the metrics, too."""
    metrics_s: float | None = None
    """Time in the cell's metric functions, in seconds; None if it cannot be measured."""

    def reach(self, place: str) -> None:
        """Report that the step has reached a place."""
        self.places.reach(place, rank=self.group.rank, step=self.number)

    def fields_of(self, feature: StepFeature) -> list[float]:
        """Return a feature's header fields, summed over the ranks; empty if it has none."""
        place = self.features.fields.get(feature)
        fields: list[float] = [] if place is None else self.header.fields_F[place].tolist()
        return fields

    def run_part(self, module: nn.Module, slot: int | None) -> torch.Tensor:
        """Run the forward pass of the next micro-batch.

        Args:
            module: The workload's module, possibly wrapped.
            slot: Slot of the header; None if the micro-batch does not count.

        Returns:
            The micro-batch's share of the step's mean loss, multiplied by the loss scale; a scalar
            to differentiate.
        """
        with self.watch.fetching():
            indices, batch = next(self.batches)
        self.reach("forward")
        passed = self.forward(module, batch, len(indices), self.span.samples)
        # The micro-batch that a rank without samples borrows does not count; see
        # ``AveragedGradients``.
        if slot is not None:
            self.header.add(slot, indices, passed.loss, passed.shares)
            self.num_own += len(indices)
        return passed.loss if self.scale is None else self.scale(passed.loss)

    def start_header(self) -> None:
        """Start summing the header, after the last forward pass and before its backward pass."""
        # The header needs the loss of the last forward pass, and its communication overlaps with
        # the backward pass. Requests are read as late as possible, so that they need not wait for
        # the next step:
        #
        #     forward ── losses, requests ── header ─ ─ ─ ─ ─ sum
        #                                    backward ── buckets ── sums ── wait for all
        self.reach("all_reduce")
        if self.places.faults.corrupts_loss(rank=self.group.rank, step=self.number):
            self.header.corrupt_loss()
        requests = self.collect_requests(self)
        self.header.start(
            self.group, requests, lambda fields_F: self.features.header_fields(self, fields_F)
        )

    def check_loss(self) -> None:
        """Raise NonFiniteLossError if the mean loss is not finite, which would corrupt weights.

        All ranks detect it before any of them updates its weights, because they check the summed
        loss. Gradients that overflow in fp16 are a different case, in which the loss is finite.
        """
        loss = self.header.means()[0]
        if not math.isfinite(loss):
            # One rank's NaN makes the sum NaN on all ranks. Each rank therefore reports whether its
            # own share, before the sum, was finite, so that the job's error can name the rank that
            # caused it.
            is_source = not self.header.is_own_loss_finite
            raise NonFiniteLossError(NonFiniteLoss(loss=loss, is_source=is_source))

    def record(self) -> dict[str, Any]:
        """Return the fields of ``events.StepCompleted``, after the commit."""
        return {
            "generation": self.group.generation,
            "step": self.number,
            "epoch": self.span.epoch,
            "first": self.span.first,
            "samples": self.header.num_samples,
            "sample_checksum": self.header.checksum,
            "loss": self.means.loss,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "world_size": self.group.world_size,
            "samples_per_s": self.span.samples / self.elapsed_s,
            **{name: round(seconds, 6) for name, seconds in asdict(self.times).items()},
            "metrics": self.means.metrics,
            "ranks_agree": True,  # otherwise, ``WeightFingerprint`` has undone the step
            "skipped": not self.is_updated,
            "time": time.time(),
        }
