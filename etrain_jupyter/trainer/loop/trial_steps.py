"""Variants of a step, which the ranks time to confirm the cause of a slow job.

==============  ==================================================================================
``cached``      the step with samples that are in memory already
``local``       without exchange: each rank updates from its own gradients
``bare``        ``local`` without metrics
``frozen``      ``cached`` without update
``accumulated`` four times as many passes, with one exchange and one update
``large``       passes over four times as many samples
``wide``        ``local`` with passes over four times as many samples
``left_out``    ``local`` without the stragglers, whose samples the other ranks take over
==============  ==================================================================================

All of them use the samples of the next step, which are fetched once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.trainer.data import Delivered
from etrain_jupyter.trainer.gradients.step import Gradients, Step
from etrain_jupyter.trainer.gradients.step_header import RequestFlags, StepHeader
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.loop.update import Update
from etrain_jupyter.trainer.places import Places
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.state.train_state import TrainState

COSTS = {
    "cached": 1, "local": 1, "bare": 1, "frozen": 1, "accumulated": 4, "large": 4, "wide": 4,
    "left_out": 2,
}  # fmt: skip
"""Variants, with the approximate duration of each in steps."""
FACTOR = 4
"""Factor of ``accumulated``, ``large`` and ``wide``."""


class UnsuitableBatchError(Exception):
    """The batches cannot be enlarged."""


class _NoRequests:
    def collect(self, group: RankGroup, span: StepRange) -> RequestFlags:
        return RequestFlags(is_change_pending=False, is_eval_due=False)


@dataclass(frozen=True, kw_only=True)
class TrialSteps:
    """Runs steps that the caller undoes."""

    state: TrainState
    update: Update
    group: RankGroup
    gradients: Gradients
    moving: RunningBuffers
    places: Places
    span: StepRange
    batches: Sequence[Delivered]
    """Copies of this rank's micro-batches of the next step."""
    left_out: Sequence[int]
    """Ranks that ``left_out`` leaves out."""

    def run(self, variant: str) -> None:
        """Run one step of a variant.

        Raises:
            CommunicationError: A peer is lost.
            UnsuitableBatchError: The batches cannot be enlarged.
            Exception: The notebook's code raised.
        """
        self.places.reach("experiment", rank=self.group.rank, step=self.state.step + 1)
        match variant:
            case "cached" | "frozen":
                self._exchange(self.batches, is_updated=variant == "cached")
            case "accumulated":
                for _ in range(FACTOR - 1):
                    self._differentiate(self.batches)
                self._exchange(self.batches)
            case "large":
                self._exchange(self._enlarged(FACTOR))
            case "wide":
                self._keep_local(self._enlarged(FACTOR))
            case "left_out":
                self._take_over()
            case _:
                self._keep_local(self.batches, is_measured=variant != "bare")

    def try_large(self) -> None:
        """Run the passes of ``large`` without the other ranks, which an error would block."""
        self._differentiate(self._enlarged(FACTOR))

    def _take_over(self) -> None:
        if self.group.rank in self.left_out:
            return
        batches = self.batches
        # With ``batch.per_worker``, the others keep their share.
        if self.state.config.batch.per_worker_batch_size is None:
            world_size = self.group.world_size
            batches = self._enlarged(world_size / (world_size - len(self.left_out)))
        self._keep_local(batches)

    def _exchange(self, batches: Sequence[Delivered], *, is_updated: bool = True) -> None:
        step = self._step(iter(batches))
        self.gradients.compute(step)
        if is_updated:
            self._make_update(step)
        self._forget_gradients()

    def _keep_local(self, batches: Sequence[Delivered], *, is_measured: bool = True) -> None:
        gradients = self._differentiate(batches, is_measured=is_measured)
        for parameter, gradient in zip(self._parameters(), gradients, strict=True):
            parameter.grad = gradient
        self._make_update(self._step(iter(())))
        self._forget_gradients()

    def _differentiate(
        self, batches: Sequence[Delivered], *, is_measured: bool = True
    ) -> list[torch.Tensor | None]:
        # Not ``backward``, which calls the hooks that exchange each parameter's gradient.
        workload, parameters = self.state.workload, self._parameters()
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for indices, batch in batches:
            self.places.beat()
            passed = workload.forward(
                workload.module, batch, len(indices), self.span.samples, is_measured=is_measured
            )
            loss = workload.precision.scale(passed.loss)
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            for i, gradient in enumerate(found):
                old = sums[i]
                sums[i] = gradient if old is None or gradient is None else old.add_(gradient)
        return sums

    def _make_update(self, step: Step) -> None:
        self.update.make(step, position=self.state.position, weight=1.0)

    def _step(self, batches: Iterator[Delivered]) -> Step:
        workload, gradients = self.state.workload, self.gradients
        header = StepHeader(
            num_means=workload.measures.num_columns,
            num_slots=gradients.num_slots,
            merges=gradients.merges,
            num_ranks=self.group.world_size,
        )
        return Step(
            number=self.state.step + 1,
            span=self.span,
            header=header,
            buffers_before=self.moving.copy(),
            batches=batches,
            workload=workload,
            group=self.group,
            job_seed=self.state.config.seed,
            watch=Stopwatch(workload.device),
            # Faults that are planned for the step itself must not fire in a trial of it.
            places=Places(page=self.places.page),
            requests=_NoRequests(),
            fingerprint=torch.zeros(()),
        )

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.state.workload.model.parameters() if p.requires_grad]

    def _forget_gradients(self) -> None:
        self.state.workload.optimizer.zero_grad(set_to_none=True)
        self.state.workload.model.zero_grad(set_to_none=True)

    def _enlarged(self, factor: float) -> list[Delivered]:
        return [enlarge(indices, batch, factor) for indices, batch in self.batches]


def copy_batches(batches: Sequence[Delivered]) -> list[Delivered]:
    """Return copies, because the notebook's code may change its batch in place."""
    return copy.deepcopy(list(batches))


def enlarge(indices: Any, batch: Any, factor: float) -> Delivered:
    """Repeat the samples of a batch until there are ``factor`` times as many.

    Raises:
        UnsuitableBatchError: If the batch does not consist of tensors with one row per sample.
    """
    count, size = len(indices), round(len(indices) * factor)
    leaves = tree_leaves(batch)
    if not leaves or not all(
        isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == count for leaf in leaves
    ):
        raise UnsuitableBatchError(
            "the batches do not consist of tensors with one row per sample, so they cannot be "
            "enlarged"
        )
    rows = torch.arange(size) % count
    return np.asarray(indices)[rows.numpy()], tree_map(lambda t: t[rows.to(t.device)], batch)
