"""The step: gradients, one update, and what is told of it. The only commit point."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.rules.membership.stimuli import Progress
from etrain_jupyter.rules.samples import ledger
from etrain_jupyter.trainer.control.device_errors import device_error_in
from etrain_jupyter.trainer.control.faults import NO_FAULTS, Faults
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.data import Delivered, Share
from etrain_jupyter.trainer.gradients.averaged import AveragedGradients
from etrain_jupyter.trainer.gradients.sharded import ShardedGradients
from etrain_jupyter.trainer.gradients.step import Gradients, Step
from etrain_jupyter.trainer.gradients.step_header import StepHeader
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from etrain_jupyter.trainer.loop.best_tracker import Judge
from etrain_jupyter.trainer.loop.evaluation import Evaluation, EvaluationResult
from etrain_jupyter.trainer.loop.nan_loss import NonFiniteLoss, NonFiniteLossError, check_loss
from etrain_jupyter.trainer.loop.rank_times import RankTimes
from etrain_jupyter.trainer.loop.schedule import Every, Mark, WorkPlan
from etrain_jupyter.trainer.loop.step_records import step_record, words_of_shrinking, words_of_skip
from etrain_jupyter.trainer.loop.update import Update
from etrain_jupyter.trainer.micro_batch import MicroBatch, largest_pass
from etrain_jupyter.trainer.objective.measures import Means
from etrain_jupyter.trainer.seeds import seed_of
from etrain_jupyter.trainer.state.background_digest import BackgroundDigest
from etrain_jupyter.trainer.state.running_buffers import MovingBuffers
from etrain_jupyter.trainer.state.weight_fingerprint import WeightsPrint
from etrain_jupyter.trainer.warm_up import WarmUp
from etrain_jupyter.trainer.workload import Workload
from etrain_jupyter.wire.messages import (
    BestFound,
    EvalFinished,
    TextLogged,
    WeightsFingerprinted,
    Why,
)
from etrain_jupyter.wire.progress_page import ProgressPage

OUT_OF_MEMORY = "out of memory"

_COUNTERS = (
    "step",
    "position",
    "position_before",
    "num_evals",
    "evaluated_step",
    "is_eval_asked",
    "weight_exponent",
)


class TrainLoop:
    """Steps a workload through its plan, generation after generation."""

    def __init__(self, workload: Workload, config: TrainConfig, plan: WorkPlan, send: Send) -> None:
        self.workload = workload
        self.config = config
        self.plan = plan
        self.step = 0
        self.position = 0
        """Samples trained so far, over all epochs."""
        self.position_before = 0
        """The same before the last step."""
        self.num_evals = 0
        self.evaluated_step = 0
        """The step whose weights were evaluated last."""
        self.is_eval_asked = 0
        """1 if rank 0's clock has asked for an evaluation that was not made yet."""
        self.change_pending = threading.Event()
        """Set by the control thread; carried to all ranks by the next step or evaluation batch."""
        self.in_step = False
        """Whether a step has been begun and not committed."""
        self.faults: Faults = NO_FAULTS
        """What this trainer has to do to itself, and where."""
        self.page: ProgressPage | None = None
        """Where the supervisor looks for signs of life."""
        self._send = send
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))
        self._moving = MovingBuffers()
        self._has_unused = False
        self.micro = MicroBatch(
            config.batch, largest_pass(config.batch, plan.span(0, plan.global_batch_size).samples)
        )
        """How many samples this rank passes at once."""
        self._evaluation = Evaluation(workload, config, plan, self.micro)
        self.update = Update(workload, config, plan)
        self.judge = Judge(config)
        workload.extras = {**workload.extras, **self.judge.extras}
        self._print = WeightsPrint(workload.model)
        self._digest = BackgroundDigest(self._beat, lambda text: self._log("warning", text))
        self._eval_every = Every(config.eval_every, plan)
        self._committed_at = 0.0
        self._watch = Stopwatch(workload.device)
        self._times = RankTimes(send)
        self._batch_size = plan.global_batch_size
        """Samples of a full step in this generation."""
        self.after_step: list[Callable[[RankGroup], None]] = []
        """Called at each step boundary, for example to save a checkpoint."""
        self.after_eval: list[Callable[[RankGroup], None]] = []
        """Called after each evaluation, and where a generation goes on from an evaluated step."""
        self.asks_save: Callable[[Mark, Mark], bool] = lambda before, after: False
        """Asked on rank 0, in a step: whether all ranks shall take part in a checkpoint of what it
        leads to."""
        self.is_save_agreed = False
        """Whether all ranks know that they do."""
        self._eval_record: dict[str, Any] | None = None
        """What the last evaluation of this trainer gave; every rank keeps it, rank 0 tells it."""
        self.undone_loss: NonFiniteLoss | None = None
        """Why the last generation ended, if it was for that."""

    def counters(self) -> dict[str, int]:
        """Return what belongs to the state besides weights and optimizer."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def set_counters(self, counters: dict[str, int]) -> None:
        """Take over another trainer's ``counters``."""
        for name, value in counters.items():
            setattr(self, name, int(value))

    @property
    def weight_exponent(self) -> int:
        """The unit that ``weight`` is counted in; 0 without one."""
        return self.workload.weight.exponent if self.workload.weight is not None else 0

    @weight_exponent.setter
    def weight_exponent(self, value: int) -> None:
        if self.workload.weight is not None:
            self.workload.weight.exponent = value

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train."""
        return self.position >= self.plan.end or self.judge.is_over

    @property
    def marks(self) -> tuple[Mark, Mark]:
        """Where the job stood before its last step, and where it stands."""
        return Mark(self.step - 1, self.position_before), Mark(self.step, self.position)

    @property
    def last_step_s(self) -> float:
        """How long the last step took, without what was saved or evaluated before it."""
        return self._times.last_step_s

    @property
    def progress(self) -> Progress:
        """Committed steps and evaluations done."""
        return (self.step, self.num_evals)

    # --- one generation ---

    def wrap(self, group: RankGroup) -> Gradients:
        """Return how this generation's ranks compute gradients.

        Raises:
            ConfigError: If some rank would have nothing to do.
        """
        num_shards = self.config.num_shards()
        batch, module = self.config.batch, self.workload.module
        self._batch_size = batch.size(group.world_size)
        self.micro.tidy_up()
        if num_shards is not None:
            return ShardedGradients(
                group,
                module,
                moving=self._moving,
                num_shards=num_shards,
                global_batch_size=self._batch_size,
                micro_batch_size=self.micro.size,
                num_passes=batch.aggregation_frequency,
                watch=self._watch,
            )
        return AveragedGradients(
            group,
            module,
            moving=self._moving,
            has_unused=self._has_unused,
            global_batch_size=self._batch_size,
            micro_batch_size=self.micro.size,
            num_passes=batch.aggregation_frequency,
            watch=self._watch,
            compression=self.config.compression,
            measures_noise=self.update.rates.measures_noise,
        )

    def run(self, group: RankGroup, gradients: Gradients) -> Why:
        """Step until a change is pending (``planned``) or nothing is left (``done``).

        Returns:
            Which of them; or ``nan``, if the loss of a step was not finite. That step is undone on
            all ranks, and ``undone_loss`` says more.

        Raises:
            CommunicationError: A peer is lost. The step in flight is undone.
            Exception: The notebook's code raised. The step in flight is undone.
        """
        batches = self.workload.train.batches(self._shares(group, gradients))
        self._committed_at = time.perf_counter()
        self._times.begin(group)
        is_device_broken = False
        if group.rank == 0 and not self.step and self.update.rates.warning:
            self._log("warning", self.update.rates.warning)
        try:
            # Whoever had evaluated this state may have died before it could say or save it.
            if group.rank == 0:
                self.tell_evaluations(group.generation)
            if self.step and self.step == self.evaluated_step:
                self._call(self.after_eval, group)
            while True:
                if self._is_eval_due() and not self._evaluate(group):
                    return self._leave("planned")
                if self.is_done:
                    self._times.tell()
                    return self._leave("done")
                is_pending = self._train_step(group, gradients, batches)
                self._end_step(group, is_pending=is_pending)
                if is_pending:
                    return self._leave("planned")
        except NonFiniteLossError as exc:
            self.undone_loss, self.in_step = exc.told, False
            return self._leave("nan")
        except Exception as exc:
            is_device_broken = device_error_in(exc) is not None
            if is_device_broken or not self.micro.give_way(exc):
                raise
            text = words_of_shrinking(
                self.step,
                rank=group.rank,
                size=self.micro.size,
                in_step=self.in_step,
                is_torn=self.update.is_torn,
            )
            self._log("warning", text)
            group.abort(OUT_OF_MEMORY)  # the others wait for this rank's part of the step
            raise CommunicationError(OUT_OF_MEMORY) from None
        finally:
            if not is_device_broken:
                gradients.close()

    def _end_step(self, group: RankGroup, *, is_pending: bool) -> None:
        is_boundary = self.plan.is_boundary(self.position)
        if is_boundary:
            self._tell_digest(group)
        self._call(self.after_step, group)
        if is_pending or self._times.is_due(epoch_ends=is_boundary):
            self._times.tell()

    def _call(self, calls: list[Callable[[RankGroup], None]], group: RankGroup) -> None:
        """Do what is to be done at a boundary; its time counts as that of checkpoints."""
        started = time.perf_counter()
        for call in calls:
            call(group)
        self._times.add_checkpoint(time.perf_counter() - started)

    def _shares(self, group: RankGroup, gradients: Gradients) -> Iterator[Share]:
        """Yield every part of this rank's steps, from the present step on."""
        position, end = self.position, self.plan.end
        for step in itertools.count(self.step + 1):
            if position >= end:
                return
            span = self.plan.span(position, self._batch_size)
            position += span.samples
            order = self._order_of(span.epoch)
            for part in gradients.parts(span):
                first = span.first + part.samples.start
                indices = order[first : first + len(part.samples)]
                yield Share(
                    self.faults.spoil_indices(indices, rank=group.rank, step=step),
                    seed_of(self.config.seed, "train", step, part.stream, part.number),
                )

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            order = ledger.epoch_order(
                seed=self.config.seed, epoch=epoch, num_samples=self.plan.num_train
            )
            self._order = (epoch, order)
        return self._order[1]

    def _at(self, place: str, group: RankGroup) -> None:
        """Come to a place of the step that is being made: a sign of life, and room for a fault."""
        self._come_to(place, group, step=self.step + 1, phase="computing")

    def _come_to(self, place: str, group: RankGroup, *, step: int, phase: str) -> None:
        if self.page is not None:
            self.page.beat(step=step, phase=phase)
        self.faults.at(place, rank=group.rank, step=step)

    # --- one step ---

    def _train_step(
        self, group: RankGroup, gradients: Gradients, batches: Iterator[Delivered]
    ) -> bool:
        self._watch.begin()
        step = self._begin_step(group, gradients, batches)
        self.in_step = True
        try:
            gradients.compute(step)
            self._watch.gradients_are_summed()
            check_loss(step)
            self._at("commit", group)
            means = self.workload.measures.means(step.header.means())
            with self._watch.updating():
                is_updated = self.update.make(step, position=self.position, weight=means.weight)
        except BaseException as exc:
            if device_error_in(exc) is None:  # else nothing can be copied any more
                self._undo(step)
            raise
        model = self.workload.model
        self._forget_gradients()
        self.update.commit(means.weight)
        self.step += 1
        self.position_before = self.position
        self.position += step.span.samples
        self.is_eval_asked |= step.header.is_eval_asked
        self.is_save_agreed = step.header.is_save_asked
        self.in_step = False
        self.faults.spoil_weights(model, rank=group.rank, step=self.step)
        self._tell_step(step, means, is_skipped=not is_updated)
        return step.header.is_pending

    def _begin_step(
        self, group: RankGroup, gradients: Gradients, batches: Iterator[Delivered]
    ) -> Step:
        header = StepHeader(
            num_means=self.workload.measures.num_columns,
            num_slots=gradients.num_slots,
            merges=gradients.merges,
        )
        # Alone, there is nobody to differ from.
        weights_print = self._print.at(self.step) if group.world_size > 1 else torch.zeros(())

        span = self.plan.span(self.position, self._batch_size)

        def start_header() -> None:
            self._at("all_reduce", group)
            if self.faults.spoils_loss(rank=group.rank, step=self.step + 1):
                header.spoil_loss()
            here = Mark(self.step, self.position)
            there = Mark(self.step + 1, self.position + span.samples)
            header.start(
                group,
                is_pending=self.change_pending.is_set(),
                is_eval_asked=group.rank == 0 and self._eval_every.is_time_over(),
                is_save_asked=group.rank == 0 and self.asks_save(here, there),
                weights_print=weights_print,
            )

        return Step(
            number=self.step + 1,
            span=span,
            header=header,
            buffers_before=self._moving.copy(),
            batches=batches,
            workload=self.workload,
            group=group,
            job_seed=self.config.seed,
            watch=self._watch,
            at=lambda place: self._at(place, group),
            start_header=start_header,
        )

    def _undo(self, step: Step) -> None:
        self._moving.put_back(step.buffers_before)
        self._forget_gradients()
        self.workload.precision.undo()

    def _forget_gradients(self) -> None:
        self.workload.optimizer.zero_grad(set_to_none=True)
        # Those that the optimizer does not train would pile up, and count when gradients are
        # clipped: on ranks that have been here for long, not on those that have just come.
        self.workload.model.zero_grad(set_to_none=True)

    def _tell_step(self, step: Step, means: Means, *, is_skipped: bool) -> None:
        now, times = time.perf_counter(), self._watch.times()
        elapsed_s = max(now - self._committed_at, 1e-9)
        self._committed_at = now
        self._times.add_step(self.step, times, samples=step.num_own, elapsed_s=elapsed_s)
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
            self._log("info", words_of_skip(self.step, means, self.workload.precision.loss_scale))

    def _log(self, level: str, text: str) -> None:
        self._send(TextLogged(level=level, text=text))

    def _tell_digest(self, group: RankGroup) -> None:
        """At the end of each epoch and of the job, tell the weights' digest: ranks must agree."""
        generation, step, rank = group.generation, self.step, group.rank

        def send(digest: str) -> None:
            self._send(
                WeightsFingerprinted(generation=generation, step=step, rank=rank, digest=digest)
            )

        self._digest.begin(self.workload.model, send)

    def _leave(self, why: Why) -> Why:
        """End the generation: a digest that is told later would not count."""
        self._digest.finish()
        return why

    # --- evaluation ---

    def _is_eval_due(self) -> bool:
        if self.workload.eval is None or self.step == self.evaluated_step:
            return False
        # The last state is always evaluated.
        is_passed = self._eval_every.is_passed(*self.marks)
        return is_passed or bool(self.is_eval_asked) or self.is_done

    def _evaluate(self, group: RankGroup) -> bool:
        """Evaluate, and return whether no planned change cut it short; else it is done again."""
        started = time.perf_counter()
        found = self._evaluation.run(
            group,
            step=self.step,
            is_pending=self.change_pending.is_set,
            at_batch=lambda: self._come_to("eval", group, step=self.step, phase="evaluating"),
        )
        self._committed_at = time.perf_counter()
        self._times.add_evaluation(self._committed_at - started)
        if found is None:
            return False
        self.num_evals += 1
        self.evaluated_step, self.is_eval_asked = self.step, 0
        self._eval_every.restart()
        self._take_eval(found, self._committed_at - started)
        self._come_to("evaluated", group, step=self.step, phase="evaluating")
        if group.rank == 0:
            self.tell_evaluations(group.generation)
        if self.judge.is_over and not self.plan.is_boundary(self.position):
            self._tell_digest(group)
        self._call(self.after_eval, group)
        return True

    def _take_eval(self, found: EvaluationResult, duration_s: float) -> None:
        self.judge.take(self.step, {"loss": found.loss, **found.metrics})
        self._eval_record = {
            "step": self.step,
            "epoch": (self.position - 1) // self.plan.num_train,
            "samples": found.num_samples,
            "loss": found.loss,
            "metrics": found.metrics,
            "duration_s": duration_s,
            "time": time.time(),
        }

    def tell_evaluations(self, generation: int) -> None:
        """Tell, as rank 0, of the evaluation of this state and of the best; both may be known."""
        record, best = self._eval_record, self.judge.best_record()
        if record is not None and record["step"] == self.step == self.evaluated_step:
            self._send(EvalFinished(generation=generation, record=record))
        if best is not None:
            self._send(BestFound(generation=generation, record=best))

    # --- before the first generation ---

    def warm_up(self) -> None:
        """Try what training does, and undo it: finds errors, and what a pass changes.

        Raises:
            Exception: Whatever the notebook's code raises on its own data.
        """
        found = WarmUp(
            self.workload,
            self.config,
            self.plan,
            micro=self.micro,
            order=self._order_of(0),
            send=self._send,
            beat=self._beat,
        ).run()
        self._moving, self._has_unused = found.moving, found.has_unused
        self.judge.check([*self.workload.measures.names, *self.workload.whole_set])

    def _beat(self) -> None:
        if self.page is not None:
            self.page.beat()
