"""Gradients for ``reproducible`` with ``sync_batchnorm``.

All shards of a rank are in progress at the same time, each in a thread of its own, because a
BatchNorm layer needs the sums of all of them before any continues. Only one thread runs at a time,
with its own random numbers and its own gradients. In contrast to ``ShardedGradients``, a rank keeps
the activations and the gradients of all of its shards, and the exchange starts after the last
backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from etrain_jupyter.rules.samples import batch_plan
from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.rules.samples.shard_plan import ShardPass, plan_joint_passes
from etrain_jupyter.trainer.gradients.lockstep import Lockstep
from etrain_jupyter.trainer.gradients.sharded import ShardedGradients
from etrain_jupyter.trainer.gradients.step import PassSamples, Step
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.seeds import save_generators, seed_all
from etrain_jupyter.trainer.sync_batchnorm import SyncedNorms


class SyncedShardGradients(ShardedGradients):
    """Gradients of one generation; see ``ShardedGradients`` for the other arguments.

    Args:
        norms: The BatchNorm layers. The forward pass must change no other buffers.
    """

    def __init__(
        self,
        group: RankGroup,
        model: nn.Module,
        *,
        norms: SyncedNorms,
        **more: Any,
    ) -> None:
        super().__init__(group, model, **more)
        self._norms = norms
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        device = next((p.device for p in self._trainable), torch.device("cpu"))
        self._device = device if device.type != "cpu" else None
        self._lockstep = Lockstep(len(self._passes), save=self._save, set_up=self._set_up_thread)

    def _plan_passes(self, *, is_one_pass: bool) -> tuple[ShardPass, ...]:
        return plan_joint_passes(self._subtrees)

    def close(self) -> None:
        """Remove the hooks from the parameters, and end the threads."""
        super().close()
        self._lockstep.close()

    def parts(self, span: StepRange) -> list[PassSamples]:
        """Return the micro-batches of this rank's shards: the first one of each, and so on."""
        # Stable: within a pass, the shards keep their order.
        return sorted(super().parts(span), key=lambda part: part.number)

    def compute(self, step: Step) -> None:
        """Run this rank's shards in lockstep, and sum the gradients over the ranks."""
        plan = self._plan_of(step.span)
        self._sums.begin()
        self._moves.zero_()
        busy = [p for p in self._passes if plan.counts[p.shard]]
        tasks: list[Callable[[], None]] = [
            functools.partial(self._run_in_lockstep, step, plan, p) for p in busy
        ]
        with self._norms.over(self._group, step.watch, self._lockstep):
            self._lockstep.run(tasks)
        for p in self._passes:
            if plan.counts[p.shard]:
                self._keep_moves(step, p.shard, plan.counts[p.shard])
            else:
                for bucket in self._buckets:
                    bucket.clear(p.slot)
        self._start_small_sums(step)
        self._finish(step)

    def _run_in_lockstep(self, step: Step, plan: batch_plan.StepPlan, p: ShardPass) -> None:
        self._sums.collect(p)
        seed_all(step.job_seed, step=step.number, rank=p.shard)
        for part in self._parts_of(plan, p.shard):
            begin = functools.partial(self._begin_pass, plan, part.number)
            self._lockstep.meet(None, begin)
            # Below, a batch is the next one of ``parts``.
            loss = step.run_part(self._model, slot=p.shard)
            # Otherwise, torch computes the backward passes of all threads in a single one per GPU,
            # which must not wait.
            with torch.autograd.set_multithreading_enabled(False):
                loss.backward()  # type: ignore[no-untyped-call]
            self._group.raise_if_failed()
        for bucket in self._buckets:
            bucket.fill(p.slot)

    def _begin_pass(self, plan: batch_plan.StepPlan, number: int, values: list[Any]) -> None:
        # In a small step, shards have different numbers of passes.
        self._norms.num_rows = [
            sum(len(self._parts_of(plan, shard)) > number for shard in shards)
            for shards in self._plan.shards
        ]

    def _save(self) -> Callable[[], None]:
        restore_generators = save_generators(self._device)
        gradients = [p.grad for p in self._trainable]
        slot = self._sums.slot

        def restore() -> None:
            restore_generators()
            self._sums.slot = slot
            for parameter, gradient in zip(self._trainable, gradients, strict=True):
                parameter.grad = gradient

        return restore

    def _set_up_thread(self) -> None:
        # Each thread has a current device of its own.
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)
