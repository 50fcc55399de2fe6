"""Peak memory of every process for a job with large notebook objects.

A job of the same shape with small objects runs first on the same cluster. It gives the baseline
that is subtracted from every figure. ``peak`` is the largest resident size of a process
(``VmHWM``), including the pages of mapped files. ``held`` is the proportional size (``Pss``) of
all trainers together at the end of the job; it counts a page that several processes map only once.
The job trains every sample once, so it reads all of the data.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import etrain_jupyter
from benchmarks.common import ours, report
from etrain_jupyter.log.events import TERMINAL_STATUSES

WIDTH = 1000
BAR = 1.3
"""Maximum peak of a trainer that passes, as a multiple of the bundle's size."""
ROLES = {
    "etrain_jupyter.trainer.main": "trainer",
    "etrain_jupyter.worker.main": "supervisor",
    "etrain_jupyter.head.main": "head",
    "etrain_jupyter.head.keeper": "keeper",
}
"""Role by module in a process's command line."""
POLL_S = 0.1
JOB_S = 600.0

Peaks = dict[tuple[str, int], int]
"""Largest resident bytes, by role and process id."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--mb", type=int, help="size of the data in MB (default 500)")
    parser.add_argument("--world-size", type=int, default=4, help="workers (default 4)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the small job, then the large one."""
    size_mb = options.mb or (100 if options.quick else 500)
    with ours.cluster():
        small, small_pss, _ = run_job(1, options.world_size)
        large, large_pss, first_step_s = run_job(size_mb, options.world_size)
    num_bytes = size_mb << 20
    peaks = {}
    for role in ("kernel", "head", "supervisor", "trainer"):
        before = max(peak for (known, _), peak in small.items() if known == role)
        after = max(peak for (known, _), peak in large.items() if known == role)
        peaks[role] = max(0, after - before)
    return {
        "benchmark": "bundle",
        "size_bytes": num_bytes,
        "world_size": options.world_size,
        "peak_bytes": peaks,
        "trainer_ratio": peaks["trainer"] / num_bytes,
        "bar": BAR,
        "held_bytes": max(0, large_pss - small_pss),
        "first_step_s": first_step_s,
    }


def build_model() -> nn.Module:
    """Return a model that needs almost no memory."""
    return nn.Linear(WIDTH, 10)


def run_job(size_mb: int, world_size: int) -> tuple[Peaks, int, float]:
    """Train one epoch over ``size_mb`` MB of data.

    Returns:
        The peaks of all processes, the Pss of the trainers in bytes, and the seconds from the call
        until the first step was committed.
    """
    rows = (size_mb << 20) // (4 * WIDTH)
    train_set = torch.ones(rows, WIDTH), torch.zeros(rows, dtype=torch.int64)
    watch = Watch(world_size)
    started = time.monotonic()
    with watch:
        job = etrain_jupyter.distributed(
            name="bundle",
            model="benchmarks.storage.bundle:build_model",
            data={"train": train_set},
            loss="torch.nn.functional:cross_entropy",
            batch={"global": max(world_size, rows // 20)},
            epochs=1,
            workers={"min": world_size, "max": world_size},
        )
        ours.wait_for_step(job, 1, JOB_S)
        first_step_s = time.monotonic() - started
        deadline = time.monotonic() + JOB_S
        while job.status not in TERMINAL_STATUSES:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{job!r} did not end within {JOB_S:.0f} s")
            time.sleep(POLL_S)
    if job.status != "finished":
        raise RuntimeError(f"{job!r} has {job.status}: {job.reason}")
    return watch.peaks, watch.trainers_pss, first_step_s


class Watch:
    """Record the peak memory of the cluster's processes while a job runs."""

    def __init__(self, world_size: int) -> None:
        self.peaks: Peaks = {}
        self._world_size = world_size
        self._pss: dict[int, int] = {}
        """Largest proportional size of each trainer, including the fork server."""
        # This process already holds the data. Count only the memory that it needs in addition.
        Path("/proc/self/clear_refs").write_text("5")
        self._own = kilobytes(Path("/proc/self/status"), "VmRSS:") << 10
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    @property
    def trainers_pss(self) -> int:
        """Total proportional size of the trainers that held the data."""
        return sum(sorted(self._pss.values())[-self._world_size :])

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        self._note("kernel", os.getpid(), less=self._own)
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                words = " ".join(process.info["cmdline"] or ())
                role = next((role for part, role in ROLES.items() if part in words), None)
                if role is None or not is_ours(process):
                    continue
                self._note(role, process.pid)
                if role == "trainer":
                    pss = kilobytes(Path(f"/proc/{process.pid}/smaps_rollup"), "Pss:") << 10
                    self._pss[process.pid] = max(self._pss.get(process.pid, 0), pss)

    def _note(self, role: str, pid: int, *, less: int = 0) -> None:
        peak = (kilobytes(Path(f"/proc/{pid}/status"), "VmHWM:") << 10) - less
        self.peaks[role, pid] = max(self.peaks.get((role, pid), 0), peak)


def is_ours(process: psutil.Process) -> bool:
    """Return whether a process belongs to the cluster of this benchmark."""
    return process.environ().get("ETRAIN_STATE") == os.environ["ETRAIN_STATE"]


def kilobytes(path: Path, key: str) -> int:
    """Return a figure in kB from a file in /proc, or 0 if the process has ended.

    >>> kilobytes(Path("/proc/self/status"), "VmHWM:") > 1000
    True
    """
    lines = path.read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    size = result["size_bytes"]
    rows = [
        (role, f"{peak / 2**20:.0f}", f"{peak / size:.2f}")
        for role, peak in result["peak_bytes"].items()
    ]
    held = result["held_bytes"]
    rows.append(("all trainers (held)", f"{held / 2**20:.0f}", f"{held / size:.2f}"))
    head = ("process", "peak, MB", "times the bundle")
    what = f"{size / 2**20:.0f} MB on {result['world_size']} workers"
    return f"{what}; first step after {result['first_step_s']:.1f} s\n" + report.table(head, rows)
