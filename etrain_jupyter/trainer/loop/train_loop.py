"""Training loop of one rank: gradients, one update, and the record of each step.

The life of a step on each rank::

    forward, backward     gradients and the step header are summed over all ranks
    wait for both sums    a lost peer or a non-finite loss undoes the step, on all ranks alike
    update                the only commit point: counters advance, the record is sent
    boundary              checkpoints start, a planned change ends the generation
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from etrain_jupyter.rules.membership.stimuli import Progress
from etrain_jupyter.rules.samples.balance import SampleCost
from etrain_jupyter.trainer.boundary import NO_HOOKS, Boundary, BoundaryHooks
from etrain_jupyter.trainer.control.error_origin import device_error_in
from etrain_jupyter.trainer.control.faults import NO_FAULTS, FaultInjector, Places
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.data import Delivered
from etrain_jupyter.trainer.gradients.averaged import AveragedGradients
from etrain_jupyter.trainer.gradients.sharded import ShardedGradients
from etrain_jupyter.trainer.gradients.step import Gradients, Step
from etrain_jupyter.trainer.gradients.step_header import StepHeader
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.cuda_buckets import copies_for
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from etrain_jupyter.trainer.loop.evaluations import Evaluations
from etrain_jupyter.trainer.loop.rank_times import RankTimes
from etrain_jupyter.trainer.loop.sample_shares import SampleShares
from etrain_jupyter.trainer.loop.step_records import (
    StepRequests,
    out_of_memory_message,
    shares_message,
    skip_message,
    step_record,
)
from etrain_jupyter.trainer.loop.update import NonFiniteLoss, NonFiniteLossError, Update, check_loss
from etrain_jupyter.trainer.micro_batch import MicroBatch, largest_pass
from etrain_jupyter.trainer.objective.measures import Means
from etrain_jupyter.trainer.scoring.score_process import Scorer
from etrain_jupyter.trainer.state.background_digest import BackgroundDigest
from etrain_jupyter.trainer.state.capture import named_tensors
from etrain_jupyter.trainer.state.packing import Tensors
from etrain_jupyter.trainer.state.parts import AVERAGE
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.state.train_state import TrainState
from etrain_jupyter.trainer.state.weight_fingerprint import WeightFingerprint, check_ranks_agree
from etrain_jupyter.trainer.warm_up import PassEffects, WarmUp
from etrain_jupyter.trainer.workload import Workload
from etrain_jupyter.wire.messages import TextLogged, WeightsFingerprinted
from etrain_jupyter.wire.progress_page import ProgressPage

OUT_OF_MEMORY = "out of memory"
"""Failure of a generation in which a rank ran out of device memory."""


class PreparedStep(NamedTuple):
    """A step with complete gradients, whose update this rank must not make by itself.

    With ``shard: optimizer``, the next generation decides whether the step counts.
    """

    step: Step
    means: Means
    has_update: bool
    """False if all ranks skip the update."""


GenerationEnd = Literal["planned", "done", "nan"]
"""Ways in which a generation can end without failing: ``planned`` for a planned change, ``done`` if
nothing is left to train, ``nan`` if the loss of a step was not finite."""


class TrainLoop:
    """Train a job according to its plan, one generation after another.

    Args:
        page: Progress page that the supervisor reads; None if there is no supervisor.
        change_pending: Set by the control thread when it learns of a planned change. The next step
            header or evaluation batch carries the flag to all ranks, which stop at the same
            boundary.
        scorer: Runs ``eval.score``; None if the job has none.
    """

    def __init__(
        self,
        state: TrainState,
        send: Send,
        *,
        faults: FaultInjector = NO_FAULTS,
        page: ProgressPage | None = None,
        change_pending: threading.Event | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        workload, config, plan = state.workload, state.config, state.plan
        self.state = state
        self.change_pending = change_pending or threading.Event()
        self.places = Places(faults, page)
        self.micro = MicroBatch(
            config.batch, largest_pass(config.batch, plan.span(0, plan.global_batch_size).samples)
        )
        """Number of samples per pass on this rank."""
        # ``Update`` adds its extras before the tracker's: they are saved in this order, which must
        # stay the same for checkpoints to be comparable.
        self.update = Update(workload, config, plan)
        workload.extras = {**workload.extras, **state.best_tracker.extras}
        self.in_step = False
        """True while a step has begun but is not committed."""
        self.prepared: PreparedStep | None = None
        """The step in flight if the generation failed while the ranks agreed on its update."""
        self.undone_loss: NonFiniteLoss | None = None
        """The loss that made the last generation end as ``nan``."""
        self._send = send
        self._shares = SampleShares(state, self.places)
        self.evaluations = Evaluations(
            state, micro=self.micro, send=send, places=self.places, scorer=scorer
        )
        self._effects = PassEffects(RunningBuffers(), has_unused=False)
        self._fingerprint = WeightFingerprint(workload.model)
        self._digest = BackgroundDigest(self.places.beat, lambda text: self._log("warning", text))
        self._watch = Stopwatch(workload.device)
        self._times = RankTimes(send, self.update.rates.noise_fields)
        self._committed_at = 0.0
        """End of the last step or evaluation, as a ``time.perf_counter`` value."""
        self._communication_s = 0.0
        """Exposed communication of the previous step in this generation."""
        self._splits_by_speed = self.state.config.batch.split == "auto"
        self._cost = SampleCost()
        self._metrics_began_s = 0.0
        """``measures.spent_s`` at the beginning of the step: evaluations use the metrics, too."""
        self._batch_size = plan.global_batch_size
        """Samples of a full step in this generation."""

    @property
    def workload(self) -> Workload:
        """Model, optimizer, data and loss."""
        return self.state.workload

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self.state.step

    @property
    def progress(self) -> Progress:
        """Numbers of committed steps and completed evaluations."""
        return self.state.progress

    def close(self) -> None:
        """Stop all processes of this job on this rank."""
        self.evaluations.close()
        self.workload.close()

    # --- before the first generation ---

    def warm_up(self, *, is_first: bool = False) -> None:
        """Make trial passes and undo them, to find errors and to determine what a pass changes.

        Args:
            is_first: True for the job's first trainer, which logs the warnings.

        Raises:
            Exception: Any error that the notebook's code raises on its own data.
        """
        self._effects = WarmUp(
            self.workload,
            self.state.config,
            self.state.plan,
            micro=self.micro,
            order=self._shares.trial_order(),
            send=self._send,
            beat=self.places.beat,
            is_first=is_first,
        ).run()
        if self.workload.average is not None:
            self.workload.average.follow_buffers(self._effects.moving)
        self._fingerprint = WeightFingerprint(self.workload.model, self._averages().values())
        self.evaluations.check_names()

    # --- one generation ---

    def wrap(self, group: RankGroup) -> Gradients:
        """Return sharded gradients for a ``reproducible`` job; otherwise averaged gradients.

        Raises:
            ConfigError: If some rank would have nothing to do.
        """
        # With ``batch.per_worker`` the batch grows with the number of ranks.
        self._batch_size = self.state.config.batch.size(group.world_size)
        # This is not done in the exception handler in ``run``, because there the exception still
        # keeps the frames of the failed pass alive, and with them its tensors.
        self.micro.free_failed_pass()
        config, num_shards = self.state.config, self.state.config.num_shards()
        if num_shards is not None:  # ``reproducible``
            return ShardedGradients(
                group,
                self.workload.module,
                moving=self._effects.moving,
                num_shards=num_shards,
                global_batch_size=self._batch_size,
                micro_batch_size=self.micro.size,
                num_passes=config.batch.aggregation_frequency,
                watch=self._watch,
            )
        return AveragedGradients(
            group,
            self.workload.module,
            moving=self._effects.moving,
            has_unused=self._effects.has_unused,
            global_batch_size=self._batch_size,
            micro_batch_size=self.micro.size,
            num_passes=config.batch.aggregation_frequency,
            watch=self._watch,
            compression=config.compression,
            measures_noise=self.update.rates.measures_noise,
            by_speed=config.batch.split == "auto",
            norms=self.workload.norms,
        )

    def run(
        self, group: RankGroup, gradients: Gradients, hooks: BoundaryHooks = NO_HOOKS
    ) -> GenerationEnd:
        """Train until a planned change, the end of the job, or a non-finite loss.

        After ``nan``, the step has been undone on all ranks, and ``undone_loss`` has the loss.

        Raises:
            CommunicationError: A peer was lost. The step in flight is undone.
            Exception: The notebook's code raised. The step in flight is undone.
        """
        is_device_broken = False
        self._begin(group)
        try:
            return self._run(group, gradients, hooks)
        except NonFiniteLossError as exc:
            # This is not a failure: all ranks see the same sum, undo the same step, and leave
            # together.
            self.undone_loss, self.in_step = exc.report, False
            return self._leave("nan")
        except Exception as exc:
            is_device_broken = device_error_in(exc) is not None
            if is_device_broken or not self.micro.shrink(exc):
                raise
            text = out_of_memory_message(
                self.step,
                rank=group.rank,
                size=self.micro.size,
                in_step=self.in_step,
                is_torn=self.update.is_torn,
            )
            self._log("warning", text)
            # Memory ran out on this rank, and its micro-batches are smaller now. The step cannot be
            # repeated within the generation, because the other ranks are inside its collectives:
            #
            #     this rank   out of memory ── abort ── left (excused) ─┐
            #     others      waiting in all_reduce ── failed ── left ──┴─ next generation
            group.abort(OUT_OF_MEMORY)
            raise CommunicationError(OUT_OF_MEMORY) from None
        finally:
            # After a CUDA error every further call fails, and would hide the first error.
            if not is_device_broken:
                gradients.close()

    def _begin(self, group: RankGroup) -> None:
        self._committed_at = time.perf_counter()
        # Ranks that have just joined have no previous step, so the first step reports no wait.
        self._communication_s = 0.0
        self._cost.begin()
        self._times.begin(group)
        if group.rank == 0 and not self.step and self.update.rates.warning:
            self._log("warning", self.update.rates.warning)

    def _run(self, group: RankGroup, gradients: Gradients, hooks: BoundaryHooks) -> GenerationEnd:
        shares = self._shares.stream(group, gradients, batch_size=self._batch_size)
        batches = self.workload.train.batches(shares)
        requests = StepRequests(
            state=self.state,
            change_pending=self.change_pending,
            evaluations=self.evaluations,
            hooks=hooks,
        )
        if not self._resume_evaluation(group, hooks):
            return self._leave("planned")
        while True:
            # Evaluate before checking for the end, because the final state is evaluated, too.
            # Evaluate before the step, because an evaluation that the previous generation did not
            # finish is due now.
            if self.evaluations.is_due() and not self._evaluate(group, hooks):
                return self._leave("planned")
            if self.state.is_done:
                # The result of the job includes the scores of its last evaluation.
                if not self.evaluations.collect(group, is_pending=self.change_pending.is_set):
                    return self._leave("planned")
                # Each step compares only a part of the weights, from before its update.
                if group.world_size > 1:
                    check_ranks_agree(group, self._all_weights(), step=self.step)
                self._times.report()
                return self._leave("done")
            step = self._train_step(group, gradients, batches, requests)
            self._end_step(group, step, hooks)
            # Use the sum of all headers, not this rank's own flag, which may have been set in the
            # meantime. This ensures that all ranks leave after the same step.
            if step.header.is_pending:
                return self._leave("planned")
            batches = self._rebalance(group, gradients, step, batches)

    def _resume_evaluation(self, group: RankGroup, hooks: BoundaryHooks) -> bool:
        # Returns False if a planned change interrupted it.
        if not self.evaluations.resume(group, is_pending=self.change_pending.is_set):
            return False
        # The rank 0 that evaluated this state may have died before it reported the result or
        # saved the weights as the best ones. Both are repeated if necessary.
        if group.rank == 0:
            self.evaluations.report(group.generation)
        if self.step and self.step == self.state.evaluated_step:
            with self._times.checkpointing():
                hooks.after_eval(group)
        return True

    def _end_step(self, group: RankGroup, step: Step, hooks: BoundaryHooks) -> None:
        self.evaluations.poll(group)
        epoch_ends = self.state.plan.is_boundary(self.state.position)
        # The end of an epoch or of the job is the same step on all ranks, so their digests can be
        # compared. The weights are copied before the next step changes them.
        if epoch_ends:
            self._report_digest(group)
        boundary = Boundary(
            group=group,
            step_s=self._times.last_step_s,
            is_save_agreed=step.header.is_save_requested,
        )
        with self._times.checkpointing():
            hooks.after_step(boundary)
        if step.header.is_pending or self._times.is_due(epoch_ends=epoch_ends):
            self._times.report()

    def _rebalance(
        self, group: RankGroup, gradients: Gradients, step: Step, batches: Iterator[Delivered]
    ) -> Iterator[Delivered]:
        if not gradients.rebalance(step):
            return batches
        self._cost.begin()
        if group.rank == 0:
            span = self.state.plan.span(0, self._batch_size)
            self._log("info", shares_message(self.step, gradients.counts(span), step.header))
        # The batches that were fetched ahead are those of the previous shares.
        return self.workload.train.batches(
            self._shares.stream(group, gradients, batch_size=self._batch_size)
        )

    def _leave(self, end: GenerationEnd) -> GenerationEnd:
        # The coordinator drops a digest that arrives after the generation has ended.
        self._digest.finish()
        return end

    # --- one step ---

    def _train_step(
        self,
        group: RankGroup,
        gradients: Gradients,
        batches: Iterator[Delivered],
        requests: StepRequests,
    ) -> Step:
        # A rank either commits a step or undoes it. If a peer dies while the sums complete, the
        # survivors may differ by one step. The next generation starts from the newest state, which
        # is sent to the ranks that are behind:
        #
        #     rank 0   sums complete ── update ── commit 8 ── reports 8
        #     rank 1   sums complete ── update ── commit 8
        #     rank 2   lost a peer before its sums were complete ── undo, stays at 7 ── behind
        self._watch.begin()
        self._metrics_began_s = self.workload.measures.spent_s
        step = self._begin_step(group, gradients, batches, requests)
        self.in_step = True
        try:
            gradients.compute(step)
            self._watch.gradients_are_summed()
            # Both are the same on all ranks, because the header is a sum.
            if not step.header.ranks_agree:
                check_ranks_agree(group, self._all_weights(), step=self.step, is_known=True)
            check_loss(step)
            step.reach("commit")
            means = self.workload.measures.means(step.header.means())
            with self._watch.updating():
                is_updated = self._update(step, means)
        except BaseException as exc:
            # After a CUDA error, every copy on the device would raise and hide the first error. The
            # process exits anyway, so the step need not be undone.
            if device_error_in(exc) is None and self.prepared is None:
                self._undo(step)
            raise
        # From here on, nothing may raise an exception before the step is reported: the weights have
        # changed, so the counters must be updated.
        self._commit(step, means.weight)
        try:
            with self._watch.updating():
                shards = self.workload.shards
                if shards is not None and shards.is_stale:
                    step.reach("updated")
                    shards.finish(step.group)
                    self.update.finish()
        finally:
            self._report_step(step, means, is_skipped=not is_updated)
        return step

    def _update(self, step: Step, means: Means) -> bool:
        has_update = self.update.prepare(step, position=self.state.position, weight=means.weight)
        shards = self.workload.shards
        if shards is not None and step.group.world_size > 1:
            # No rank updates its shards before all ranks can. Otherwise, a rank could be the only
            # one that has updated, and die or be alone with two of the shards:
            #
            #     rank 0   gradients complete ── agreed ── update
            #     rank 1   gradients complete ── agreed ── update
            #     rank 2   gradients complete ── lost a peer: may update once it knows that rank 0
            #              or rank 1 has, see ``shard_sync``
            step.reach("agree")
            try:
                step.group.all_reduce(torch.zeros(1)).wait()
            except CommunicationError:
                self.prepared = PreparedStep(step, means, has_update)
                raise
            step.reach("agreed")
        return has_update and self.update.apply()

    def complete_prepared(self) -> None:
        """Commit the step that is prepared: another rank has committed it."""
        assert self.prepared is not None
        step, means, has_update = self.prepared
        self.prepared = None
        is_updated = has_update and self.update.apply()
        self._commit(step, means.weight)
        self._report_step(step, means, is_skipped=not is_updated)

    def drop_prepared(self) -> None:
        """Undo the step that is prepared, if there is one."""
        if self.prepared is not None:
            step, self.prepared, self.in_step = self.prepared.step, None, False
            self._undo(step)

    def _begin_step(
        self,
        group: RankGroup,
        gradients: Gradients,
        batches: Iterator[Delivered],
        requests: StepRequests,
    ) -> Step:
        header = StepHeader(
            num_means=self.workload.measures.num_columns,
            num_slots=gradients.num_slots,
            merges=gradients.merges,
            num_ranks=group.world_size,
            communication_s=self._communication_s,
            cost=self._cost if self._splits_by_speed else None,
            copies=copies_for(self.workload.device) if gradients.overlaps_device else None,
        )
        # The fingerprint costs a pass over a slice of the weights, and a single rank has no peer to
        # compare its weights with.
        has_peers = group.world_size > 1
        return Step(
            number=self.step + 1,
            span=self.state.plan.span(self.state.position, self._batch_size),
            header=header,
            buffers_before=self._effects.moving.copy(),
            batches=batches,
            workload=self.workload,
            group=group,
            job_seed=self.state.config.seed,
            watch=self._watch,
            places=self.places,
            requests=requests,
            fingerprint=self._fingerprint.at(self.step) if has_peers else torch.zeros(()),
        )

    def _commit(self, step: Step, weight: float) -> None:
        # All counters change here, in the main thread, which also copies and sends the state: a
        # checkpoint has all counters from before the step or all from after it.
        state = self.state
        self._forget_gradients()
        self.update.commit(weight)
        state.step += 1
        state.weights_version += 1
        state.position_before = state.position
        state.position += step.span.samples
        state.is_eval_owed |= step.header.is_eval_requested
        self.in_step = False
        rank = step.group.rank
        self.places.faults.corrupt_weights(self.workload.model, rank=rank, step=state.step)

    def _undo(self, step: Step) -> None:
        # The weights and the optimizer have not changed yet (or are torn, see ``Update``). But the
        # forward pass has changed the running buffers, and ``unscale`` has changed the fp16 scaler.
        self._effects.moving.put_back(step.buffers_before)
        self._forget_gradients()
        self.workload.precision.undo()

    def _forget_gradients(self) -> None:
        self.workload.optimizer.zero_grad(set_to_none=True)
        # This includes parameters that the optimizer does not have. Otherwise, their gradients
        # would accumulate and count in the clipping norm on old ranks but not on new ranks, and the
        # ranks would diverge.
        self.workload.model.zero_grad(set_to_none=True)

    # --- evaluation ---

    def _evaluate(self, group: RankGroup, hooks: BoundaryHooks) -> bool:
        # Returns False if a planned change interrupted it.
        started_at = time.perf_counter()
        is_complete = self.evaluations.run(group, is_pending=self.change_pending.is_set)
        self._committed_at = time.perf_counter()
        self._times.add_evaluation(self._committed_at - started_at)
        if not is_complete:
            return False
        # Early stopping makes this step the last one of the job, which always has a digest.
        is_over = self.state.best_tracker.is_over
        if is_over and not self.state.plan.is_boundary(self.state.position):
            self._report_digest(group)
        with self._times.checkpointing():
            hooks.after_eval(group)
        return True

    # --- reports ---

    def _report_step(self, step: Step, means: Means, *, is_skipped: bool) -> None:
        now, times = time.perf_counter(), self._watch.times()
        # The lower bound avoids a division by zero, because two clock readings may be equal.
        elapsed_s = max(now - self._committed_at, 1e-9)
        self._committed_at = now
        self._times.add_step(
            self.step,
            times,
            samples=step.num_own,
            elapsed_s=elapsed_s,
            wait_s=step.header.wait_s,
            metrics_s=self._take_metrics_s(),
        )
        self._communication_s = times.communication_s
        if self._splits_by_speed:
            self._cost.add(times.data_s + times.compute_s + times.optimizer_s, step.num_own)
        record = step_record(
            step,
            means,
            lr=float(self.workload.optimizer.param_groups[0]["lr"]),
            elapsed_s=elapsed_s,
            times=times,
            is_skipped=is_skipped,
        )
        self._send(record)
        if is_skipped and step.group.rank == 0:
            self._log("info", skip_message(self.step, means, self.workload.precision.loss_scale))

    def _take_metrics_s(self) -> float | None:
        # On a GPU the functions only queue their work, and waiting for it would slow the step down.
        if torch.device(self.workload.device).type == "cuda":
            return None
        return self.workload.measures.spent_s - self._metrics_began_s

    def _report_digest(self, group: RankGroup) -> None:
        # The thread calls ``send`` during a later step, so read the numbers now.
        generation, step, rank = group.generation, self.step, group.rank

        def send(digest: str) -> None:
            self._send(
                WeightsFingerprinted(generation=generation, step=step, rank=rank, digest=digest)
            )

        self._digest.begin(self.workload.model, send, others=self._averages())

    def _all_weights(self) -> Tensors:
        return {**named_tensors(self.workload.model), **self._averages()}

    def _averages(self) -> Tensors:
        average = self.workload.average
        if average is None:
            return {}
        return {f"{AVERAGE}.{name}": tensor for name, tensor in average.tensors.items()}

    def _log(self, level: str, text: str) -> None:
        self._send(TextLogged(level=level, text=text))
