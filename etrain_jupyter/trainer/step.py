"""One training step of one rank.

::

    load            samples of this rank's share
    forward         every pass, with the shares of the loss in the step header
    backward, sum   gradients and header, over all ranks
    agree           a lost peer, diverged weights or a non-finite loss undo the step on all ranks
    update          the weights
    commit          the only point at which the counters advance
    report          one record to the coordinator

``StepTrainer.train`` runs these parts in order. The optional parts of a step are ``StepFeature``
objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from etrain_jupyter.rules.samples.balance import Balance
from etrain_jupyter.rules.samples.batch_plan import PassSamples
from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.rules.samples.shard_plan import Merge
from etrain_jupyter.trainer.control.error_origin import device_error_in
from etrain_jupyter.trainer.control.faults import Places
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.data import Delivered
from etrain_jupyter.trainer.feature import Features, Step
from etrain_jupyter.trainer.group.cuda_buckets import copies_for
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.state.train_state import TrainState
from etrain_jupyter.trainer.step_header import RequestFlags, StepHeader
from etrain_jupyter.trainer.times import Stopwatch
from etrain_jupyter.wire.messages import TextLogged


class Gradients(Protocol):
    """Strategy by which the ranks of one generation compute gradients."""

    num_slots: int
    """Number of slots in the step header."""
    merges: tuple[Merge, ...]
    """Order in which the slots are added up."""
    overlaps_device: bool
    """True if the exchange thread may send the step header; see ``StepHeader``."""
    balance: Balance | None
    """Shares by the ranks' speeds; None if they are even."""

    def counts(self, span: StepRange) -> tuple[int, ...]:
        """Return the number of samples in each share of a step, by rank or by shard."""
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

    def close(self) -> None:
        """Release the model: remove all hooks from it."""
        ...


class StepTrainer:
    """Train one step after another, and undo the step in flight on any error.

    Args:
        features: The optional parts of a step, in order.
        moving: The buffers that a forward pass changes.
    """

    def __init__(
        self,
        state: TrainState,
        features: Features,
        *,
        moving: RunningBuffers,
        places: Places,
        send: Send,
    ) -> None:
        self._state = state
        self._workload = state.workload
        self._features = features
        self._moving = moving
        self._places = places
        self._send = send
        self._watch = Stopwatch(state.workload.device)
        self._is_cuda = torch.device(state.workload.device).type == "cuda"
        self._copies = copies_for(state.workload.device)
        self.in_step = False
        """True while a step has begun but is not committed."""
        self.is_torn = False
        """True if an update was interrupted: some weights have been updated and others have not."""
        self.prepared: Step | None = None
        """The step in flight if the generation failed while the ranks agreed on its update."""
        self._last_end = 0.0
        """End of the last step or evaluation, as a ``time.perf_counter`` value."""

    @property
    def watch(self) -> Stopwatch:
        """Measures the parts of the step in flight."""
        return self._watch

    def begin(self, group: RankGroup) -> None:
        """Begin a generation."""
        self._features.begin(group)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time until now from the next step."""
        self._last_end = time.perf_counter()

    def train(
        self,
        group: RankGroup,
        gradients: Gradients,
        batches: Iterator[Delivered],
        *,
        batch_size: int,
        requests: Callable[[Step], RequestFlags],
    ) -> Step:
        """Train the next step.

        Raises:
            CommunicationError: A peer is lost; the step is undone, or ``prepared``.
            NonFiniteLossError: On all ranks; the step is undone.
            Exception: The notebook's code raised; the step is undone.
        """
        # A rank either commits a step or undoes it. If a peer dies while the sums complete, the
        # survivors may differ by one step. The next generation starts from the newest state, which
        # is sent to the ranks that are behind:
        #
        #     rank 0   sums complete ── update ── commit 8 ── reports 8
        #     rank 1   sums complete ── update ── commit 8
        #     rank 2   lost a peer before its sums were complete ── undo, stays at 7 ── behind
        self._watch.begin()
        step = self._begin_step(group, gradients, batches, batch_size, requests)
        self.in_step = True
        try:
            gradients.compute(step)  # load, forward, backward, sum
            self._watch.gradients_are_summed()
            for act in self._features.after_sum:
                act(step)
            step.check_loss()
            step.reach("commit")
            step.means = self._workload.measures.means(step.header.means())
            with self._watch.updating():
                self._update(step)
        except BaseException as exc:
            # After a CUDA error, every copy on the device would raise and hide the first error. The
            # process exits anyway, so the step need not be undone.
            if step.is_prepared:
                self.prepared = step
            elif device_error_in(exc) is None:
                self._undo(step)
            raise
        # From here on, nothing may raise an exception before the step is reported. The weights have
        # changed, so the counters must be updated.
        self._commit(step)
        try:
            with self._watch.updating():
                for act in self._features.settle:
                    act(step)
                self.finish()
        finally:
            self._report(step)
        return step

    def _begin_step(
        self,
        group: RankGroup,
        gradients: Gradients,
        batches: Iterator[Delivered],
        batch_size: int,
        requests: Callable[[Step], RequestFlags],
    ) -> Step:
        state, precision = self._state, self._workload.precision
        header = StepHeader(
            num_means=self._workload.measures.num_columns,
            num_slots=gradients.num_slots,
            num_fields=self._features.num_fields,
            merges=gradients.merges,
            copies=self._copies if gradients.overlaps_device else None,
        )
        step = Step(
            number=state.step + 1,
            position=state.position,
            span=state.plan.span(state.position, batch_size),
            header=header,
            buffers_before=self._moving.copy() if self._moving.num_values else [],
            batches=batches,
            model=self._workload.model,
            optimizer=self._workload.optimizer,
            forward=self._workload.forward,
            scale=precision.scale if precision.is_scaled else None,
            group=group,
            job_seed=state.config.seed,
            watch=self._watch,
            places=self._places,
            features=self._features,
            collect_requests=requests,
            metrics_began_s=self._workload.measures.spent_s,
        )
        for act in self._features.before_forward:
            act(step)
        return step

    def _update(self, step: Step) -> None:
        # Dividing by a weight of zero would make all weights NaN. All ranks have the same sum, so
        # all of them skip the update.
        step.is_updated = bool(step.means.weight)
        for act in self._features.before_update:
            act(step)
        if step.is_updated:
            step.is_updated = self._apply()

    def _apply(self) -> bool:
        """Update the weights; return False if gradients overflowed in fp16."""
        # If the optimizer raises midway, some weights have been updated. The old weights are not
        # copied, because a copy would need as much memory as the model. Instead, the rank drops its
        # state and receives another rank's.
        self.is_torn = True
        is_updated = self._workload.precision.step(self._workload.optimizer)
        shards = self._workload.shards
        if is_updated and not (shards is not None and shards.is_stale):
            self._follow()
        self.is_torn = False
        return is_updated

    def _follow(self) -> None:
        for act in self._features.after_update:
            act()

    def finish(self) -> None:
        """With ``shard``: finish the update once this rank has the weights of all shards."""
        shards = self._workload.shards
        if shards is not None and shards.is_stale:
            self.is_torn = True
            self._follow()
            self.is_torn = shards.is_stale = False

    def _commit(self, step: Step) -> None:
        # All counters change here, in the main thread, which also copies and sends the state: a
        # checkpoint has all counters from before the step or all from after it.
        state = self._state
        self._forget_gradients()
        state.step += 1
        state.weights_version += 1
        state.position_before = state.position
        state.position += step.span.samples
        state.is_eval_owed |= step.header.is_eval_requested
        for act in self._features.after_commit:
            act(step)
        self.in_step = False
        rank = step.group.rank
        self._places.faults.corrupt_weights(self._workload.model, rank=rank, step=state.step)

    def _undo(self, step: Step) -> None:
        # The weights and the optimizer have not changed yet (or are torn; see ``_apply``). But the
        # forward pass has changed the running buffers.
        if step.buffers_before:
            self._moving.put_back(step.buffers_before)
        self._forget_gradients()
        for act in self._features.undo:
            act(step)

    def _forget_gradients(self) -> None:
        self._workload.optimizer.zero_grad(set_to_none=True)
        # This includes parameters that the optimizer does not have. Otherwise, their gradients
        # would accumulate and count in the clipping norm on old ranks but not on new ranks, and the
        # ranks would diverge.
        self._workload.model.zero_grad(set_to_none=True)

    def _report(self, step: Step) -> None:
        now = time.perf_counter()
        # The lower bound avoids a division by zero, because two clock readings may be equal.
        step.elapsed_s, self._last_end = max(now - self._last_end, 1e-9), now
        step.times = self._watch.times()
        # On a GPU the metrics only queue their work, and waiting for it would slow the step down.
        if not self._is_cuda:
            step.metrics_s = self._workload.measures.spent_s - step.metrics_began_s
        for act in self._features.after_report:
            act(step)
        self._send(step.record())
        if not step.is_updated and step.group.rank == 0:
            why = "gradients overflowed in fp16"
            then = f"the loss scale is now {self._workload.precision.loss_scale:g}"
            if not step.means.weight:
                why, then = "weight is 0 for every batch", "its loss, a mean over nothing, is NaN"
            text = f"step {step.number}: {why}, so no rank updated its weights; {then}"
            self._send(TextLogged(level="info", text=text))

    # --- shard: optimizer ---

    def complete_prepared(self) -> None:
        """Commit the prepared step, because another rank has committed it."""
        assert self.prepared is not None
        step, self.prepared = self.prepared, None
        if step.is_updated:
            step.is_updated = self._apply()
        self._commit(step)
        self._report(step)

    def drop_prepared(self) -> None:
        """Undo the prepared step, if there is one."""
        if self.prepared is not None:
            step, self.prepared, self.in_step = self.prepared, None, False
            self._undo(step)
