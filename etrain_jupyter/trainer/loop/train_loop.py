"""Training loop of one rank: steps and evaluations, in one generation after another.

At the boundary between two steps, evaluations run, checkpoints start, and a planned change ends the
generation. The step itself is in ``trainer.step``.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.rules.membership.stimuli import Progress
from etrain_jupyter.rules.samples import ledger
from etrain_jupyter.rules.samples.block_order import BlockOrder
from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.trainer.boundary import NO_HOOKS, Boundary, BoundaryHooks
from etrain_jupyter.trainer.control.error_origin import device_error_in
from etrain_jupyter.trainer.control.faults import NO_FAULTS, FaultInjector, Places
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.data import Delivered, Indices, Share
from etrain_jupyter.trainer.feature import NonFiniteLoss, NonFiniteLossError, Step
from etrain_jupyter.trainer.features import SpeedShares, features_of
from etrain_jupyter.trainer.gradients.averaged import AveragedGradients
from etrain_jupyter.trainer.gradients.sharded import ShardedGradients
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from etrain_jupyter.trainer.loop.evaluations import Evaluations
from etrain_jupyter.trainer.loop.learning_rate import rates_of
from etrain_jupyter.trainer.micro_batch import OUT_OF_MEMORY, MicroBatch, largest_pass
from etrain_jupyter.trainer.rank_times import RankTimes
from etrain_jupyter.trainer.scoring.score_process import Scorer
from etrain_jupyter.trainer.seeds import seed_of
from etrain_jupyter.trainer.state.background_digest import BackgroundDigest
from etrain_jupyter.trainer.state.capture import named_tensors
from etrain_jupyter.trainer.state.packing import Tensors
from etrain_jupyter.trainer.state.parts import AVERAGE
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.state.train_state import Mark, TrainState
from etrain_jupyter.trainer.state.weight_fingerprint import check_ranks_agree
from etrain_jupyter.trainer.step import Gradients, StepTrainer
from etrain_jupyter.trainer.step_header import RequestFlags
from etrain_jupyter.trainer.warm_up import PassEffects, WarmUp
from etrain_jupyter.trainer.workload import Workload
from etrain_jupyter.wire.messages import TextLogged, WeightsFingerprinted
from etrain_jupyter.wire.progress_page import ProgressPage

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
        self.rates = rates_of(workload, config, plan)
        # The extras of the rates come before the tracker's. All extras are saved in this order,
        # which must stay the same for checkpoints to be comparable.
        workload.extras = {**workload.extras, **self.rates.extras, **state.best_tracker.extras}
        self.undone_loss: NonFiniteLoss | None = None
        """The non-finite loss that ended the last generation as ``nan``."""
        self._send = send
        self._shares = SampleShares(state, self.places)
        self.evaluations = Evaluations(
            state, micro=self.micro, send=send, places=self.places, scorer=scorer
        )
        self._digest = BackgroundDigest(self.places.beat, lambda text: self._log("warning", text))
        self._times = RankTimes(send, self.rates.noise_fields)
        self._speeds = SpeedShares() if config.batch.split == "auto" else None
        self._batch_size = plan.global_batch_size
        """Samples of a full step in this generation."""
        self._effects = PassEffects(RunningBuffers(), has_unused=False)
        self.steps = self._make_steps()

    def _make_steps(self) -> StepTrainer:
        features = features_of(
            self.workload,
            self.state.config,
            times=self._times,
            rates=self.rates,
            speeds=self._speeds,
            named=self._all_weights,
        )
        return StepTrainer(
            self.state,
            features,
            moving=self._effects.moving,
            places=self.places,
            send=self._send,
        )

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
        """Run trial passes and undo them, to find errors and to determine what a pass changes.

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
        self.steps = self._make_steps()
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
                watch=self.steps.watch,
            )
        return AveragedGradients(
            group,
            self.workload.module,
            moving=self._effects.moving,
            has_unused=self._effects.has_unused,
            global_batch_size=self._batch_size,
            micro_batch_size=self.micro.size,
            num_passes=config.batch.aggregation_frequency,
            watch=self.steps.watch,
            compression=config.compression,
            measures_noise=self.rates.measures_noise,
            by_speed=config.batch.split == "auto",
            norms=self.workload.norms,
        )

    def run(
        self, group: RankGroup, gradients: Gradients, hooks: BoundaryHooks = NO_HOOKS
    ) -> GenerationEnd:
        """Train until a planned change, the end of the job, or a non-finite loss.

        After ``nan``, the step has been undone on all ranks, and ``undone_loss`` contains the loss.

        Raises:
            CommunicationError: A peer was lost. The step in flight is undone.
            Exception: The notebook's code raised. The step in flight is undone.
        """
        is_device_broken = False
        self._begin(group)
        try:
            return self._run(group, gradients, hooks)
        except NonFiniteLossError as exc:
            # This is not a failure, because all ranks see the same sum, undo the same step, and
            # leave together.
            self.undone_loss, self.steps.in_step = exc.report, False
            return self._leave("nan")
        except Exception as exc:
            is_device_broken = device_error_in(exc) is not None
            if is_device_broken or not self.micro.shrink(exc):
                raise
            self._warn_of_memory(group.rank)
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
        self.steps.begin(group)
        if group.rank == 0 and not self.step and self.rates.warning:
            self._log("warning", self.rates.warning)

    def _warn_of_memory(self, rank: int) -> None:
        steps, where = self.steps, ""
        begun = f"step {self.step + 1}" if steps.in_step else f"the evaluation of step {self.step}"
        what = f"a new generation continues from step {self.step}, and nothing is lost"
        if steps.is_torn:
            where = ", in the update"
            what = "its weights are dropped and replaced by another rank's or a checkpoint's"
        self._log(
            "warning",
            f"rank {rank} ran out of memory in {begun}{where}: its micro-batches are reduced to "
            f"{self.micro.size}; {what}",
        )

    def _run(self, group: RankGroup, gradients: Gradients, hooks: BoundaryHooks) -> GenerationEnd:
        shares = self._shares.stream(group, gradients, batch_size=self._batch_size)
        batches = self.workload.train.batches(shares)

        def requests(step: Step) -> RequestFlags:
            return self._requests(step, hooks)

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
                # Each step compares only a part of the weights, as they were before its update.
                if group.world_size > 1:
                    check_ranks_agree(group, self._all_weights(), step=self.step)
                self._times.report()
                return self._leave("done")
            step = self.steps.train(
                group, gradients, batches, batch_size=self._batch_size, requests=requests
            )
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
        if self.evaluations.has_scores:
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
        if self._speeds is None or not (text := self._speeds.change(step, gradients.balance)):
            return batches
        if group.rank == 0:
            self._log("info", text)
        # The batches that were fetched ahead belong to the previous shares.
        return self.workload.train.batches(
            self._shares.stream(group, gradients, batch_size=self._batch_size)
        )

    def _requests(self, step: Step, hooks: BoundaryHooks) -> RequestFlags:
        """Return this rank's requests to all ranks, for the header of the step in progress."""
        is_rank_0 = step.group.rank == 0
        # The boundaries before and after the step, which is not committed yet.
        before = Mark(self.state.step, self.state.position)
        after = Mark(step.number, self.state.position + step.span.samples)
        # The decision depends on the sum of all headers, which is the same on all ranks. Any rank
        # may be the first to learn of a planned change, so each may request a stop. Only rank 0
        # makes the other requests: clocks differ between ranks, and only rank 0 knows how old the
        # newest checkpoint is.
        return RequestFlags(
            is_change_pending=self.change_pending.is_set(),
            is_eval_due=is_rank_0 and self.evaluations.every.is_time_over(time.monotonic()),
            is_save_due=is_rank_0 and hooks.wants_save(before, after),
        )

    def _leave(self, end: GenerationEnd) -> GenerationEnd:
        # The coordinator drops a digest that arrives after the generation has ended.
        self._digest.finish()
        return end

    # --- evaluation ---

    def _evaluate(self, group: RankGroup, hooks: BoundaryHooks) -> bool:
        # Returns False if a planned change interrupted it.
        started_at = time.perf_counter()
        is_complete = self.evaluations.run(group, is_pending=self.change_pending.is_set)
        self.steps.restart_clock()
        self._times.add_evaluation(time.perf_counter() - started_at)
        if not is_complete:
            return False
        # Early stopping makes this step the job's last, and the last step always gets a digest.
        is_over = self.state.best_tracker.is_over
        if is_over and not self.state.plan.is_boundary(self.state.position):
            self._report_digest(group)
        with self._times.checkpointing():
            hooks.after_eval(group)
        return True

    # --- reports ---

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


class SampleShares:
    """This rank's shares of the samples, in training order."""

    def __init__(self, state: TrainState, places: Places) -> None:
        self._state = state
        self._places = places
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))
        """An epoch and the order of its samples."""
        self._block_order: tuple[int, BlockOrder | None] = (-1, None)
        """An epoch and the order of its samples in blocks."""

    def stream(self, group: RankGroup, gradients: Gradients, *, batch_size: int) -> Iterator[Share]:
        """Yield every micro-batch of this rank, from the current step to the end of the job."""
        # Loader processes read ahead of the loop, so the stream computes its own position. Samples
        # read ahead are dropped with the generation, and the next generation starts a new stream
        # from the committed position.
        #
        #     committed     step 7
        #     stream        step 8 (in progress), 9, 10 (prefetched)
        #     after abort   step 8 again, from the next generation's stream
        state = self._state
        position = state.position
        for step in itertools.count(state.step + 1):
            # Otherwise, loader processes would prefetch samples that no step trains on.
            if position >= state.plan.end:
                return
            span = state.plan.span(position, batch_size)
            position += span.samples
            samples = self._samples_of(span, gradients)
            for part in gradients.parts(span):
                indices = samples[part.samples.start : part.samples.stop]
                # Seeded by the step and the shard or rank, not by the fetching process, so that a
                # step repeated after a fault gets the same random augmentations.
                yield Share(
                    self._places.faults.corrupt_indices(indices, rank=group.rank, step=step),
                    seed_of(state.config.seed, "train", step, part.stream, part.number),
                    job_seed=state.config.seed,
                    epoch=span.epoch,
                )

    def trial_order(self) -> Indices:
        """Return samples for trial passes, in the order in which to use them."""
        # With blocks, the first samples of an epoch are spread over all blocks of a window, and
        # each rank would read these blocks for its trial. The first rows of the set are in one
        # block.
        if self._state.plan.layout is not None:
            return range(self._state.plan.num_train)
        return self._epoch_order(0)

    def _samples_of(self, span: StepRange, gradients: Gradients) -> NDArray[np.int64]:
        # Returns the samples of a step in the order of its shares.
        if self._state.plan.layout is None:
            return self._epoch_order(span.epoch)[span.first : span.first + span.samples]
        # Sort by block, so that each share needs few blocks. With ``reproducible``, each shard is
        # one share, so the order does not depend on the number of ranks.
        return self._order_of_blocks(span.epoch).arrange(span.first, gradients.counts(span))

    def _order_of_blocks(self, epoch: int) -> BlockOrder:
        known, order = self._block_order
        if order is None or known != epoch:
            assert self._state.plan.layout is not None
            order = BlockOrder(self._state.plan.layout, seed=self._state.config.seed, epoch=epoch)
            self._block_order = (epoch, order)
        return order

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        # Cached; shape ``(num_train,)``.
        if self._order[0] != epoch:
            order = ledger.epoch_order(
                seed=self._state.config.seed, epoch=epoch, num_samples=self._state.plan.num_train
            )
            self._order = (epoch, order)
        return self._order[1]
