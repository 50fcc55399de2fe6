"""Jobs that never ran: logs made from a number of workers, a throughput and a price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from etrain_jupyter.log import events as t
from etrain_jupyter.log.blocks import Block, Events, step_columns
from etrain_jupyter.notebook.job.history import LatestValues
from etrain_jupyter.rules.costs import JobCosts

START = 1e9
CONFIG: dict[str, Any] = {
    "model": "Net()",
    "data": {"train": "train_set", "eval": "test_set"},
    "loss": "F.cross_entropy",
    "metrics": {"accuracy": "accuracy"},
    "steps": 100,
}


@dataclass
class LoggedJob:
    """A job with a log in memory."""

    id: str
    name: str
    status: str = "finished"
    log: Events = field(default_factory=Events)

    def events(self) -> Events:
        return self.log

    def history(self) -> dict[str, list[Any]]:
        latest = LatestValues()
        latest.add(self.log)
        return latest.columns()

    def add(self, *events: t.Event) -> None:
        """Append events, with consecutive sequence numbers."""
        first = len(self.log) + 1
        self.log.extend([event.with_seq(seq) for seq, event in enumerate(events, first)])

    def add_steps(self, **values: Any) -> None:
        """Append a block of steps, see ``steps_of``."""
        self.log.add_block(steps_of(self.id, len(self.log) + 1, **values))


def steps_of(
    job_id: str,
    first_seq: int,
    *,
    num_steps: int,
    batch: int,
    workers: int,
    step_s: float,
    between_s: float = 0.0,
    phases: Mapping[str, float] | None = None,
    lr: Sequence[float] | None = None,
    first_step: int = 1,
    began_at: float = START,
) -> Block:
    """Return steps of equal duration, ``between_s`` apart, as a block of a log."""
    numbers = np.arange(first_step, first_step + num_steps)
    ends = began_at + np.arange(1, num_steps + 1) * step_s
    ends += np.arange(num_steps) * between_s
    values: dict[str, Any] = {
        "time": ends,
        "generation": 1,
        "step": numbers,
        "samples": batch,
        "loss": 2.0 / np.sqrt(numbers),
        "lr": 0.1 if lr is None else np.asarray(lr),
        "world_size": workers,
        "samples_per_s": batch / step_s,
        "ranks_agree": True,
        **({"compute_s": step_s} if phases is None else phases),
    }
    dtypes = {int: np.int64, float: np.float64, bool: np.bool_}
    columns = {
        name: np.broadcast_to(np.asarray(values.get(name, 0), dtypes[kind]), num_steps)
        for name, kind in step_columns().items()
    }
    return Block(
        job_id=job_id,
        first_seq=first_seq,
        num_events=num_steps,
        places=np.arange(num_steps),
        columns=columns,
        metric_sets=((),),
        metric_set=np.zeros(num_steps, np.int8),
        metrics={},
        others=(),
    )


def logged_job(
    name: str,
    *,
    workers: int = 1,
    samples_per_s: float = 100.0,
    num_steps: int = 100,
    batch: int = 50,
    between_s: float = 0.0,
    phases: Mapping[str, float] | None = None,
    lr: Sequence[float] | None = None,
    scores: Mapping[str, float] | None = None,
    usd_per_worker_h: float | None = None,
    on_demand_usd_per_worker_h: float | None = None,
    num_train_samples: int = 5000,
    device: str = "cpu",
    config: Mapping[str, Any] | None = None,
    job_id: str = "",
) -> LoggedJob:
    """Return a job whose steps all take ``batch / samples_per_s`` seconds."""
    job_id = job_id or f"{name}-00000000"
    common: dict[str, Any] = {"job_id": job_id, "time": START - 60}
    job = LoggedJob(job_id, name)
    job.add(
        t.JobSubmitted(
            **common, name=name, min_workers=1, max_workers=workers,
            config={**CONFIG, **(config or {})},
        ),
        t.WorkerJoined(**common, worker="w0", device=device),
        t.JobPlanned(
            **common, num_train_samples=num_train_samples, num_eval_samples=10,
            global_batch_size=batch, steps_per_epoch=max(1, num_train_samples // batch),
            total_steps=num_steps, num_parameters=1000, num_trained_parameters=1000,
            total_samples=num_steps * batch,
        ),
    )  # fmt: skip
    if num_steps:
        job.add_steps(
            num_steps=num_steps, batch=batch, workers=workers, step_s=batch / samples_per_s,
            between_s=between_s, phases=phases, lr=lr,
        )  # fmt: skip
    elapsed_s = num_steps * batch / samples_per_s + max(0, num_steps - 1) * between_s
    common = {"job_id": job_id, "time": START + elapsed_s}
    if scores:
        loss, metrics = scores.get("loss", 0.5), {k: v for k, v in scores.items() if k != "loss"}
        job.add(
            t.EvalCompleted(
                **common, step=num_steps, epoch=0, samples=10, loss=loss, duration_s=1.0,
                metrics=metrics,
            )
        )  # fmt: skip
    if usd_per_worker_h is not None:
        on_demand = on_demand_usd_per_worker_h or usd_per_worker_h
        job.add(*costs_of(job_id, workers, elapsed_s, usd_per_worker_h, on_demand))
    job.add(t.JobStatusChanged(**common, status="finished"))
    return job


def costs_of(
    job_id: str, workers: int, elapsed_s: float, usd_per_h: float, on_demand_usd_per_h: float
) -> list[t.Event]:
    """Return the costs that the head logs for one node with all workers, in four updates."""
    costs = JobCosts()
    costs.take([], ranks={}, active=[job_id])
    found: list[t.Event] = []
    for part in (0.25, 0.5, 0.75, 1.0):
        worker_h = workers * elapsed_s * part / 3600
        node = SimpleNamespace(
            node_id="n0",
            workers=("w0",),
            machine="",
            spent_usd=worker_h * usd_per_h,
            on_demand_usd=worker_h * on_demand_usd_per_h,
        )
        costs.take([node], ranks={"w0": job_id}, active=[job_id])
        found.append(
            t.CostUpdated(job_id=job_id, time=START + elapsed_s * part, **vars(costs.of(job_id)))
        )
    return found
