"""Train an elastic job with a process per worker, whose number changes at known steps.

The ranks wait before the step of a change until as many workers are ready. So the schedule does not
depend on the speed of the machine, on which twelve processes share the cores.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import etrain_jupyter
from benchmarks import ours
from benchmarks.squad import ProcessorTime, trainers_of
from benchmarks.vision_work import MOMENTUM, TASKS, VisionTask, read
from etrain_jupyter import TrainingJob
from etrain_jupyter.log.events import EvalScored
from etrain_jupyter.pools.local.pool import LocalPool
from etrain_jupyter.process.cluster_settings import ClusterSettings

TIMEOUT_S = 1800.0
POLL_S = 0.2
GATE_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class GatedStep:
    """A ``step`` that waits before certain updates until a file exists."""

    task: str
    folder: str
    updates: tuple[int, ...]
    """Numbers of the updates, from 1."""
    seed: int

    def path(self, update: int) -> Path:
        """Return the file that opens the gate of an update."""
        return Path(self.folder) / f"open-{update}"

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of a batch."""
        update = current_update(self.seed)
        if model.training and update in self.updates:
            while not self.path(update).exists():
                time.sleep(GATE_POLL_S)
        return TASKS[self.task].step(model, batch)


def current_update(seed: int) -> int:
    """Return the number of the update that a rank computes, from 1.

    The seed of a step is the only value from which a model can derive it, see
    ``trainer.seeds.seed_all``.

    Args:
        seed: Seed of the job.
    """
    return torch.initial_seed() // 4_099 - seed * 1_000_003


def run_processes(
    task: VisionTask,
    keys: dict[str, Any],
    seed: int,
    *,
    data: str,
    phases: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Train once.

    Args:
        task: The task.
        keys: Keys of the cell that select the policy.
        seed: Seed of the job.
        data: Folder with the stored samples.
        phases: Number of workers, and the steps after which it changes; the last phase continues
            to the end of the job.

    Returns:
        The same as ``vision_emulated.run_emulated``.
    """
    # The ranks wait at a gate for longer than a hung rank would be given.
    os.environ["ETRAIN_HANG_S"] = str(TIMEOUT_S)
    cpu_s = ProcessorTime()
    with tempfile.TemporaryDirectory(prefix="etrain-bench-") as folder, ours.cluster():
        # By default, the local pool has fewer workers than the largest phase.
        LocalPool(settings=ClusterSettings(max_cpu_slots=max(size for size, _ in phases))).up()
        ends = [sum(steps for _, steps in phases[: place + 1]) for place in range(len(phases) - 1)]
        step = GatedStep(
            task=task.name, folder=folder, updates=tuple(end + 1 for end in ends), seed=seed
        )
        size = phases[0][0]
        job = etrain_jupyter.distributed(
            name=f"bench-{task.name}",
            model=task.model,
            data={
                "train": lambda: read(data, task.name, "train"),
                "eval": lambda: read(data, task.name, "test"),
                "collate": task.batches(),
            },
            step=step,
            optimizer={"name": "SGD", "lr": task.lr, "momentum": MOMENTUM},
            schedule={"decay": task.decay},
            eval={
                "every": f"{task.epochs} epochs",
                "predict": task.predict,
                "score": task.score_records,
                "loss": False,
            },
            checkpoint={"every": f"{ours.NEVER} steps"},
            epochs=task.epochs,
            seed=seed,
            workers={"min": size, "max": size},
            **keys,
        )
        for end, (size, _) in zip(ends, phases[1:], strict=True):
            _follow(job, cpu_s, lambda end=end: job.step >= end)
            job.scale(min=size, max=size)
            _follow(job, cpu_s, lambda size=size: num_ready(job) >= size)
            step.path(end + 1).touch()
        _follow(job, cpu_s, lambda: job.is_over)
        job.result()
        steps = ours.steps_of(job)
        scores = [event.scores for event in job.events() if isinstance(event, EvalScored)]
        audit = job.audit()
    return {
        "scores": scores[-1],
        "losses": [event.loss for event in steps],
        "sizes": [event.world_size for event in steps],
        "cpu_s": cpu_s.total(),
        "audit_ok": audit.ok,
    }


def num_ready(job: TrainingJob) -> int:
    """Return the number of workers that train, or can do so after the current step."""
    return sum(worker["state"] in ("training", "warm") for worker in job.workers())


def _follow(job: TrainingJob, cpu_s: ProcessorTime, is_reached: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_reached():
        cpu_s.track(trainers_of(job))
        if time.monotonic() > deadline or (job.is_over and not is_reached()):
            raise TimeoutError(f"{job!r} did not reach the next change within {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
