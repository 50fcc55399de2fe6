"""One step in the making, as the ways to compute its gradient see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from etrain_jupyter.rules.samples import batch_plan
from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.rules.samples.shard_plan import Merge
from etrain_jupyter.trainer.data import Delivered
from etrain_jupyter.trainer.gradients.step_header import StepHeader
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.seeds import seed_all
from etrain_jupyter.trainer.workload import Workload


class MicroBatch(NamedTuple):
    """Samples that go through the model in one pass."""

    samples: range
    """Offsets within the step."""
    stream: int
    """The rank or the shard that it is a part of: whose chance it has."""
    number: int
    """Which part of it, from 0."""


class Gradients(Protocol):
    """One generation's way to compute gradients."""

    num_slots: int
    """Slots of the step's header."""
    merges: tuple[Merge, ...]
    """How the slots are added up."""

    def parts(self, span: StepRange) -> list[MicroBatch]:
        """Return this rank's passes of a step, in their order."""
        ...

    def compute(self, step: Step) -> None:
        """Leave the step's gradient in ``p.grad`` and its header complete.

        Raises:
            CommunicationError: A peer is lost.
            Exception: The notebook's code raised.
        """
        ...

    def close(self) -> None:
        """Let go of the model."""
        ...


@dataclass(kw_only=True)
class Step:
    """What a step has at hand."""

    number: int
    """Of the step once it is committed, from 1."""
    span: StepRange
    header: StepHeader
    buffers_before: list[torch.Tensor]
    """The values of the moving buffers before the step."""
    batches: Iterator[Delivered]
    """What the parts of this step and of all later ones were delivered as."""
    workload: Workload
    group: RankGroup
    job_seed: int
    watch: Stopwatch
    at: Callable[[str], None]
    """Called with the name of each place that the step comes to."""
    start_header: Callable[[], None]
    """Sends the header; called after the last forward pass and before its backward pass, which
    hides it."""
    mean_of_squares: float | None = None
    """Mean over the ranks of the square norm of a rank's mean gradient, scaled as ``precision``
    scales it, in a full step of several ranks where that is measured."""
    num_own: int = 0
    """Samples that this rank has passed so far."""

    def seed(self, stream: int) -> None:
        """Begin the chance of a rank or of a shard."""
        seed_all(self.job_seed, step=self.number, rank=stream)

    def run_part(self, module: nn.Module, slot: int | None) -> torch.Tensor:
        """Put the next part through ``module``.

        Args:
            module: The workload's, perhaps wrapped.
            slot: Of the header; None if the part counts for nothing.

        Returns:
            Its share of the step's mean loss, scaled as ``precision`` needs it, to be
            differentiated.
        """
        with self.watch.fetching():
            indices, batch = next(self.batches)
        self.at("forward")
        passed = self.workload.forward(module, batch, len(indices), self.span.samples)
        if slot is not None:
            self.header.add(slot, indices, passed.loss, passed.shares)
            self.num_own += len(indices)
        return self.workload.precision.scale(passed.loss)


def split_share(share: range, num_parts: int, *, stream: int) -> list[MicroBatch]:
    """Cut a share into at most ``num_parts`` parts, none of them empty."""
    parts, start = [], share.start
    for number, count in enumerate(batch_plan.share_samples(len(share), num_parts)):
        if count:
            parts.append(MicroBatch(range(start, start + count), stream, number))
        start += count
    return parts
