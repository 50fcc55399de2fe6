"""One step in progress, as seen by the strategies for computing gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from etrain_jupyter.rules.samples import batch_plan
from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.rules.samples.shard_plan import Merge
from etrain_jupyter.trainer.control.faults import Places
from etrain_jupyter.trainer.data import Delivered
from etrain_jupyter.trainer.gradients.step_header import RequestFlags, StepHeader
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.workload import Workload


class PassSamples(NamedTuple):
    """Samples that go through the model in one pass."""

    samples: range
    """Offsets within the step."""
    stream: int
    """The rank or shard that it belongs to and whose random numbers it uses."""
    number: int
    """Index within that rank's or shard's micro-batches, from 0."""


class Gradients(Protocol):
    """Strategy by which the ranks of one generation compute gradients."""

    num_slots: int
    """Number of slots in the step header."""
    merges: tuple[Merge, ...]
    """Order in which the slots are added up."""
    overlaps_device: bool
    """True if the exchange thread may send the step header, see ``StepHeader``."""

    def counts(self, span: StepRange) -> tuple[int, ...]:
        """Return the number of samples in each share of a step: of each rank, or of each shard."""
        ...

    def parts(self, span: StepRange) -> list[PassSamples]:
        """Return this rank's micro-batches of a step, in the order of its passes."""
        ...

    def compute(self, step: Step) -> None:
        """Compute the step's gradient, store it in ``p.grad``, and complete the header.

        Raises:
            CommunicationError: A peer is lost.
            Exception: The notebook's code raised.
        """
        ...

    def rebalance(self, step: Step) -> bool:
        """After a step, decide about the shares; return True if they change from the next one."""
        ...

    def close(self) -> None:
        """Release the model: remove all hooks from it."""
        ...


class RequestSource(Protocol):
    """Source of this rank's requests to all ranks."""

    def collect(self, group: RankGroup, span: StepRange) -> RequestFlags:
        """Return the current requests."""
        ...


@dataclass(kw_only=True)
class Step:
    """A step in progress on this rank."""

    number: int
    """Number of the step, from 1."""
    span: StepRange
    """The samples of all ranks."""
    header: StepHeader
    buffers_before: list[torch.Tensor]
    """Copies of the running buffers from before the step."""
    batches: Iterator[Delivered]
    """Delivered micro-batches of this step and all later steps."""
    workload: Workload
    group: RankGroup
    job_seed: int
    watch: Stopwatch
    places: Places
    """Reports the main thread's place, and injects faults."""
    requests: RequestSource
    """Read when the header is sent."""
    fingerprint: torch.Tensor
    """Fingerprint of this rank's weights before the step, a scalar."""
    mean_of_squares: float | None = None
    """Squared norm of each rank's mean gradient, averaged over the ranks. The gradients are still
    multiplied by the loss scale. None if it is not measured in this step."""
    num_own: int = 0
    """Number of samples that this rank has processed so far."""

    def reach(self, place: str) -> None:
        """Report that the step has reached a place."""
        self.places.reach(place, rank=self.group.rank, step=self.number)

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
        requests = self.requests.collect(self.group, self.span)
        self.header.start(self.group, requests, fingerprint=self.fingerprint)

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
        passed = self.workload.forward(module, batch, len(indices), self.span.samples)
        # The micro-batch that a rank without samples borrows does not count, see
        # ``AveragedGradients``.
        if slot is not None:
            self.header.add(slot, indices, passed.loss, passed.shares)
            self.num_own += len(indices)
        return self.workload.precision.scale(passed.loss)


def split_share(share: range, num_parts: int, *, stream: int) -> list[PassSamples]:
    """Split a share into at most ``num_parts`` micro-batches, none of them empty."""
    parts, start = [], share.start
    for number, count in enumerate(batch_plan.share_samples(len(share), num_parts)):
        if count:
            parts.append(PassSamples(range(start, start + count), stream, number))
        start += count
    return parts
