"""Rank lifecycle: build, warm up, then train one generation after another until released."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from etrain_jupyter.bundle.restore import OpenBundle, open_bundle
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.rules.membership.stimuli import NO_PROGRESS
from etrain_jupyter.storage.checkpoints import open_store
from etrain_jupyter.trainer.control.device_errors import (
    code_of_pass,
    device_error_in,
    hint_for_device,
    is_of_machine,
)
from etrain_jupyter.trainer.control.error_origin import is_broken_exchange, is_our_defect
from etrain_jupyter.trainer.control.faults import Faults
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
from etrain_jupyter.trainer.loop.train_loop import OUT_OF_MEMORY, TrainLoop
from etrain_jupyter.trainer.micro_batch import (
    free_memory,
    hint_for_memory,
    is_out_of_memory,
    out_of_memory_in,
)
from etrain_jupyter.trainer.schedule import WorkPlan
from etrain_jupyter.trainer.state.capture import put_state, take_state
from etrain_jupyter.trainer.state.checkpointer import Checkpointer
from etrain_jupyter.trainer.state.packing import Tensors
from etrain_jupyter.trainer.state.train_state import TrainState
from etrain_jupyter.trainer.state.transfer import Transferred, receive_state, send_state
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
    Why,
    is_current,
)
from etrain_jupyter.wire.progress_page import ProgressPage

DISCONNECTED = "disconnected on purpose"
"""Why a generation failed whose connections an injected fault has closed."""

# The first optimizer would import it, which takes seconds. A spare imports it while it is idle.
importlib.import_module("torch._dynamo")


class BrokenDeviceError(Exception):
    """CUDA is unusable in this process. The coordinator knows why; the process must end."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank's generation broke, as it reports it."""

    error: str = ""
    """Empty if another rank reports the cause."""
    backend: str = ""
    is_excused: bool = False


class Trainer:
    """One job's trainer process, from its launch until its release.

    Two threads: the main one runs user code. The control thread reads the channel, so that an
    abort or a pending change takes effect while a step runs::

        control   JoinGeneration ──▶ inbox         BreakGeneration        ShutDownTrainer ──▶ inbox
        main                 form, train, train ...      X report, wait for the inbox ...   end
    """

    def __init__(
        self, channel: Channel, launch: LaunchTrainer, progress: ProgressPage | None = None
    ) -> None:
        self._channel = channel
        self._page = progress
        self._launch = launch
        self._name = launch.trainer
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
        self._faults = Faults(launch.faults, self._send)
        self._has_state = False
        self._is_fresh = True
        """Whether the weights are still those that the notebook's code gave the model."""
        self._is_forming = False
        """Whether it connects, receives or restores, so that no step runs."""
        self._num_out_of_memory = 0
        """How often in a row memory ran out during that."""
        self._is_busy = True
        """Whether the main thread runs user code; False before it reports that it is done."""

    # --- control thread ---

    def read_commands(self) -> None:
        """Read the channel until the supervisor is gone, then end the process.

        The process also ends if a message cannot be handled: a trainer that receives nothing would
        hang forever.
        """
        try:
            for message in self._channel.messages():
                self._handle(message)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    def _handle(self, message: ToTrainer) -> None:
        """Handle one message in the control thread.

        What the main thread must do goes to its inbox. What must interrupt or accompany a running
        step is done here.
        """
        generation = self._group.generation if self._group is not None else 0
        if not is_current(message, generation=generation):
            return
        match message:
            case JoinGeneration():
                self._inbox.put((message, self._create_group(message)))
            case ShutDownTrainer():
                if self._is_busy:
                    os._exit(0)  # the job was stopped at once, without the end of this step
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
        """Create the generation's store and group in the control thread.

        ::

            control   JoinGeneration   StoreEntry        the entry finds its store, although the
            main          (building the loop) ─── form   main thread has not begun the generation
        """
        generation = message.generation

        def publish(key: str, value: bytes) -> None:
            self._channel.send(StoreEntry(generation=generation, key=key, value=value))

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
            is_guarded=message.is_guarded,
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
            if is_our_defect(exc):
                raise
            self._report_user_error(exc, generation=0)
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
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._loop is not None:
            self._loop.workload.close()
        self._reporter.close()

    def _warm_up(self) -> None:
        started = time.monotonic()
        self._config = TrainConfig.model_validate(self._launch.config)
        self._change_folder()
        bundle = self._launch.bundle
        self._bundle = open_bundle(Path(bundle.path), digest=bundle.digest)
        self._bundle.install_sources()
        self._build()
        # The job numbers its trainers in the order in which it starts them.
        number = int(self._name.rpartition("/")[2]) - 1
        self._faults.at("warm", rank=number, step=0)
        self._beat()
        self._send_hello(time.monotonic() - started)

    def _build(self) -> None:
        """Build the notebook's objects, with the weights that its code gives, and try them."""
        assert self._bundle is not None
        workload = build_workload(self._config, self._bundle, choose_device())
        plan = WorkPlan.of(self._config, workload)
        state = TrainState(workload, self._config, plan)
        loop = TrainLoop(
            state,
            self._reporter.send,
            faults=self._faults,
            page=self._page,
            # The control thread may have set it already.
            change_pending=self._loop.change_pending if self._loop is not None else None,
        )
        if self._loop is not None:
            loop.micro.limit_to(self._loop.micro)
        self._loop = loop
        self._beat()
        loop.warm_up()
        self._take_state()  # refuse now what cannot be sent or saved, not at the first join
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

    def _change_folder(self) -> None:
        """Change to the notebook's folder if it exists here, so that relative paths are valid."""
        folder = self._launch.cwd
        if folder and Path(folder).is_dir():
            os.chdir(folder)
            sys.path.insert(0, folder)

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
                    "num_parameters": sum(p.numel() for p in model.parameters()),
                },
            )
        )

    def _run_generation(self, message: JoinGeneration, group: RankGroup) -> None:
        """Take part in one generation, and report how this rank left it.

        ::

            how it ends            report                     state of this rank
            planned, done, nan     GenerationLeft             kept
            a peer is lost         GenerationLeft(failed)     kept; dropped if the update is torn
            the user's code        UserCodeFailed             kept; dropped if the update is torn
            a defect of ours       none: the process ends     lost
        """
        assert self._loop is not None
        self._loop.in_step = False
        self._is_busy = self._is_forming = True
        failure: Failure | None = None
        try:
            why = self._form_and_train(message, group)
        except CommunicationError as exc:
            self._end_if_device_broke(exc, group)
            failure = self._handle_lack_of_memory(exc, message, group) or failure_of(group, exc)
            if self._loop.update.is_torn and self._loop.step and group.world_size == 1:
                raise  # no rank has the weights any more: as if this process had died
            why = "failed"
            self._drop_torn_state()
        except BaseException as exc:
            self._end_if_device_broke(exc, group)
            failure = self._handle_lack_of_memory(exc, message, group)
            # A collective that breaks inside the backward pass can come out as any exception.
            if not group.failure and not is_broken_exchange(exc):
                if is_our_defect(exc):
                    raise  # not the user's error: this process ends, and the others continue
                self._close(group)
                self._drop_torn_state()
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
        """Report a CUDA error and end the process, in which no call of CUDA succeeds any more.

        So nothing is undone, saved or closed, and this rank has no state. The report comes first:
        the end of the process breaks the collectives of the others.

        Raises:
            BrokenDeviceError: The notebook's code broke it. The job fails with that error.
            BaseException: The machine broke it: ``exc``. The others go on without this trainer.
        """
        error = device_error_in(exc)
        if error is None:
            return
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
        """Handle a lack of memory while a generation formed: break it, and drop an old state.

        The notebook's code did not run, so that this is not its error. A rank that is behind
        becomes a newcomer, to which the next generation sends the state. If even that does not
        fit, its process ends, and the others continue without it.

        Returns:
            The failure to report; None if something else happened.

        Raises:
            BaseException: ``exc``, if memory ran out here twice in a row.
        """
        cause = out_of_memory_in(exc)
        if not self._is_forming or cause is None:
            return None
        assert self._loop is not None
        error = f"{text_of(cause)}; {hint_for_memory(self._config)}"
        group.abort(error)  # the others wait for this rank
        if group.rank not in message.behind and not message.restore:
            return Failure(error=error)  # it holds the newest state, and keeps it
        self._num_out_of_memory += 1
        if self._num_out_of_memory > 1:
            text = "out of memory again while receiving the state, so this trainer exits"
            self._send(TextLogged(level="error", text=f"{text}: {error}"))
            raise exc
        text = "out of memory while receiving the state; retrying with the old state dropped"
        self._send(TextLogged(level="warning", text=f"{text}: {error}"))
        self._drop_state()
        self._loop.workload.optimizer.state.clear()
        return Failure(error=error, is_excused=True)

    def _close(self, group: RankGroup) -> None:
        group.close()
        if self._checkpointer is not None:
            self._checkpointer.leave()

    def _drop_state(self) -> None:
        """Drop the state, and with it the weights that the notebook's code gave."""
        self._has_state = self._is_fresh = False

    def _drop_torn_state(self) -> None:
        """Drop the state if the optimizer raised midway: some weights have moved, others not."""
        assert self._loop is not None
        if self._loop.update.is_torn:
            self._has_state = self._loop.in_step = self._loop.update.is_torn = False

    def _form_and_train(self, message: JoinGeneration, group: RankGroup) -> Why:
        assert self._loop is not None
        if self._num_out_of_memory:
            free_memory()  # nothing refers to the exception any more
        if self._page is not None:
            self._page.begin(group.generation)
        self._faults.renew(message.faults)
        self._faults.disconnect = lambda: group.abort(DISCONNECTED)
        clock = [time.monotonic()]
        # A newcomer has made no step: a plan means the one that the generation goes on from.
        step = max(self._loop.step, message.logged_step)
        self._faults.at("form", rank=group.rank, step=step)
        self._count_collective()
        group.form()
        clock.append(time.monotonic())
        self._beat(phase="syncing")
        assert self._checkpointer is not None
        self._checkpointer.starts = list(message.starts)
        if message.restore:
            self._restore(group, message.log_end)
        moved = self._share_state(group, message, step)
        self._has_state = True
        self._checkpointer.starts.append(self._loop.step)
        clock.append(time.monotonic())
        gradients = self._loop.wrap(group)
        clock.append(time.monotonic())
        spans = [after - before for before, after in itertools.pairwise(clock)]
        self._report_joined(group, spans, moved)
        assert self._store is not None
        if message.pace is not None:
            self._checkpointer.pace.adopt(message.pace, now=time.monotonic())
        self._checkpointer.begin(group, self._store)
        # After that: the log learns first at which step the generation begins.
        self._reporter.begin(
            generation=group.generation, rank=group.rank, logged_step=message.logged_step
        )
        self._is_fresh = self._is_forming = False
        self._num_out_of_memory = 0
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
        """Send rank 0's state to the ranks that are behind; the others take no part."""
        assert self._loop is not None
        behind = list(message.behind)
        if not behind:
            return None
        takes_part = group.rank in (0, *behind)
        if takes_part:
            self._faults.at("sync", rank=group.rank, step=step)
        self._count_collective()
        if not takes_part:
            return None
        workload = self._loop.workload
        if group.rank == 0:
            header, tensors = self._take_state()
            header["records"] = self._reporter.records_after(message.logged_step)
            return send_state(group, header, tensors, behind)
        header, tensors, moved = receive_state(
            group,
            workload.model,
            behind,
            optimizer=workload.optimizer,
            # If the sender dies, the state of a rank behind may be the newest that is left.
            keep=self._has_state and group.world_size == 1 + len(behind),
            on_overwrite=self._drop_state,
        )
        put_state(workload.model, workload.optimizer, header, tensors, workload.extras)
        self._loop.state.set_counters(header["counters"])
        self._reporter.adopt(header["records"])
        return moved

    def _take_state(self) -> tuple[dict[str, Any], Tensors]:
        assert self._loop is not None
        workload = self._loop.workload
        header, tensors = take_state(workload.model, workload.optimizer, workload.extras)
        return {"counters": self._loop.state.counters(), **header}, tensors

    def _restore(self, group: RankGroup, log_end: int) -> None:
        """Load the newest checkpoint on rank 0, because no trainer holds the state any more."""
        assert self._loop is not None
        assert self._checkpointer is not None
        records: list[dict[str, Any]] | None = []
        if group.rank == 0:
            records = self._checkpointer.restore_newest(logged_step=log_end)
        if records is None and not self._is_fresh:
            # Half of a state was received, and its sender is dead. No trainer has the state any
            # more, so that training starts from the beginning, as in a new trainer.
            self._loop.workload.close()
            self._build()
        self._reporter.adopt(records or [])

    def _save(self, message: SaveState) -> None:
        assert self._checkpointer is not None
        self._beat(phase="saving")
        generation = message.generation
        # Perhaps the rank 0 that had not sent these steps yet is dead: send them from here.
        self._reporter.begin(generation=generation, rank=0, logged_step=message.logged_step)
        if self._loop is not None:
            self._loop.report_evaluations(generation)
        self._checkpointer.starts = list(message.starts)
        self._checkpointer.save_now(generation)
        self._beat(phase="idle")

    def _count_collective(self) -> None:
        """Count a collective, on all ranks alike: the coordinator compares the counts."""
        if self._page is not None:
            self._page.count_collective()

    def _beat(self, phase: str | None = None) -> None:
        """Send the supervisor a heartbeat."""
        if self._page is not None:
            self._page.beat(phase=phase)

    def _progress(self) -> tuple[int, int]:
        return self._loop.progress if self._loop is not None and self._has_state else NO_PROGRESS

    def _send(self, report: TrainerReport) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone: the control thread ends us
            self._reporter.send(report)

    def _report_user_error(self, exc: BaseException, *, generation: int) -> None:
        self._is_busy = False
        if type(exc).__module__.startswith(f"{__package__.partition('.')[0]}."):
            summary, text = str(exc), ""  # an error of ours, whose message needs no traceback
        else:
            summary = f"{type(exc).__name__}: {exc}".partition("\n")[0].rstrip(": ")
            if is_out_of_memory(exc):
                summary += f"; {hint_for_memory(self._config)}"
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
        """Return the code that was running on the GPU, as far as it is known."""
        if self._loop is None or self._bundle is None:
            return ""
        workload = self._loop.workload
        functions = [*workload.objective.functions, type(workload.model).forward]
        lines = code_of_pass(functions, self._bundle.cells)
        return f"The GPU was running the pass that begins in\n{lines}" if lines else ""


def failure_of(group: RankGroup, exc: BaseException) -> Failure:
    """Return the failure that broke a generation, as this rank reports it."""
    if group.failure in (OUT_OF_MEMORY, DISCONNECTED):
        return Failure(error=group.failure, is_excused=True)
    if group.failure == ABORTED:
        return Failure()
    error = group.failure or text_of(exc)
    backend = group.failed_backend or (NCCL if "NCCL" in error else GLOO)
    return Failure(error=error, backend=backend)
