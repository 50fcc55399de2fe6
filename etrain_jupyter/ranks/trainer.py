"""A rank's life: build, warm up, then generation after generation until it is released."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from pathlib import Path

import torch

from etrain_jupyter.bundle.restore import OpenBundle, open_bundle
from etrain_jupyter.checkpoints import open_store
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.elastic.stimuli import NO_PROGRESS
from etrain_jupyter.ranks.channel import Channel, Message
from etrain_jupyter.ranks.checkpointer import Checkpointer
from etrain_jupyter.ranks.process_group import BroadcastStore, CommunicationError, RankGroup
from etrain_jupyter.ranks.reporter import Reporter
from etrain_jupyter.ranks.schedule import WorkPlan
from etrain_jupyter.ranks.state import put_state, receive_state, send_state, take_state
from etrain_jupyter.ranks.train_loop import TrainLoop
from etrain_jupyter.ranks.workload import build_workload


class Trainer:
    """One job's trainer process, from the order to start until its release.

    Two threads: the main one runs user code; the control thread reads the channel, so that an
    abort or a pending change is taken in while a step runs.
    """

    def __init__(self, channel: Channel, order: Message) -> None:
        self._channel = channel
        self._order = order
        self._name: str = order["trainer"]
        self._reporter = Reporter(channel)
        self._inbox: queue.SimpleQueue[tuple[Message, RankGroup | None]] = queue.SimpleQueue()
        self._group: RankGroup | None = None
        self._store: BroadcastStore | None = None
        self._bundle: OpenBundle | None = None
        self._loop: TrainLoop | None = None
        self._checkpointer: Checkpointer | None = None
        self._config: TrainConfig
        self._has_state = False
        self._is_busy = True
        """Whether the main thread runs user code; set to False before it says that it is done."""

    # --- control thread ---

    def read_commands(self) -> None:
        """Read the channel until the supervisor is gone, then end the process with it."""
        for message in self._channel.messages():
            self._take(message)
        os._exit(0)

    def _take(self, message: Message) -> None:
        op = message["op"]
        is_present = self._group is not None and message.get("generation") == self._group.generation
        if op == "form":
            self._inbox.put((message, self._prepare(message)))
        elif op == "release" and self._is_busy:
            os._exit(0)  # the job was stopped at once: nobody waits for the end of this step
        elif op in ("save", "release"):
            self._inbox.put((message, None))
        elif op == "checkpoint" and self._checkpointer is not None:
            self._checkpointer.ask()
        elif op == "store" and is_present and self._store is not None:
            self._store.put(message["key"], message["value"])
        elif op == "change" and is_present and self._loop is not None:
            self._loop.change_pending.set()
        elif op == "abort" and is_present and self._group is not None:
            self._group.abort()

    def _prepare(self, message: Message) -> RankGroup:
        """Make the generation's store and group here: no key and no abort comes too early."""
        generation = message["generation"]

        def publish(key: str, value: bytes) -> None:
            told = {"op": "store", "generation": generation, "key": key, "value": value}
            self._channel.send(told)

        if self._loop is not None:
            self._loop.change_pending.clear()
        self._store = BroadcastStore(publish)
        self._group = RankGroup(
            generation=generation,
            rank=message["rank"],
            world_size=message["world_size"],
            store=self._store,
            host=self._order["host"],
        )
        return self._group

    # --- main thread ---

    def run(self) -> None:
        """Do what the coordinator asks for until it releases this trainer."""
        threading.Thread(target=self.read_commands, name="etrain-control", daemon=True).start()
        try:
            self._warm_up()
        except BaseException as exc:
            self._tell_user_error(exc, generation=0)
        while True:
            message, group = self._inbox.get()
            if message["op"] == "release":
                break
            if message["op"] == "save":
                self._save(message["generation"])
            elif group is not None:
                self._live(message, group)
        if self._checkpointer is not None:
            self._checkpointer.join()
        if self._loop is not None:
            self._loop.workload.close()
        self._reporter.close()

    def _warm_up(self) -> None:
        started = time.monotonic()
        self._config = TrainConfig.model_validate(self._order["config"])
        self._enter_folder()
        self._bundle = open_bundle(self._order["bundle"])
        self._bundle.install_sources()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        workload = build_workload(self._config, self._bundle, device)
        plan = WorkPlan.of(self._config, workload)
        self._loop = TrainLoop(workload, self._config, plan, self._reporter.send)
        self._loop.warm_up()
        self._checkpointer = Checkpointer(
            store=open_store(self._order["checkpoints"]),
            loop=self._loop,
            job_id=self._order["job_id"],
            config=self._config,
            send=self._reporter.send,
        )
        self._loop.after_step.append(self._checkpointer.after_step)
        self._tell_hello(plan, time.monotonic() - started)

    def _enter_folder(self) -> None:
        """Work in the notebook's folder, if it is there: relative paths mean the same."""
        folder = self._order.get("cwd") or ""
        if folder and Path(folder).is_dir():
            os.chdir(folder)
            sys.path.insert(0, folder)

    def _tell_hello(self, plan: WorkPlan, warm_s: float) -> None:
        assert self._loop is not None
        model = self._loop.workload.model
        self._is_busy = False
        self._reporter.send(
            {
                "op": "hello",
                "pid": os.getpid(),
                "warm_s": warm_s,
                "device": str(self._loop.workload.device),
                "plan": {
                    "num_train_samples": plan.num_train,
                    "num_eval_samples": plan.num_eval,
                    "global_batch_size": plan.global_batch_size,
                    "steps_per_epoch": plan.steps_per_epoch,
                    "total_steps": plan.total_steps,
                    "num_parameters": sum(p.numel() for p in model.parameters()),
                },
            }
        )

    def _live(self, message: Message, group: RankGroup) -> None:
        """Take part in one generation, and report where it left this rank."""
        assert self._loop is not None
        self._loop.in_step = False
        self._is_busy = True
        try:
            why = self._step_through(message, group)
        except CommunicationError:
            why = "failed"
        except BaseException as exc:
            # A collective that breaks inside the backward pass can come out as any exception.
            if not group.failure:
                group.close()
                self._tell_user_error(exc, generation=group.generation)
                return
            why = "failed"
        group.close()
        undone, self._loop.in_step = self._loop.in_step, False
        self._is_busy = False
        report = {"progress": list(self._progress()), "why": why, "undone": undone}
        self._tell({"op": "report", "generation": group.generation, **report})

    def _step_through(self, message: Message, group: RankGroup) -> str:
        assert self._loop is not None
        group.form()
        if message["restore"]:
            self._restore(group)
        if message["behind"]:
            self._share_state(group, message["behind"])
        self._has_state = True
        module = self._loop.wrap(group)
        self._reporter.begin(
            generation=group.generation, rank=group.rank, logged_step=message["logged_step"]
        )
        self._tell({"op": "formed", "generation": group.generation})
        return self._loop.run(group, module)

    def _share_state(self, group: RankGroup, behind: list[int]) -> None:
        """Copy rank 0's state to the ranks that are behind; the others only take part."""
        assert self._loop is not None
        workload = self._loop.workload
        if group.rank == 0:
            header, tensors = take_state(workload.model, workload.optimizer)
            send_state(group, {"counters": self._loop.counters(), **header}, tensors)
            return
        if group.rank in behind:
            self._has_state = False  # until the last tensor is here
        header, tensors = receive_state(group)
        if group.rank in behind:
            put_state(workload.model, workload.optimizer, header, tensors)
            self._loop.set_counters(header["counters"])

    def _restore(self, group: RankGroup) -> None:
        """Nobody holds the state any more: rank 0 goes back to the newest checkpoint."""
        assert self._loop is not None
        assert self._checkpointer is not None
        self._reporter.forget()
        if group.rank == 0:
            step = self._checkpointer.restore_newest()
            self._tell({"op": "restored", "generation": group.generation, "step": step})

    def _save(self, generation: int) -> None:
        assert self._checkpointer is not None
        self._checkpointer.save_now(generation)

    def _progress(self) -> tuple[int, int]:
        return self._loop.progress if self._loop is not None and self._has_state else NO_PROGRESS

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone; the control thread ends us
            self._reporter.send(message)

    def _tell_user_error(self, exc: BaseException, *, generation: int) -> None:
        self._is_busy = False
        if type(exc).__module__.startswith(f"{__package__.partition('.')[0]}."):
            summary, text = str(exc), ""  # we refused something, and our message says it all
        else:
            summary = f"{type(exc).__name__}: {exc}".partition("\n")[0].rstrip(": ")
            text = self._bundle.format_user_traceback(exc) if self._bundle is not None else ""
        self._tell(
            {
                "op": "user_error",
                "generation": generation,
                "progress": list(self._progress()),
                "error": summary,
                "traceback": text,
            }
        )
