"""Build the parts of a job from the notebook's objects, and test them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from etrain_jupyter.bundle.restore import OpenBundle, open_bundle
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.storage.checkpoints import open_store
from etrain_jupyter.trainer.control.faults import FaultInjector
from etrain_jupyter.trainer.control.reporter import Reporter
from etrain_jupyter.trainer.devices import choose_device, facts_of
from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from etrain_jupyter.trainer.scoring.score_process import ProcessScorer
from etrain_jupyter.trainer.state.checkpointer import Checkpointer
from etrain_jupyter.trainer.state.state_sync import StateSync
from etrain_jupyter.trainer.state.train_state import TrainState, WorkPlan
from etrain_jupyter.trainer.workload import Workload, build_workload
from etrain_jupyter.wire.messages import (
    LaunchTrainer,
    TextLogged,
    TrainerHello,
    TrainerReport,
    WarmUpBegun,
)
from etrain_jupyter.wire.progress_page import ProgressPage


@dataclass(frozen=True, kw_only=True)
class BuiltJob:
    """The parts of a job that are built once its code and data have arrived."""

    loop: TrainLoop
    sync: StateSync
    checkpointer: Checkpointer


class JobBuilder:
    """Build a job in this trainer.

    Args:
        change_pending: Set once this rank knows of a planned change.
        is_first: True for the job's first trainer, which logs the warnings.
    """

    def __init__(
        self,
        launch: LaunchTrainer,
        *,
        reporter: Reporter,
        faults: FaultInjector,
        page: ProgressPage | None,
        change_pending: threading.Event,
        is_first: bool,
    ) -> None:
        self._launch = launch
        self._reporter = reporter
        self._faults = faults
        self._page = page
        self._change_pending = change_pending
        self._is_first = is_first
        self.workload: Workload | None = None
        """The job's workload; None until it is built."""

    def enter_folder(self) -> None:
        """Make relative paths and local modules work as in the notebook.

        The notebook's folder must exist here, on the same machine or on a shared file system.
        """
        folder = self._launch.cwd
        if folder and Path(folder).is_dir():
            os.chdir(folder)
            sys.path.insert(0, folder)

    def open_bundle(self, config: TrainConfig) -> OpenBundle:
        """Open the notebook's objects."""
        bundle = open_bundle(Path(self._launch.bundle.path), digest=self._launch.bundle.digest)
        # All trials of a search share a bundle; each trial's expressions contain that trial's
        # values.
        bundle.references |= config.references()
        bundle.install_sources()
        return bundle

    def build(
        self, config: TrainConfig, bundle: OpenBundle, *, before: BuiltJob | None
    ) -> BuiltJob:
        """Build a job and run trial passes.

        Args:
            config: The job.
            bundle: The notebook's objects.
            before: The job previously built in this process, if training restarts from the initial
                weights.

        Raises:
            StateError: If the state cannot be sent or saved.
            Exception: Any error in the notebook's code.
        """
        workload = self.workload = build_workload(
            config,
            bundle,
            choose_device(),
            warn=lambda text: self._send(TextLogged(level="warning", text=text)),
        )
        state = TrainState(workload, config, WorkPlan.of(config, workload))
        loop = TrainLoop(
            state,
            self._reporter.send,
            faults=self._faults,
            page=self._page,
            change_pending=self._change_pending,
            scorer=ProcessScorer(bundle.fileno()) if config.eval.score else None,
        )
        # Do not retry a size that has already run out of memory.
        if before is not None:
            loop.micro.limit_to(before.loop.micro)
        sync = StateSync(
            loop,
            self._reporter,
            faults=self._faults,
            page=self._page,
            has_state=before is not None and before.sync.has_state,
        )
        if self._page is not None:
            self._page.beat()
        self._send(WarmUpBegun(phase="trial"))
        loop.warm_up(is_first=self._is_first)
        # Fail now if the state cannot be sent or saved. Otherwise, the first join or checkpoint
        # would fail, perhaps after hours of training.
        sync.take()
        checkpointer = Checkpointer(
            store=open_store(self._launch.checkpoints),
            state=state,
            job_id=self._launch.job_id,
            send=self._reporter.send,
            records_after=self._reporter.records_after,
            code_digest=bundle.code.digest if bundle.code is not None else "",
            starts=before.checkpointer.starts if before is not None else [],
            page=self._page,
        )
        return BuiltJob(loop=loop, sync=sync, checkpointer=checkpointer)

    def _send(self, report: TrainerReport) -> None:
        # If the supervisor is gone, the control thread exits the process.
        with contextlib.suppress(OSError):
            self._reporter.send(report)


def hello_of(loop: TrainLoop, *, warm_s: float) -> TrainerHello:
    """Return the report of a trainer that is ready, ``warm_s`` seconds after its launch."""
    plan, workload = loop.state.plan, loop.workload
    parameters = list(workload.model.parameters())
    facts = facts_of(workload.device)
    return TrainerHello(
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
            "per_worker_batch_size": loop.state.config.batch.per_worker_batch_size or 0,
            "train_layout": plan.layout.encode() if plan.layout is not None else "",
            "train_digest": workload.train.digest,
            "num_parameters": sum(p.numel() for p in parameters),
            "num_trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        },
    )
