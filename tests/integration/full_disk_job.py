"""Run a job whose run store fills up during the run and is freed later; print results as JSON.

    unshare --mount python -m tests.integration.full_disk_job FOLDER SECONDS

It mounts a file system of 2 MB at ``FOLDER/runs`` in a mount namespace, which disappears with the
last process that uses it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import etrain_jupyter
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.events import (
    CheckpointFailed,
    GenerationFormed,
    JobRestored,
    LogLine,
    StepCompleted,
    StepUndone,
    WorkerLost,
)
from etrain_jupyter.pools.local import LocalPool
from tests.integration.slow_jobs import PATIENCE_S, until

DISK_BYTES = 2_000_000
LEFT_BYTES = 150_000
"""Space that other files leave for the job's log and checkpoints at first."""
STEPS_PER_S = 60
"""Additional steps of the job per second of full disk; its whole log must fit on the disk."""
SHOW = "import sys; from etrain_jupyter.cli import main; main(['show', sys.argv[1]])"


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))
    return x, (x.sum(dim=1) > 0).long()


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(0.005)
    return F.cross_entropy(output, target)


BODY: dict[str, Any] = {
    "model": lambda: nn.Linear(8, 2),
    "data": {"train": make_data},
    "loss": slow_loss,
    "optimizer": {"name": "AdamW", "lr": 0.01},
    "batch": {"global": 16},
    "workers": {"min": 2, "max": 2},
    "checkpoint": {"every": "100 steps"},
}


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def run(folder: Path, full_s: float) -> dict[str, Any]:
    runs = folder / "runs"
    os.environ |= {"ETRAIN_STATE": str(folder / "state"), "ETRAIN_RUNS": str(runs)}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    epochs = (900 + int(STEPS_PER_S * full_s)) // 6
    job = etrain_jupyter.distributed(BODY | {"epochs": epochs})
    until(lambda: job.step > 20, "training")
    (runs / "others").write_bytes(bytes(max(0, free_bytes(runs) - LEFT_BYTES)))
    before = pids_of(job)
    until(lambda: "the log cannot be written" in job.reason, "a full disk")
    step = job.step
    time.sleep(full_s)
    shown = until(lambda: say_why(job.id), "an explanation by etrain show")
    meanwhile = {"status": job.status, "reason": job.reason, "step": job.step, "shown": shown}
    num_free = free_bytes(runs)
    after = pids_of(job)
    (runs / "others").unlink()
    until(lambda: job.step > step, "a step after the disk was freed")
    status = job.wait(PATIENCE_S)
    log = list(read_events(job.record.log_path))
    steps = [event.step for event in log if isinstance(event, StepCompleted)]
    report = job.audit()
    remarks = [event.text for event in log if isinstance(event, LogLine)]
    return {
        "status": status,
        "num_planned": 6 * epochs,
        "num_steps": len(set(steps)),
        "num_repeated": len(steps) - len(set(steps)),
        "num_undone": sum(isinstance(event, StepUndone) for event in log),
        "num_lost": sum(isinstance(event, WorkerLost) for event in log),
        "num_restored": sum(isinstance(event, JobRestored) for event in log),
        "num_failed_checkpoints": sum(isinstance(event, CheckpointFailed) for event in log),
        "num_generations": sum(isinstance(event, GenerationFormed) for event in log),
        "is_audit_ok": report.ok,
        "audit": str(report),
        "pids_before": before,
        "pids_after": after,
        "step_when_full": step,
        "bytes_free_meanwhile": num_free,
        "meanwhile": meanwhile,
        "recovered": [text for text in remarks if "could not be written for" in text],
    }


def say_why(job_id: str) -> str:
    """Return the output of ``etrain show`` if it explains why the log lags behind, else ``""``.

    On a busy machine, its request to the scheduler may time out.
    """
    command = [sys.executable, "-c", SHOW, job_id]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout if "cannot be written" in done.stdout else ""


def pids_of(job: Any) -> list[list[int]]:
    return sorted([worker["pid"], worker["trainer_pid"]] for worker in job.workers())


def main() -> None:
    folder, full_s = Path(sys.argv[1]), float(sys.argv[2])
    runs = folder / "runs"
    runs.mkdir(parents=True)
    options = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(runs)], check=True)
    try:
        print(json.dumps(run(folder, full_s)))
    finally:
        LocalPool().down(timeout_s=10.0)


if __name__ == "__main__":
    main()
