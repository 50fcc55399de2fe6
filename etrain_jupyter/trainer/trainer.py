"""Rank lifecycle: build, warm up, then train in one generation after another until released."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from etrain_jupyter.bundle.restore import OpenBundle, open_bundle
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.rules.membership.stimuli import NO_PROGRESS
from etrain_jupyter.storage.checkpoints import open_store
from etrain_jupyter.trainer.control.error_origin import (
    HINT_FOR_HUB,
    HINT_WITHOUT_GPU,
    code_of_pass,
    device_error_in,
    hint_for_device,
    is_broken_exchange,
    is_hub_unreachable,
    is_of_machine,
    is_our_defect,
    needs_missing_gpu,
)
from etrain_jupyter.trainer.control.faults import FaultInjector
from etrain_jupyter.trainer.control.reporter import Reporter
from etrain_jupyter.trainer.devices import choose_device, facts_of
from etrain_jupyter.trainer.group.backends import GLOO, NCCL
from etrain_jupyter.trainer.group.pending import text_of
from etrain_jupyter.trainer.group.process_group import (
    ABORTED,
    BroadcastStore,
    CommunicationError,
    RankGroup,
)
from etrain_jupyter.trainer.group.rendezvous import keys_in, message_for_key
from etrain_jupyter.trainer.imports import ImportRecord
from etrain_jupyter.trainer.loop.train_loop import OUT_OF_MEMORY, TrainLoop
from etrain_jupyter.trainer.micro_batch import (
    free_memory,
    hint_for_memory,
    is_out_of_memory,
    out_of_memory_in,
)
from etrain_jupyter.trainer.schedule import WorkPlan
from etrain_jupyter.trainer.scoring.score_process import ProcessScorer
from etrain_jupyter.trainer.sharding.shard_sync import (
    NO_STEP,
    RankReport,
    ShardsLostError,
    ShardSync,
)
from etrain_jupyter.trainer.state.capture import put_state, take_state
from etrain_jupyter.trainer.state.checkpointer import Checkpointer
from etrain_jupyter.trainer.state.packing import Tensors
from etrain_jupyter.trainer.state.train_state import TrainState
from etrain_jupyter.trainer.state.transfer import Transferred, receive_state, send_state
from etrain_jupyter.trainer.state.weight_fingerprint import WeightsDivergedError
from etrain_jupyter.trainer.trial_checks import UpdateInPassError
from etrain_jupyter.trainer.workload import build_workload
from etrain_jupyter.wire.channel import Channel
from etrain_jupyter.wire.messages import (
    BreakGeneration,
    GenerationJoined,
    GenerationLeft,
    InjectFault,
    JoinGeneration,
    LaunchTrainer,
    LeaveGeneration,
    PackagesImported,
    RankKeys,
    RequestCheckpoint,
    SaveState,
    SetPace,
    ShutDownTrainer,
    StoreEntry,
    TextLogged,
    ToTrainer,
    TrainerHello,
    TrainerReport,
    UserCodeFailed,
    WarmUpBegun,
    Why,
    is_current,
)
from etrain_jupyter.wire.progress_page import ProgressPage

DISCONNECTED = "disconnected on purpose"
"""Reason reported for a generation whose connections were closed by an injected fault."""

# Import this now: otherwise, constructing the first optimizer would import it, which takes seconds.
# A spare imports it while it is idle.
importlib.import_module("torch._dynamo")


class BrokenDeviceError(Exception):
    """CUDA is unusable in this process. The cause has been reported, and the process must exit."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a generation failed, as reported by one of its ranks."""

    error: str = ""
    """The error; empty if another rank reports the cause."""
    backend: str = ""
    is_excused: bool = False


class Trainer:
    """One job's trainer process, from its launch until its release.

    It has two threads: the main thread runs user code, and the control thread reads the channel, so
    that an abort or a pending change takes effect while a step runs::

        control   JoinGeneration ──▶ inbox         BreakGeneration        ShutDownTrainer ──▶ inbox
        main                 form, train, train ...      X report, wait for the inbox ...   end
    """

    def __init__(
        self, channel: Channel, launch: LaunchTrainer, progress: ProgressPage | None = None
    ) -> None:
        self._imports = ImportRecord()
        self._channel = channel
        self._page = progress
        self._launch = launch
        self._name = launch.trainer
        # The job numbers its trainers in the order in which it starts them.
        self._number = int(self._name.rpartition("/")[2]) - 1
        self._reporter = Reporter(channel)
        self._inbox: queue.SimpleQueue[
            tuple[JoinGeneration, RankGroup] | SaveState | ShutDownTrainer
        ] = queue.SimpleQueue()
        self._group: RankGroup | None = None
        self._store: BroadcastStore | None = None
        self._bundle: OpenBundle | None = None
        self._loop: TrainLoop | None = None
        self._checkpointer: Checkpointer | None = None
        self._config: TrainConfig
        self._faults = FaultInjector(launch.faults, self._send)
        self._has_state = False
        self._is_fresh = True
        """True while the model has the initial weights from the notebook's code."""
        self._is_forming = False
        """True while this rank connects, or receives or restores the state; no step runs during
        that time."""
        self._num_out_of_memory = 0
        """Number of consecutive out-of-memory errors while forming."""
        self._is_busy = True
        """True while the main thread runs user code; reset before it reports that it is done."""

    # --- control thread ---

    def read_commands(self) -> None:
        """Read the channel until the supervisor is gone, then exit the process."""
        try:
            for message in self._channel.messages():
                self._handle(message)
        except BaseException:
            # Without this thread, no abort or shutdown would ever arrive, and the trainer would
            # hang in the first collective after it loses a peer.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        # The supervisor is gone. Not sys.exit: the main thread may be stuck in gloo or user code.
        os._exit(0)

    def _handle(self, message: ToTrainer) -> None:
        # The main thread does not read its inbox during a generation. So only work between
        # generations goes to the inbox; anything that must affect a running step happens here.
        generation = self._group.generation if self._group is not None else 0
        # A message about an earlier generation may arrive late: an abort of generation 4 must not
        # break generation 5.
        if not is_current(message, generation=generation):
            return
        match message:
            case JoinGeneration():
                self._inbox.put((message, self._create_group(message)))
            case ShutDownTrainer():
                # The trainer is released while user code runs. The job was stopped without waiting
                # for this step, and the main thread would not read its inbox until the generation
                # ends.
                if self._is_busy:
                    os._exit(0)
                self._inbox.put(message)
            case SaveState():
                self._inbox.put(message)
            case RequestCheckpoint():
                if self._checkpointer is not None:
                    self._checkpointer.request()
            case SetPace():
                if self._checkpointer is not None:
                    self._checkpointer.pace.adopt(message.pace, now=time.monotonic())
            case StoreEntry():
                if self._store is not None:
                    self._store.put(message.key, message.value)
            case RankKeys():
                if self._store is not None:
                    self._store.put_all(dict(keys_in(message)))
            case LeaveGeneration():
                if self._loop is not None:
                    self._loop.change_pending.set()
            case BreakGeneration():
                if self._group is not None:
                    self._group.abort()
            case InjectFault():
                self._faults.inject(message.kind_of_fault)
            case LaunchTrainer():
                raise ValueError(f"trainer {self._name} was launched a second time")
            case _:
                assert_never(message)

    def _create_group(self, message: JoinGeneration) -> RankGroup:
        # This is called in the control thread, because a faster rank may publish its address before
        # this rank's main thread has read its inbox. If no store existed yet, the entry would be
        # lost:
        #
        #     control   JoinGeneration   StoreEntry
        #     main          (leaving the previous generation) ─── form
        generation = message.generation

        def publish(key: str, value: bytes) -> None:
            place = {"generation": generation, "rank": message.rank}
            entry = message_for_key(key, value, **place, world_size=message.world_size)
            self._channel.send(entry)

        # Clear this before the rank reports that it has joined. Afterwards, the next change may be
        # announced at any time, even before the loop runs.
        if self._loop is not None:
            self._loop.change_pending.clear()
        self._store = BroadcastStore(publish)
        self._group = RankGroup(
            generation=generation,
            rank=message.rank,
            world_size=message.world_size,
            store=self._store,
            host=self._launch.host,
            backend=message.backend,
            secret=message.secret,
            progress=self._page,
        )
        return self._group

    # --- main thread ---

    def run(self) -> None:
        """Run until the coordinator releases this trainer, or its GPU fails."""
        with contextlib.suppress(BrokenDeviceError):
            self._run()

    def _run(self) -> None:
        threading.Thread(target=self.read_commands, name="etrain-control", daemon=True).start()
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
            todo = self._inbox.get()
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
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._loop is not None:
            self._loop.close()
        self._reporter.close()

    def _warm_up(self) -> None:
        started = time.monotonic()
        self._send(WarmUpBegun(phase="build"))
        self._config = TrainConfig.model_validate(self._launch.config)
        # Makes relative paths and local modules work as in the notebook if the notebook's folder
        # exists here: on the same machine, or on a shared file system.
        folder = self._launch.cwd
        if folder and Path(folder).is_dir():
            os.chdir(folder)
            sys.path.insert(0, folder)
        bundle = self._launch.bundle
        self._bundle = open_bundle(Path(bundle.path), digest=bundle.digest)
        # All trials of a search share a bundle; their expressions contain their own values.
        self._bundle.references |= self._config.references()
        self._bundle.install_sources()
        self._build()
        self._faults.at("warm", rank=self._number, step=0)
        self._beat()
        self._send_hello(time.monotonic() - started)
        if modules := self._imports.new_modules():
            self._channel.send(PackagesImported(modules=modules))

    def _build(self) -> None:
        # Also called by ``_restore``, when training starts again from the initial weights.
        assert self._bundle is not None
        workload = build_workload(
            self._config,
            self._bundle,
            choose_device(),
            # From any thread, as all reports.
            warn=lambda text: self._send(TextLogged(level="warning", text=text)),
        )
        plan = WorkPlan.of(self._config, workload)
        state = TrainState(workload, self._config, plan)
        loop = TrainLoop(
            state,
            self._reporter.send,
            faults=self._faults,
            page=self._page,
            # Reuse the event of the replaced loop: the control thread may have set it.
            change_pending=self._loop.change_pending if self._loop is not None else None,
            scorer=ProcessScorer(self._bundle.fileno()) if self._config.eval.score else None,
        )
        # Do not retry a size that has already run out of memory.
        if self._loop is not None:
            loop.micro.limit_to(self._loop.micro)
        self._loop = loop
        self._beat()
        self._send(WarmUpBegun(phase="trial"))
        loop.warm_up(is_first=self._number == 0)
        # Fail now if the state cannot be sent or saved. Otherwise, the first join or checkpoint
        # would fail, perhaps after hours of training.
        self._take_state()
        starts = self._checkpointer.starts if self._checkpointer is not None else []
        self._checkpointer = Checkpointer(
            store=open_store(self._launch.checkpoints),
            state=state,
            job_id=self._launch.job_id,
            send=self._reporter.send,
            records_after=self._reporter.records_after,
            code_digest=self._bundle.code.digest if self._bundle.code is not None else "",
            starts=starts,
            page=self._page,
        )
        self._is_fresh = True

    def _send_hello(self, warm_s: float) -> None:
        assert self._loop is not None
        plan = self._loop.state.plan
        model = self._loop.workload.model
        facts = facts_of(self._loop.workload.device)
        self._is_busy = False
        self._reporter.send(
            TrainerHello(
                pid=os.getpid(),
                warm_s=warm_s,
                device=facts.name,
                gpu=facts.gpu,
                gpu_memory_bytes=facts.memory_bytes,
                plan={
                    "num_train_samples": plan.num_train,
                    "num_eval_samples": plan.num_eval,
                    "global_batch_size": plan.global_batch_size,
                    "steps_per_epoch": plan.steps_per_epoch,
                    "total_steps": plan.total_steps,
                    "total_samples": plan.end,
                    "per_worker_batch_size": self._config.batch.per_worker_batch_size or 0,
                    "train_layout": plan.layout.encode() if plan.layout is not None else "",
                    "train_digest": self._loop.workload.train.digest,
                    "num_parameters": sum(p.numel() for p in model.parameters()),
                    "num_trained_parameters": sum(
                        p.numel() for p in model.parameters() if p.requires_grad
                    ),
                },
            )
        )

    def _run_generation(self, message: JoinGeneration, group: RankGroup) -> None:
        # Every rank reports exactly once how it left, or its process exits. Only then does the
        # coordinator form the next generation, so no rank is in two generations:
        #
        #     cause                  report                     state of this rank
        #     planned, done, nan     GenerationLeft             kept
        #     a peer is lost         GenerationLeft(failed)     kept; dropped if the update is torn
        #     the user's code        UserCodeFailed             kept; dropped if the update is torn
        #     a defect of ours       none: the process ends     lost
        assert self._loop is not None
        self._loop.in_step = False
        self._is_busy = self._is_forming = True
        failure: Failure | None = None
        try:
            why = self._form_and_train(message, group)
        except CommunicationError as exc:
            self._end_if_device_broke(exc, group)
            failure = self._handle_lack_of_memory(exc, message, group) or failure_of(group, exc)
            # The weights of the only rank are torn, so exit. The job recovers as from any lost
            # trainer. Before the first step, nothing is lost: the initial weights can be rebuilt.
            if self._loop.update.is_torn and self._loop.step and group.world_size == 1:
                raise
            why = "failed"
            self._drop_torn_state()
        except BaseException as exc:
            self._end_if_device_broke(exc, group)
            failure = self._handle_lack_of_memory(exc, message, group)
            # A collective that fails inside the backward pass can surface as any exception, so
            # check the group: after an abort, the notebook is not blamed for any exception.
            if not group.failure and not is_broken_exchange(exc):
                if is_our_defect(exc):
                    raise  # not the user's error: this process exits, and the others continue
                self._close(group)
                self._drop_torn_state()
                # The job fails, and must not save weights that are those of one rank only.
                self._has_state &= not isinstance(exc, WeightsDivergedError)
                self._report_user_error(exc, generation=group.generation)
                return
            why, failure = "failed", failure or failure_of(group, exc)
        self._close(group)
        undone, self._loop.in_step = self._loop.in_step, False
        self._is_busy = False
        self._beat(phase="idle")
        failure = failure or Failure()
        nan = self._loop.undone_loss if why == "nan" else None
        self._send(
            GenerationLeft(
                generation=group.generation,
                progress=self._progress(),
                why=why,
                undone=undone,
                error=failure.error,
                backend=failure.backend,
                is_excused=failure.is_excused,
                ended_early=self._loop.state.best_tracker.end_record() if why == "done" else None,
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
        # No CUDA call can succeed in this process, so nothing is undone, saved or closed. The
        # report precedes the exit, which breaks the other ranks' collectives: the coordinator must
        # know the cause before it sees their failures.
        self._has_state = False
        has_peers = group is not None and group.world_size > 1
        if is_of_machine(error, has_peers=has_peers):
            text = f"the GPU failed, so this trainer exits: {str(error).partition(chr(10))[0]}"
            self._send(TextLogged(level="error", text=text))
            raise exc
        self._report_user_error(error, generation=group.generation if group is not None else 0)
        raise BrokenDeviceError from None

    def _handle_lack_of_memory(
        self, exc: BaseException, message: JoinGeneration, group: RankGroup
    ) -> Failure | None:
        """Handle an out-of-memory error while a generation forms: abort it, and drop a stale state.

        Returns:
            The failure to report; None if the error was something else.

        Raises:
            BaseException: ``exc``, if memory ran out in two consecutive attempts.
        """
        cause = out_of_memory_in(exc)
        # Within a step, it is the notebook's error, or ``batch.micro: auto`` handles it.
        if not self._is_forming or cause is None:
            return None
        assert self._loop is not None
        error = f"{text_of(cause)}; {hint_for_memory(self._config)}"
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
        self._drop_state()
        self._loop.workload.optimizer.state.clear()
        if self._loop.workload.shards is not None:
            self._loop.workload.shards.drop()
        return Failure(error=error, is_excused=True)

    def _close(self, group: RankGroup) -> None:
        group.close()
        if self._checkpointer is not None:
            self._checkpointer.leave()
        if self._loop is not None and self._loop.workload.shards is not None:
            self._loop.workload.shards.leave()

    def _drop_state(self) -> None:
        # The tensors, including any initial weights, are about to be overwritten.
        self._has_state = self._is_fresh = False

    def _drop_torn_state(self) -> None:
        # The optimizer raised midway: some weights have moved and others have not, and there is no
        # copy of the old ones. The next generation sends the state to this rank.
        assert self._loop is not None
        if self._loop.update.is_torn:
            self._has_state = self._loop.in_step = self._loop.update.is_torn = False

    def _form_and_train(self, message: JoinGeneration, group: RankGroup) -> Why:
        assert self._loop is not None
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
        step = max(self._loop.step, message.logged_step)
        self._faults.at("form", rank=group.rank, step=step)
        # Count it after the fault, because a rank that hangs in the fault must have the fewest
        # collectives.
        self._count_collective()
        group.form()
        clock.append(time.monotonic())
        self._beat(phase="syncing")
        assert self._checkpointer is not None
        self._checkpointer.starts[message.num_starts :] = message.starts
        if message.restore:
            self._restore(group, message.log_end)
        share = self._share_state
        if self._loop.workload.shards is not None:
            share = self._share_shards
        moved = share(group, message, step)
        self._has_state = True
        # ``message.starts`` ends with the previous generation. The new generation begins at the
        # step of rank 0's checkpoint or state, which the coordinator learns from
        # ``GenerationJoined``.
        self._checkpointer.starts.append(self._loop.step)
        clock.append(time.monotonic())
        gradients = None if message.saves else self._loop.wrap(group)
        clock.append(time.monotonic())
        spans = [after - before for before, after in itertools.pairwise(clock)]
        self._report_joined(group, spans, moved)
        assert self._store is not None
        if message.pace is not None:
            self._checkpointer.pace.adopt(message.pace, now=time.monotonic())
        self._checkpointer.begin(group, self._store)
        # After ``GenerationJoined``, which puts the first step of the generation in the log: rank 0
        # now sends the steps missing from the log, and must not send undone steps.
        self._reporter.begin(
            generation=group.generation, rank=group.rank, logged_step=message.logged_step
        )
        self._is_fresh = self._is_forming = False
        self._num_out_of_memory = 0
        if gradients is None:
            if group.rank == 0:
                self._loop.evaluations.report(group.generation)
            self._beat(phase="saving")
            self._checkpointer.save_together(group)
            return "planned"
        return self._loop.run(group, gradients, self._checkpointer)

    def _report_joined(
        self, group: RankGroup, spans: list[float], moved: Transferred | None
    ) -> None:
        assert self._loop is not None
        connect_s, sync_s, wrap_s = spans
        self._send(
            GenerationJoined(
                generation=group.generation,
                step=self._loop.step,
                connect_s=connect_s,
                sync_s=sync_s,
                wrap_s=wrap_s,
                sync_bytes=moved.num_bytes if moved is not None else 0,
            )
        )
        if moved is not None and group.rank == 0:
            self._send(TextLogged(level="info", text=f"state sent: {moved}"))

    def _share_state(
        self, group: RankGroup, message: JoinGeneration, step: int
    ) -> Transferred | None:
        assert self._loop is not None
        behind = list(message.behind)
        if not behind:
            return None
        takes_part = group.rank in (0, *behind)
        if takes_part:
            self._faults.at("sync", rank=group.rank, step=step)
        # Count it on every rank; otherwise, ranks that do not take part would look like stragglers.
        self._count_collective()
        if not takes_part:
            return None
        if group.rank == 0:
            return self._send_state(group, message, behind)
        # If every other rank is behind, the sender has the only copy of the newest state. If it
        # dies, the newest remaining state is that of a rank that is behind.
        keep = self._has_state and group.world_size == 1 + len(behind)
        return self._receive_state(group, behind, keep=keep, on_overwrite=self._drop_state)

    def _send_state(
        self, group: RankGroup, message: JoinGeneration, behind: Sequence[int]
    ) -> Transferred:
        header, tensors = self._take_state()
        # If rank 0 dies before it sends these records to the log, any receiver can send them.
        header["records"] = self._reporter.records_after(message.logged_step)
        return send_state(group, header, tensors, behind)

    def _receive_state(
        self,
        group: RankGroup,
        behind: Sequence[int],
        *,
        keep: bool,
        on_overwrite: Callable[[], None],
    ) -> Transferred:
        assert self._loop is not None
        workload = self._loop.workload
        header, tensors, moved = receive_state(
            group,
            workload.model,
            behind,
            optimizer=workload.optimizer,
            extras=workload.extras,
            keep=keep,
            on_overwrite=on_overwrite,
        )
        put_state(workload.model, workload.optimizer, header, tensors, workload.extras)
        self._loop.state.set_counters(header["counters"])
        self._reporter.adopt(header["records"])
        return moved

    def _share_shards(
        self, group: RankGroup, message: JoinGeneration, step: int
    ) -> Transferred | None:
        # With ``shard``: see ``shard_sync`` for the order, and for what a rank may lose.
        assert self._loop is not None
        loop, shards = self._loop, self._loop.workload.shards
        assert shards is not None
        started = time.monotonic()
        self._faults.at("sync", rank=group.rank, step=step)
        sync = ShardSync(group, shards, self._beat)
        has_state = self._has_state or (message.restore and group.rank == 0)
        report = RankReport(
            step=loop.step if has_state else NO_STEP,
            num_evals=loop.state.num_evals,
            is_prepared=loop.prepared is not None,
            is_stale=shards.is_stale,
            spans=tuple(shards.spans),
        )
        try:
            plan = sync.agree(report, is_restored=message.restore)
        except ShardsLostError as exc:
            if group.rank == 0:
                self._send(TextLogged(level="warning", text=str(exc)))
            loop.drop_prepared()
            self._drop_state()
            raise
        if group.rank in plan.completing:
            loop.complete_prepared()
        loop.drop_prepared()
        is_holder = group.rank in plan.held
        if not is_holder:
            shards.drop()
        sync.repair(plan)
        if is_holder:
            loop.update.finish()
        shards.is_stale = False
        num_bytes = 0
        if group.rank == 0 and plan.behind:
            num_bytes = self._send_state(group, message, plan.behind).num_bytes
        elif group.rank in plan.behind:
            # A holder receives the weights that it has, with newer counters, but after a restore it
            # has only its part of the optimizer's state.
            has_weights = is_holder and not message.restore
            drop = (lambda: None) if has_weights else self._drop_state
            self._receive_state(group, plan.behind, keep=False, on_overwrite=drop)
        num_bytes += sync.divide(plan)
        shards.begin(group)
        if not num_bytes:
            return None
        return Transferred(num_bytes=num_bytes, duration_s=time.monotonic() - started)

    def _take_state(self) -> tuple[dict[str, Any], Tensors]:
        assert self._loop is not None
        workload = self._loop.workload
        header, tensors = take_state(workload.model, workload.optimizer, workload.extras)
        return {"counters": self._loop.state.counters(), **header}, tensors

    def _restore(self, group: RankGroup, log_end: int) -> None:
        # No trainer has the state. Rank 0 loads it, and ``_share_state`` sends it to the others, so
        # the store is read only once. If the optimizer's state is divided, each rank reads its part
        # of it, because no process has enough memory for all of it.
        assert self._loop is not None
        assert self._checkpointer is not None
        records: list[dict[str, Any]] | None = []
        if self._loop.workload.shards is not None:
            records = self._checkpointer.restore_together(group, logged_step=log_end)
        elif group.rank == 0:
            records = self._checkpointer.restore_newest(logged_step=log_end)
        if records is None and not self._is_fresh:
            # There is no checkpoint, and this rank's weights are not the initial ones, for example
            # because a sender died during a state transfer. Training starts from the beginning.
            self._loop.close()
            self._build()
        self._reporter.adopt(records or [])

    def _save(self, message: SaveState) -> None:
        assert self._checkpointer is not None
        self._beat(phase="saving")
        generation = message.generation
        # This trainer may have had another rank, and rank 0 may have died before it sent the last
        # steps: act as rank 0 and send the steps that are missing from the log, before the
        # checkpoint is saved.
        self._reporter.begin(generation=generation, rank=0, logged_step=message.logged_step)
        if self._loop is not None:
            self._loop.evaluations.report(generation)
        self._checkpointer.starts = list(message.starts)
        self._checkpointer.save_now(generation)
        self._beat(phase="idle")

    def _count_collective(self) -> None:
        # The counts must match on all ranks: when a generation stalls, the coordinator treats the
        # rank with the fewest collectives as the straggler.
        if self._page is not None:
            self._page.count_collective()

    def _beat(self, phase: str | None = None) -> None:
        if self._page is not None:
            self._page.beat(phase=phase)

    def _progress(self) -> tuple[int, int]:
        # The rank with the highest progress becomes the next rank 0, which sends its state to the
        # others. The progress of a rank without a state must not count.
        return self._loop.progress if self._loop is not None and self._has_state else NO_PROGRESS

    def _send(self, report: TrainerReport) -> None:
        # If the supervisor is gone, the control thread reaches the end of the channel and exits the
        # process.
        with contextlib.suppress(OSError):
            self._reporter.send(report)

    def _report_user_error(self, exc: BaseException, *, generation: int) -> None:
        self._is_busy = False
        # Errors that this package raises on purpose explain what to change and need no traceback.
        if type(exc).__module__.startswith(f"{__package__.partition('.')[0]}."):
            summary, text = str(exc), getattr(exc, "user_traceback", "")
            if isinstance(exc, UpdateInPassError) and self._bundle is not None:
                # The call; the last line would repeat the message.
                text = self._bundle.format_user_traceback(exc).rpartition("\n")[0]
        else:
            summary = f"{type(exc).__name__}: {exc}".partition("\n")[0].rstrip(": ")
            if is_out_of_memory(exc):
                summary += f"; {hint_for_memory(self._config)}"
            if needs_missing_gpu(exc):
                summary = f"{summary.rstrip('.')}. {HINT_WITHOUT_GPU}"
            if is_hub_unreachable(exc):
                summary = f"{summary.rstrip('.')}. {HINT_FOR_HUB}"
            text = self._bundle.format_user_traceback(exc) if self._bundle is not None else ""
            if device_error_in(exc) is not None:
                summary += f". {hint_for_device(exc)}"
                text = f"{text}\n\n{self._describe_gpu_code()}".strip()
        self._send(
            UserCodeFailed(
                generation=generation, progress=self._progress(), error=summary, traceback=text
            )
        )

    def _describe_gpu_code(self) -> str:
        # The traceback ends where the host synchronized. The failed kernel was queued earlier, by
        # these functions.
        if self._loop is None or self._bundle is None:
            return ""
        workload = self._loop.workload
        functions = [*workload.objective.functions, type(workload.model).forward]
        lines = code_of_pass(functions, self._bundle.cells)
        return f"The GPU was running the pass that begins in\n{lines}" if lines else ""


def failure_of(group: RankGroup, exc: BaseException) -> Failure:
    """Return the failure of a generation for this rank's report."""
    # Not a failure of the connections: the next generation starts from a checkpoint.
    if isinstance(exc, ShardsLostError):
        return Failure(error=str(exc), is_excused=True)
    # This rank ended the generation itself, for a reason other than a failed connection, so this
    # must not count towards the budget of failed generations.
    if group.failure in (OUT_OF_MEMORY, DISCONNECTED):
        return Failure(error=group.failure, is_excused=True)
    # The coordinator aborted it, and knows the cause.
    if group.failure == ABORTED:
        return Failure()
    error = group.failure or text_of(exc)
    backend = group.failed_backend or (NCCL if "NCCL" in error else GLOO)
    return Failure(error=error, backend=backend)
