"""Jobs with the options for GPUs: micro batches, compile, precisions, checkpoints, a failed assert.

Each job trains a short time through the public API, on the GPUs that the local pool finds; on a
machine without GPUs, on the CPU, which tests the jobs but measures no GPU. A job is right if it
finishes (``assert``: fails with an error of the notebook), if its loss falls, and if the audit
finds every sample counted once.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import nn

from benchmarks.common import ours, report
from benchmarks.common.workloads import GLOBAL_BATCH_SIZE, NUM_CLASSES
from etrain_jupyter import TrainingJob
from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.events import CheckpointCommitted, StepCompleted, WorkerJoined

NUM_STEPS = 120
CHECKPOINT_EVERY = 20


def failing_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of labels that are out of range: on a GPU, a device-side assert."""
    return nn.functional.cross_entropy(output, target + NUM_CLASSES)


JOBS: dict[str, dict[str, Any]] = {
    "plain": {"workload": "cnn"},
    "micro: auto": {"workload": "mlp", "batch": {"global": GLOBAL_BATCH_SIZE, "micro": "auto"}},
    "compile": {"workload": "cnn", "compile": True},
    "bf16": {"workload": "mlp", "precision": "bf16"},
    "fp16": {"workload": "mlp", "precision": "fp16"},
    "checkpoints": {"workload": "mlp", "checkpoint": {"every": f"{CHECKPOINT_EVERY} steps"}},
    "backend: gloo": {"workload": "mlp", "backend": "gloo"},
    "assert": {"workload": "cnn", "loss": "benchmarks.steps.gpu:failing_loss"},
}
"""The keys of each job in addition to those of ``ours.submit``."""
FAILING = frozenset({"assert"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--world-size", type=int, default=1, help="workers of each job (default 1)")
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run every job, one after the other on one cluster."""
    num_steps = NUM_STEPS // 3 if options.quick else NUM_STEPS
    jobs = {}
    with ours.cluster():
        for name in options.job or JOBS:
            jobs[name] = run(name, num_steps, options.world_size)
            print(f"gpu: {name}: {jobs[name]['outcome']}", flush=True)
    return {
        "benchmark": "gpu",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "world_size": options.world_size,
        "jobs": jobs,
        "is_ok": all(job["is_ok"] for job in jobs.values()),
    }


def run(name: str, num_steps: int, world_size: int) -> dict[str, Any]:
    """Run one job and check its end, its loss and its audit."""
    keys = dict(JOBS[name])
    workload = keys.pop("workload")
    try:
        job = ours.submit(
            workload, num_steps=num_steps, world_size=world_size,
            **{"workers": {"min": world_size, "max": world_size}, **keys},
        )  # fmt: skip
        job.wait()
    except EtrainError as exc:
        return {"is_ok": False, "outcome": f"not submitted: {exc}"}
    return figures_of(job, should_fail=name in FAILING)


def figures_of(job: TrainingJob, *, should_fail: bool) -> dict[str, Any]:
    """Return the figures of an ended job, and whether it ended as it should."""
    events = job.events()
    steps = [event for event in events if isinstance(event, StepCompleted)]
    error = _error_of(job)
    figures: dict[str, Any] = {
        "outcome": f"{job.status}{f': {error}' if error else ''}",
        "devices": sorted({event.device for event in events if isinstance(event, WorkerJoined)}),
    }
    if should_fail:
        is_own = any(text in error for text in ("out of bounds", "device-side assert"))
        return {**figures, "is_ok": job.status == "failed" and is_own}
    half = len(steps) // 2
    losses = [step.loss for step in steps]
    audit = job.audit()
    stalls = [event.stall_s for event in events if isinstance(event, CheckpointCommitted)]
    is_ok = job.status == "finished" and audit.ok and len(steps) > 1
    return {
        **figures,
        "is_ok": is_ok and statistics.mean(losses[half:]) < statistics.mean(losses[:half]),
        "audit_ok": audit.ok,
        "losses": [losses[0], losses[-1]] if losses else [],
        "samples_per_s": report.steady_rate([step.time for step in steps], GLOBAL_BATCH_SIZE)
        if len(steps) > 3
        else 0.0,
        "stall_ms": 1e3 * statistics.median(stalls) if stalls else 0.0,
    }


def _error_of(job: TrainingJob) -> str:
    try:
        job.raise_for_status()
    except EtrainError as exc:
        return str(exc)
    return ""


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    rows = []
    for name, one in result["jobs"].items():
        losses = " -> ".join(f"{loss:.3f}" for loss in one.get("losses", []))
        rate = f"{one['samples_per_s']:.0f}" if "samples_per_s" in one else ""
        stall = f"{one['stall_ms']:.1f} ms" if one.get("stall_ms") else ""
        outcome = one["outcome"].splitlines()[0][:100]
        rows.append((name, "yes" if one["is_ok"] else "NO", outcome, losses, rate, stall))
    head = ("job", "as it should", "outcome", "loss", "samples/s", "checkpoint stall")
    return f"{result['world_size']} worker(s), {result['device']}\n\n{report.table(head, rows)}"
