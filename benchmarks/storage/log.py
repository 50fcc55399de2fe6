"""Time and memory to read the log of a long job, from its lines and from its segments.

The benchmark writes a log of ``--steps`` steps, with an evaluation and the timings of four workers
every 500 steps. It then reads the log in three ways, each in a separate process: ``lines`` parses
every line into an object and folds over the objects, as attaching did before segments existed;
``segments`` attaches as the package does today; ``no segments`` does the same after the segments
have been deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import report
from etrain_jupyter.log.event_log import EventLog, read_events
from etrain_jupyter.log.events import (
    EvalCompleted,
    Event,
    GenerationFormed,
    JobStatusChanged,
    JobSubmitted,
    RankTimed,
    StepCompleted,
)
from etrain_jupyter.log.segments import compact, read_log, segments_of
from etrain_jupyter.notebook.audit import audit_log
from etrain_jupyter.notebook.dashboard.job_view import JobView
from etrain_jupyter.notebook.job.history import LatestValues

BAR_S = 2.0
"""Maximum seconds from attaching to ``history()`` of a million steps."""
WAYS = ("lines", "segments", "no segments")
_SECTION = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--steps", type=int, help="steps in the log (default 1,000,000)")
    parser.add_argument("--audit", action="store_true", help="measure the audit too")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write a log, then read it in each of the three ways."""
    num_steps = options.steps or (100_000 if options.quick else 1_000_000)
    with tempfile.TemporaryDirectory(prefix="etrain-log-") as folder:
        path = Path(folder) / "events.jsonl"
        write(path, num_steps)
        started = time.process_time()
        num_segments = compact(path)
        compact_s = time.process_time() - started
        sizes = {
            "lines_bytes": path.stat().st_size,
            "segments_bytes": sum(f.stat().st_size for f in segments_of(path).iterdir()),
        }
        ways = {}
        for way in WAYS:
            if way == "no segments":
                shutil.rmtree(segments_of(path))
            ways[way] = read_elsewhere(path, way, "audit" if options.audit else "")
    return {
        "benchmark": "log",
        "steps": num_steps,
        "history_s": ways["segments"]["attach_s"] + ways["segments"]["history_s"],
        "bar_s": BAR_S,
        "num_segments": num_segments,
        "compact_s": compact_s,
        **sizes,
        "ways": ways,
    }


def write(path: Path, num_steps: int, *, job_id: str = "log") -> None:
    """Write the log of a job of ``num_steps`` steps."""
    log = EventLog(path, fsync_every_s=None)
    log.append(_beginning(job_id))
    for start in range(1, num_steps + 1, _SECTION):
        log.append(list(_section(job_id, start, min(start + _SECTION, num_steps + 1))))
    end: dict[str, Any] = {"time": 1.7e9 + num_steps / 37, "generation": 1}
    log.append([JobStatusChanged(job_id=job_id, **end, status="finished")])
    log.close()


def _beginning(job_id: str) -> Iterator[Event]:
    common: dict[str, Any] = {"job_id": job_id, "time": 1.7e9}
    yield JobSubmitted(**common, name=job_id, min_workers=1, max_workers=4)
    yield JobStatusChanged(**common, status="running")
    workers = [f"worker-{n}" for n in range(4)]
    yield GenerationFormed(
        **common, generation=1, why="start", world_size=4, ranks=workers, backend="gloo"
    )


def _section(job_id: str, start: int, stop: int) -> Iterator[Event]:
    common: dict[str, Any] = {"job_id": job_id, "generation": 1}
    for n in range(start, stop):
        values: dict[str, Any] = {
            **{"time": 1.7e9 + n / 37, "step": n, "epoch": n // 5000, "first": n % 5000 * 128},
            **{"samples": 128, "sample_checksum": (n * 2654435761) % 2**39, "loss": 9 / (n + 7)},
            **{"lr": 1e-3 / (1 + n / 1e5), "world_size": 4, "samples_per_s": 4000 + n % 997 / 7},
            **{"metrics": {"accuracy": 1 - 1 / (n + 3)}, "data_s": n % 89 / 1e5},
            **{"compute_s": 0.02 + n % 83 / 1e5, "communication_s": n % 71 / 3e4},
            **{"optimizer_s": n % 61 / 1e5, "ranks_agree": True, "skipped": False},
        }
        yield StepCompleted(**common, **values)
    last: dict[str, Any] = {**common, "time": 1.7e9 + stop / 37, "step": stop - 1}
    yield EvalCompleted(**last, epoch=0, samples=1000, loss=9 / stop, duration_s=0.1)
    for rank in range(4):
        times: dict[str, Any] = {
            **{"worker": f"worker-{rank}", "rank": rank, "world_size": 4, "samples": 16000},
            **{"num_steps": stop - start, "elapsed_s": 13.0, "data_s": 1.0, "compute_s": 9.0},
            **{"communication_s": 2.0, "optimizer_s": 1.0, "evaluation_s": 0.0},
            **{"checkpoint_s": 0.0, "wait_s": 0.5, "metrics_s": 0.0, "core_wait_s": 0.0},
            **{"cpu_s": 12.0},
        }
        yield RankTimed(**last, **times)


def read_elsewhere(path: Path, way: str, *more: str) -> dict[str, float]:
    """Read a log in a new process, so that its memory can be measured separately."""
    command = [sys.executable, "-m", "benchmarks.storage.log", str(path), way, *filter(None, more)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def read(path: Path, way: str, with_audit: bool) -> dict[str, float]:
    """Attach to a log like ``job.history()`` and the dashboard; return CPU seconds and MB."""
    before = _memory_mb()
    latest, view = LatestValues(), JobView("log")
    events, replay_s = _timed(lambda: read_events(path) if way == "lines" else read_log(path))
    _, fold_s = _timed(lambda: latest.add(events))
    memory_mb = _memory_mb() - before
    columns, history_s = _timed(latest.columns)
    _, dashboard_s = _timed(lambda: view.add(events))
    found = {
        "rows": len(columns["step"]),
        "attach_s": replay_s + fold_s,
        "history_s": history_s,
        "memory_mb": memory_mb,
        "dashboard_s": dashboard_s,
    }
    if with_audit:
        found["audit_s"] = _timed(lambda: audit_log(events))[1]
    return found


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and its CPU time in seconds, which other processes hardly affect."""
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def _memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    head = ("read from", "attach, s", "history(), s", "dashboard, s", "memory, MB", "audit, s")
    rows = [
        (
            way,
            f"{found['attach_s']:.2f}",
            f"{found['history_s']:.2f}",
            f"{found['dashboard_s']:.2f}",
            f"{found['memory_mb']:.0f}",
            f"{found['audit_s']:.1f}" if "audit_s" in found else "",
        )
        for way, found in result["ways"].items()
    ]
    return report.table(head, rows)


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]), sys.argv[2], "audit" in sys.argv[3:])))
