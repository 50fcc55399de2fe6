"""Rank lifecycle: build, warm up, then train in one generation after another until released."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import time
from typing import Any, assert_never

from etrain_jupyter.bundle.restore import OpenBundle
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.rules.membership.stimuli import NO_PROGRESS
from etrain_jupyter.trainer.build import BuiltJob, JobBuilder, hello_of
from etrain_jupyter.trainer.control.commands import Commands
from etrain_jupyter.trainer.control.error_origin import (
    device_error_in,
    is_broken_exchange,
    is_of_machine,
    is_our_defect,
)
from etrain_jupyter.trainer.control.failures import (
    DISCONNECTED,
    Failure,
    describe_user_error,
    failure_of,
)
from etrain_jupyter.trainer.control.faults import FaultInjector
from etrain_jupyter.trainer.control.reporter import Reporter
from etrain_jupyter.trainer.group.pending import text_of
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from etrain_jupyter.trainer.imports import ImportRecord
from etrain_jupyter.trainer.micro_batch import free_memory, hint_for_memory, out_of_memory_in
from etrain_jupyter.trainer.state.transfer import Transferred
from etrain_jupyter.trainer.state.weight_fingerprint import WeightsDivergedError
from etrain_jupyter.wire.channel import Channel
from etrain_jupyter.wire.messages import (
    GenerationJoined,
    GenerationLeft,
    JoinGeneration,
    LaunchTrainer,
    PackagesImported,
    SaveState,
    ShutDownTrainer,
    TextLogged,
    TrainerReport,
    UserCodeFailed,
    WarmUpBegun,
    Why,
)
from etrain_jupyter.wire.progress_page import ProgressPage

# Import this module now. Otherwise, constructing the first optimizer would import it, which takes
# seconds. The fork server imports it before it forks a trainer.
importlib.import_module("torch._dynamo")


class BrokenDeviceError(Exception):
    """CUDA is unusable in this process. The cause has been reported, and the process must exit."""


class Trainer:
    """One job's trainer process, from its launch until its release.

    The main thread runs user code. ``Commands`` runs the control thread, which reads the channel,
    so that an abort or a pending change takes effect while a step runs.
    """

    def __init__(
        self, channel: Channel, launch: LaunchTrainer, progress: ProgressPage | None = None
    ) -> None:
        self._imports = ImportRecord()
        self._channel = channel
        self._page = progress
        self._launch = launch
        # The job numbers its trainers in the order in which it starts them.
        self._number = int(launch.trainer.rpartition("/")[2]) - 1
        self._reporter = Reporter(channel)
        self._faults = FaultInjector(launch.faults, self._send)
        self.commands = Commands(channel, host=launch.host, faults=self._faults, page=progress)
        self._builder = JobBuilder(
            launch,
            reporter=self._reporter,
            faults=self._faults,
            page=progress,
            change_pending=self.commands.change_pending,
            is_first=self._number == 0,
        )
        self._config: TrainConfig | None = None
        self._bundle: OpenBundle | None = None
        self._built: BuiltJob | None = None
        self._is_forming = False
        """True while this rank connects, or receives or restores the state; no step runs during
        that time."""
        self._num_out_of_memory = 0
        """Number of consecutive out-of-memory errors while forming."""

    @property
    def _job(self) -> BuiltJob:
        assert self._built is not None, "the trainer has not warmed up"
        return self._built

    def run(self) -> None:
        """Run until the coordinator releases this trainer, or its GPU fails."""
        with contextlib.suppress(BrokenDeviceError):
            self._run()

    def _run(self) -> None:
        self.commands.start()
        try:
            self._warm_up()
        except BaseException as exc:
            self._end_if_device_broke(exc)
            # A bug in this package ends the process, and another trainer is started. An error in
            # the notebook's code is reported, and may fail the job.
            if is_our_defect(exc):
                raise
            self._report_user_error(exc, generation=0)
            # This trainer never becomes ready, but it keeps running until the coordinator releases
            # it.
        while True:
            todo = self.commands.inbox.get()
            match todo:
                case ShutDownTrainer():
                    break
                case SaveState():
                    self._save(todo)
                case (message, group):
                    self._run_generation(message, group)
                case _:
                    assert_never(todo)
        # The trainer is released. First finish the checkpoint in flight, which may be the only copy
        # of the last steps.
        if self._built is not None:
            self._built.checkpointer.close()
            self._built.loop.close()
        elif self._builder.workload is not None:  # a trial pass has failed
            self._builder.workload.close()
        self._reporter.close()

    # --- warm-up ---

    def _warm_up(self) -> None:
        started = time.monotonic()
        self._send(WarmUpBegun(phase="build"))
        config = self._config = TrainConfig.model_validate(self._launch.config)
        self._builder.enter_folder()
        self._bundle = self._builder.open_bundle(config)
        self._build()
        self._faults.at("warm", rank=self._number, step=0)
        self._beat()
        self.commands.is_busy = False
        self._reporter.send(hello_of(self._job.loop, warm_s=time.monotonic() - started))
        if modules := self._imports.new_modules():
            self._channel.send(PackagesImported(modules=modules))

    def _build(self) -> None:
        # Also called by ``_restore``, when training starts again from the initial weights.
        assert self._config is not None
        assert self._bundle is not None
        self._built = self._builder.build(self._config, self._bundle, before=self._built)
        self.commands.checkpointer = self._built.checkpointer

    # --- one generation ---

    def _run_generation(self, message: JoinGeneration, group: RankGroup) -> None:
        # Every rank reports exactly once how it left, or its process exits. Only then does the
        # coordinator form the next generation, so no rank is in two generations:
        #
        #     cause                  report                     state of this rank
        #     planned, done, nan     GenerationLeft             kept
        #     a peer is lost         GenerationLeft(failed)     kept; dropped if the update is torn
        #     the user's code        UserCodeFailed             kept; dropped if the update is torn
        #     a bug in this package  none: the process ends     lost
        self._job.loop.steps.in_step = False
        self.commands.is_busy = self._is_forming = True
        failure: Failure | None = None
        try:
            why = self._form_and_train(message, group)
        except CommunicationError as exc:
            self._end_if_device_broke(exc, group)
            failure = self._memory_failure(exc, message, group) or failure_of(group, exc)
            # The weights of the only rank are torn, so exit. The job recovers as from any lost
            # trainer. Before the first step, the initial weights can be rebuilt.
            loop = self._job.loop
            if loop.steps.is_torn and loop.step and group.world_size == 1:
                raise
            why = "failed"
            self._job.sync.drop_torn()
        except BaseException as exc:
            self._end_if_device_broke(exc, group)
            failure = self._memory_failure(exc, message, group)
            # A collective that fails inside the backward pass can surface as any exception, so
            # check the group: after an abort, the notebook is not blamed for any exception.
            if not group.failure and not is_broken_exchange(exc):
                if is_our_defect(exc):
                    raise  # not the user's error: this process exits, and the others continue
                self._close(group)
                self._job.sync.drop_torn()
                # The job fails, and must not save weights that only one rank has.
                self._job.sync.has_state &= not isinstance(exc, WeightsDivergedError)
                self._report_user_error(exc, generation=group.generation)
                return
            why, failure = "failed", failure or failure_of(group, exc)
        self._close(group)
        loop = self._job.loop
        undone, loop.steps.in_step = loop.steps.in_step, False
        self.commands.is_busy = False
        self._beat(phase="idle")
        failure = failure or Failure()
        nan = loop.undone_loss if why == "nan" else None
        self._send(
            GenerationLeft(
                generation=group.generation,
                progress=self._job.sync.progress,
                why=why,
                undone=undone,
                error=failure.error,
                backend=failure.backend,
                is_excused=failure.is_excused,
                ended_early=loop.state.best_tracker.end_record() if why == "done" else None,
                loss=nan.loss if nan is not None else None,
                is_source=nan is not None and nan.is_source,
            )
        )

    def _end_if_device_broke(self, exc: BaseException, group: RankGroup | None = None) -> None:
        """Report a CUDA error and raise, so that the process ends.

        Raises:
            BrokenDeviceError: If the notebook's code caused it. The job fails with that error.
            BaseException: ``exc``, if the machine caused it. The other trainers continue without
                this one.
        """
        error = device_error_in(exc)
        if error is None:
            return
        # No CUDA call can succeed in this process, so nothing is undone, saved or closed. Report
        # before exiting: the exit breaks the other ranks' collectives, and the coordinator must
        # know the cause before it sees these failures.
        if self._built is not None:
            self._built.sync.has_state = False
        has_peers = group is not None and group.world_size > 1
        if is_of_machine(error, has_peers=has_peers):
            text = f"the GPU failed, so this trainer exits: {str(error).partition(chr(10))[0]}"
            self._send(TextLogged(level="error", text=text))
            raise exc
        self._report_user_error(error, generation=group.generation if group is not None else 0)
        raise BrokenDeviceError from None

    def _memory_failure(
        self, exc: BaseException, message: JoinGeneration, group: RankGroup
    ) -> Failure | None:
        # Within a step, it is the notebook's error, unless ``batch.micro: auto`` handles it.
        if not self._is_forming or (cause := out_of_memory_in(exc)) is None:
            return None
        error = f"{text_of(cause)}; {hint_for_memory(self._job.loop.state.config)}"
        group.abort(error)  # the others wait for this rank
        if group.rank not in message.behind and not message.restore:
            return Failure(error=error)  # it has the newest state, and keeps it
        # The first failure drops the old state and the optimizer's tensors, to free memory for the
        # next attempt; the second failure ends the process:
        #
        #     generation 4   behind, out of memory ── drop the state, GenerationLeft(excused)
        #     generation 5   joins without a state ── out of memory again ── the process ends
        #     generation 6   the others continue without it
        self._num_out_of_memory += 1
        if self._num_out_of_memory > 1:
            text = "out of memory again while receiving the state, so this trainer exits"
            self._send(TextLogged(level="error", text=f"{text}: {error}"))
            raise exc
        text = "out of memory while receiving the state; retrying with the old state dropped"
        self._send(TextLogged(level="warning", text=f"{text}: {error}"))
        self._job.sync.free()
        return Failure(error=error, is_excused=True)

    def _close(self, group: RankGroup) -> None:
        group.close()
        self._job.checkpointer.leave()
        if (shards := self._job.loop.workload.shards) is not None:
            shards.leave()

    def _form_and_train(self, message: JoinGeneration, group: RankGroup) -> Why:
        loop, sync, checkpointer = self._job.loop, self._job.sync, self._job.checkpointer
        # The order of events on rank 0, on a rank that is behind, and on any other rank:
        #
        #     rank 0   form   (restore)   send state   wrap   GenerationJoined   step ...
        #     behind   form               receive      wrap   GenerationJoined   step ...
        #     other    form                            wrap   GenerationJoined   (waits in step 1)
        if self._num_out_of_memory:
            free_memory()  # not earlier: while the exception was handled, its frames held tensors
        if self._page is not None:
            self._page.begin(group.generation)
        self._faults.renew(message.faults)
        self._faults.disconnect = lambda: group.abort(DISCONNECTED)
        clock = [time.monotonic()]
        # A new rank is at step 0; planned faults refer to the step from which the job continues.
        step = max(loop.step, message.logged_step)
        self._faults.at("form", rank=group.rank, step=step)
        # Count it after the fault, because a rank that hangs in the fault must have the fewest
        # collectives. The counts must match on all ranks: when a generation stalls, the coordinator
        # treats the rank with the fewest collectives as the straggler.
        if self._page is not None:
            self._page.count_collective()
        group.form()
        clock.append(time.monotonic())
        self._beat(phase="syncing")
        checkpointer.starts[message.num_starts :] = message.starts
        if message.restore:
            self._restore(group, message.log_end)
            loop, sync, checkpointer = self._job.loop, self._job.sync, self._job.checkpointer
        moved = sync.share(group, message, step)
        # ``message.starts`` ends with the previous generation. The new generation begins at the
        # step of rank 0's checkpoint or state, which the coordinator learns from
        # ``GenerationJoined``.
        checkpointer.starts.append(loop.step)
        clock.append(time.monotonic())
        gradients = None if message.saves else loop.wrap(group)
        clock.append(time.monotonic())
        spans = [after - before for before, after in itertools.pairwise(clock)]
        self._report_joined(group, spans, moved)
        if message.pace is not None:
            checkpointer.pace.adopt(message.pace, now=time.monotonic())
        assert self.commands.store is not None
        checkpointer.begin(group, self.commands.store)
        # Begin only after ``GenerationJoined``, which logs the first step of the generation. Rank 0
        # now sends the steps missing from the log, and must not send undone steps.
        self._reporter.begin(
            generation=group.generation, rank=group.rank, logged_step=message.logged_step
        )
        sync.is_fresh = self._is_forming = False
        self._num_out_of_memory = 0
        if gradients is None:
            if group.rank == 0:
                loop.evaluations.report(group.generation)
            self._beat(phase="saving")
            checkpointer.save_together(group)
            return "planned"
        return loop.run(group, gradients, checkpointer)

    def _report_joined(
        self, group: RankGroup, spans: list[float], moved: Transferred | None
    ) -> None:
        connect_s, sync_s, wrap_s = spans
        self._send(
            GenerationJoined(
                generation=group.generation,
                step=self._job.loop.step,
                connect_s=connect_s,
                sync_s=sync_s,
                wrap_s=wrap_s,
                sync_bytes=moved.num_bytes if moved is not None else 0,
            )
        )
        if moved is not None and group.rank == 0:
            self._send(TextLogged(level="info", text=f"state sent: {moved}"))

    def _restore(self, group: RankGroup, log_end: int) -> None:
        # No trainer has the state. Rank 0 loads it, and ``StateSync`` sends it to the others, so
        # the store is read only once. If the optimizer's state is divided, each rank reads its part
        # of it, because no process has enough memory for all of it.
        job = self._job
        records: list[dict[str, Any]] | None = []
        if job.loop.workload.shards is not None:
            records = job.checkpointer.restorer.together(group, logged_step=log_end)
        elif group.rank == 0:
            records = job.checkpointer.restorer.newest(logged_step=log_end)
        if records is None and not job.sync.is_fresh:
            # There is no checkpoint, and this rank's weights are not the initial ones, for example
            # because a sender died during a state transfer. Training starts from the beginning.
            job.loop.close()
            self._build()
        self._reporter.adopt(records or [])

    def _save(self, message: SaveState) -> None:
        self._beat(phase="saving")
        generation = message.generation
        # This trainer may have had another rank, and rank 0 may have died before it sent the last
        # steps. So act as rank 0 and send the steps that are missing from the log, before the
        # checkpoint is saved.
        self._reporter.begin(generation=generation, rank=0, logged_step=message.logged_step)
        self._job.loop.evaluations.report(generation)
        self._job.checkpointer.starts = list(message.starts)
        self._job.checkpointer.save_now(generation)
        self._beat(phase="idle")

    # --- reports ---

    def _beat(self, phase: str | None = None) -> None:
        if self._page is not None:
            self._page.beat(phase=phase)

    def _send(self, report: TrainerReport) -> None:
        # If the supervisor is gone, the control thread reaches the end of the channel and exits the
        # process.
        with contextlib.suppress(OSError):
            self._reporter.send(report)

    def _report_user_error(self, exc: BaseException, *, generation: int) -> None:
        self.commands.is_busy = False
        built = self._built
        error, text = describe_user_error(
            exc,
            config=self._config,
            bundle=self._bundle,
            workload=self._builder.workload,
        )
        progress = built.sync.progress if built is not None else NO_PROGRESS
        self._send(
            UserCodeFailed(generation=generation, progress=progress, error=error, traceback=text)
        )
