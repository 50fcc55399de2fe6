"""Peak memory of each process while a divided optimizer state is saved and restored.

A job with ``shard: optimizer`` trains one large embedding with AdamW on three ranks and saves its
state. It is then resumed on other numbers of ranks. The figures are ``VmHWM``, the most memory that
a process has had so far, when the first step after the restore is committed. Every rank has the
weights, their gradients and the buffers of the exchange, in addition to its part of the state.

``s3`` is an S3 server in a separate process on the same machine (moto), whose time is that of
copying an object for each range of it.
"""

from __future__ import annotations

import argparse
import os
import re
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.common import ours, report
from etrain_jupyter import TrainingJob, launch
from etrain_jupyter.config import parse_mapping
from etrain_jupyter.log.events import (
    CheckpointCommitted,
    GenerationReady,
    JobRestored,
    LogLine,
    StepCompleted,
)
from etrain_jupyter.notebook.job.plan import Plan
from etrain_jupyter.testing.s3_server import S3Server

SAVED_BY = 3
RESTORED_BY = (2, 4)
NUM_STEPS = 3
"""Steps of each part of the job."""
WIDTH = 256
PLACES = ("folder", "s3")
ROWS = "ETRAIN_BENCH_ROWS"
"""Environment variable with the number of rows of the embedding."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--gb", type=float, help="weights and optimizer state (default 2)")
    parser.add_argument("--place", choices=PLACES, action="append", help="default: both")
    parser.add_argument("--world-size", type=int, action="append", help="default: 2 and 4")


class Table(nn.Module):
    """One embedding, which has nearly all parameters, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(int(os.environ[ROWS]), WIDTH)
        self.classify = nn.Linear(WIDTH, 10)

    def forward(self, x_B: torch.Tensor) -> torch.Tensor:
        """Return ``(B, 10)`` logits."""
        logits_BC: torch.Tensor = self.classify(self.rows(x_B))
        return logits_BC


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices of rows and their labels."""
    generator = torch.Generator().manual_seed(0)
    rows_B = torch.randint(int(os.environ[ROWS]), (64,), generator=generator)
    return rows_B, rows_B % 10


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each place and number of ranks."""
    gigabytes = options.gb or (0.2 if options.quick else 2.0)
    # AdamW has two moments per weight, all of four bytes.
    os.environ[ROWS] = str(int(gigabytes * 1e9 / 12 / WIDTH))
    sizes = options.world_size or list(RESTORED_BY)
    places = {place: measure_place(place, sizes) for place in options.place or list(PLACES)}
    return {"benchmark": "restore", "gb": gigabytes, "saved_by": SAVED_BY, "places": places}


def measure_place(place: str, sizes: list[int]) -> dict[str, Any]:
    """Save once and restore at each number of ranks, one after the other."""
    with ExitStack() as stack:
        to = None
        if place == "s3":
            server = stack.enter_context(S3Server())
            stack.enter_context(patch.dict(os.environ, server.environment))
            server.make_bucket("bench")
            to = "s3://bench/runs"
        stack.enter_context(ours.cluster())
        with Peaks() as peaks:
            job = launch.submit(plan_of(SAVED_BY, NUM_STEPS, to))
            peaks.follow(job)
            job.result()
        [saved] = [event for event in job.events() if isinstance(event, CheckpointCommitted)]
        found: dict[str, Any] = {
            "save": {"seconds": saved.duration_s, "bytes": saved.size_bytes, **peaks.summary()}
        }
        for number, size in enumerate(sizes):
            found[str(size)] = restore(job, size, NUM_STEPS * (number + 2), to)
            print(f"restore, {place}, {size} ranks: {found[str(size)]}", flush=True)
    return found


def plan_of(world_size: int, num_steps: int, to: str | None) -> Plan:
    """Return the plan of the job on this many ranks, up to this step."""
    body = {
        "name": "bench-restore",
        "model": "benchmarks.faults.restore:Table",
        "data": {"train": "benchmarks.faults.restore:make_rows"},
        "loss": "torch.nn.functional:cross_entropy",
        "optimizer": {"name": "AdamW", "lr": 1e-3},
        "shard": "optimizer",
        "batch": {"global": 16},
        "steps": num_steps,
        "workers": {"min": world_size, "max": world_size},
        "checkpoint": {"every": f"{ours.NEVER} steps", "keep": 2, "to": to},
    }
    return launch.plan_job(parse_mapping(body, {}), {})


def restore(job: TrainingJob, world_size: int, num_steps: int, to: str | None) -> dict[str, Any]:
    """Resume the job and return the figures of its restore."""
    num_before = len(job.events())
    with Peaks() as peaks:
        launch.resume(job, plan_of(world_size, num_steps, to))
        peaks.follow(job, after=num_before)
        job.result()
    events = list(job.events())[num_before:]
    restored = [event for event in events if isinstance(event, JobRestored)]
    assert restored, "the job was not restored"
    ready = next(event for event in events if isinstance(event, GenerationReady))
    lines = [event.text for event in events if isinstance(event, LogLine)]
    read = next((line for line in lines if line.startswith("each rank read its part")), "")
    return {
        "seconds": ready.sync_s,
        "read_mb": [int(number) for number in re.findall(r"\d+", read)],
        **peaks.summary(),
    }


class Peaks:
    """Follows the peak memory of a job's processes, in a thread."""

    def __init__(self) -> None:
        self._job: TrainingJob | None = None
        self._after = 0
        self._trainers: dict[int, int] = {}
        """Rank of each trainer, by process."""
        self._peaks: dict[int, int] = {}
        """Bytes, by process, before the first step was committed."""
        self._ends: dict[int, int] = {}
        """Bytes, by process, when it was last seen."""
        self._kinds: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-peaks")

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def follow(self, job: TrainingJob, after: int = 0) -> None:
        """Begin; ``after`` is the number of events before this part of the job."""
        self._after, self._job = after, job

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            job = self._job
            if job is None:
                continue
            for worker in job.workers():
                if worker["rank"] is not None and worker.get("trainer_pid"):
                    self._trainers[int(worker["trainer_pid"])] = worker["rank"]
            recent = list(job.events())[self._after :]
            has_stepped = any(isinstance(event, StepCompleted) for event in recent)
            for pid, kind in {**service_processes(), **dict.fromkeys(self._trainers, "")}.items():
                if peak := peak_bytes(pid):
                    self._ends[pid] = peak
                    self._kinds[pid] = kind
                    if not has_stepped or pid not in self._peaks:
                        self._peaks[pid] = peak

    def summary(self) -> dict[str, Any]:
        """Return megabytes: by rank, and the largest of each kind of other processes."""
        ranks = sorted((rank, pid) for pid, rank in self._trainers.items() if pid in self._peaks)
        others: dict[str, int] = {}
        for pid, kind in self._kinds.items():
            if kind:
                others[kind] = max(others.get(kind, 0), self._ends[pid] // 1_000_000)
        return {
            "ranks_mb": [self._peaks[pid] // 1_000_000 for _, pid in ranks],
            "ranks_at_the_end_mb": [self._ends[pid] // 1_000_000 for _, pid in ranks],
            "others_mb": others,
        }


def service_processes() -> dict[int, str]:
    """Return scheduler and workers of this benchmark's cluster, by process."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue
        match = re.search(r"etrain_jupyter\.(head|worker)\.main", command)
        if match and os.environ["ETRAIN_STATE"] in command:
            found[int(folder.name)] = match[1]
    return found


def peak_bytes(pid: int) -> int:
    """Return the most resident memory that a process has had; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", text)
    return int(match[1]) * 1024 if match else 0


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    rows = []
    for place, found in result["places"].items():
        for size, figures in found.items():
            others = ", ".join(f"{k} {v}" for k, v in sorted(figures["others_mb"].items()))
            read = figures.get("read_mb", [])
            rows.append(
                [
                    place,
                    f"save, {SAVED_BY} ranks" if size == "save" else f"restore, {size} ranks",
                    f"{figures['seconds']:.1f}",
                    ", ".join(str(number) for number in read[:-1]),
                    ", ".join(str(number) for number in figures["ranks_mb"]),
                    ", ".join(str(number) for number in figures["ranks_at_the_end_mb"]),
                    others,
                ]
            )
    head = (
        "to",
        "",
        "s",
        "read by each rank, MB",
        "peak of each rank, MB",
        "with the save",
        "others",
    )
    return report.table(head, rows)
