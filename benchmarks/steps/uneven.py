"""Throughput of ranks with unequal speeds, by ``batch.split``, next to the sum of their speeds.

A rank is slowed by stopping its trainer for a part of every period; with ``--workload sleeping``,
it sleeps for longer instead, so that the speeds do not depend on the load of the machine. The speed
of each rank alone is measured in a job of one worker.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ours, report
from benchmarks.steps import uneven_virtual
from benchmarks.steps.uneven_work import BATCH as SLEEPING_BATCH
from benchmarks.steps.uneven_work import SPEEDS_FILE, set_speed
from etrain_jupyter import TrainingJob
from etrain_jupyter.log.events import StepCompleted

BAR = 0.95
CASES = {
    "2 ranks": (1.0, 0.5),
    # 1, 1, 0.5 and 0.25, reduced so that two cores suffice for all of them.
    "4 ranks": (0.6, 0.6, 0.3, 0.15),
}
SLEEPING_CASES = {"2 ranks": (1.0, 0.5), "4 ranks": (1.0, 1.0, 0.5, 0.25)}
PERIOD_S = 0.04
"""Period in which a trainer runs and stops."""
BATCH = 512
WINDOW_S = 20.0
"""Duration of a measurement, in seconds."""
SETTLE_STEPS = 40
SETTLE_ALONE = 5
"""Steps before a measurement, also of one rank alone, whose share never changes."""
TIMEOUT_S = 240.0


class Throttle:
    """Stops a process for a part of every period.

    Args:
        speed: Fraction of the time in which the process runs; it can be changed at any time.
    """

    def __init__(self, pid: int, speed: float) -> None:
        self.speed = speed
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self.speed * PERIOD_S):
            if self.speed >= 1:
                continue
            # The process may have ended.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGSTOP)
                time.sleep((1 - self.speed) * PERIOD_S)
                os.kill(self._pid, signal.SIGCONT)

    def change(self, speed: float) -> None:
        """Change the speed."""
        self.speed = speed

    def close(self) -> None:
        """Let the process run."""
        self._over.set()
        self._thread.join()


class Sleeper:
    """Sets the speed of a process of the workload ``sleeping``."""

    def __init__(self, pid: int, speed: float) -> None:
        self._pid = pid
        self.change(speed)

    def change(self, speed: float) -> None:
        """Change the speed."""
        set_speed(self._pid, speed)

    def close(self) -> None:
        """Let the process run at full speed."""
        self.change(1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--rounds", type=int, help="runs of each kind (default 3, quick 1)")
    parser.add_argument("--workload", default="cnn", choices=("cnn", "mlp", "sleeping"))
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; repeatable")
    parser.add_argument("--virtual", action="store_true", help="only the rules, in virtual time")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the ranks alone and together, in turns."""
    if options.virtual:
        changes = uneven_virtual.measure_changes()
        return {"benchmark": "uneven", "bar": BAR, "cases": {}, "changed": [], "virtual": changes}
    rounds = options.rounds or (1 if options.quick else 3)
    window_s = WINDOW_S / 2 if options.quick else WINDOW_S
    cases: dict[str, Any] = {}
    folder = tempfile.TemporaryDirectory(prefix="etrain-bench-")
    speeds_file = Path(folder.name) / "speeds.json"
    speeds_file.write_text("{}")
    os.environ[SPEEDS_FILE] = str(speeds_file)
    for name in options.case or CASES:
        speeds = (SLEEPING_CASES if options.workload == "sleeping" else CASES)[name]
        runs = [run_round(options.workload, speeds, window_s) for _ in range(rounds)]
        cases[name] = {
            "speeds": speeds,
            "runs": runs,
            **{
                key: statistics.median(run[key] for run in runs)
                for key in ("even_ratio", "auto_ratio")
            },
            "audit_ok": all(run["audit_ok"] for run in runs),
        }
        print(name, {key: cases[name][key] for key in ("even_ratio", "auto_ratio")}, flush=True)
    changed = [run_change(options.workload, window_s) for _ in range(rounds)]
    folder.cleanup()
    return {"benchmark": "uneven", "bar": BAR, "cases": cases, "changed": changed}


def run_round(workload: str, speeds: Sequence[float], window_s: float) -> dict[str, Any]:
    """Measure every rank alone, then all together with even shares and with shares by speed."""
    with ours.cluster():
        alone = {
            speed: run(workload, (speed,), "even", window_s)["rate"]
            for speed in sorted(set(speeds))
        }
        even = run(workload, speeds, "even", window_s)
        auto = run(workload, speeds, "auto", window_s)
    total = sum(alone[speed] for speed in speeds)
    return {
        "alone": {str(speed): rate for speed, rate in alone.items()},
        "even": even,
        "auto": auto,
        "even_ratio": even["rate"] / total,
        "auto_ratio": auto["rate"] / total,
        "audit_ok": even["audit_ok"] and auto["audit_ok"],
    }


def run(workload: str, speeds: Sequence[float], split: str, window_s: float) -> dict[str, Any]:
    """Return the samples per second of one job, and the samples of each rank."""
    with running(workload, speeds, split) as (job, _):
        first = settle(job, SETTLE_STEPS if len(speeds) > 1 else SETTLE_ALONE)
        time.sleep(window_s)
        steps = [step for step in ours.steps_of(job) if step.step >= first]
    return {"rate": rate_of(steps), "steps": len(steps), **ended(job)}


def run_change(workload: str, window_s: float) -> dict[str, Any]:
    """Exchange the speeds of two ranks in mid-run; return the rates before and after it."""
    with ours.cluster(), running(workload, (1.0, 0.5), "auto") as (job, throttles):
        first = settle(job, SETTLE_STEPS)
        time.sleep(window_s)
        changed_at = time.time()
        throttles[0].change(0.5)
        throttles[1].change(1.0)
        time.sleep(2 * window_s)
        steps = [step for step in ours.steps_of(job) if step.step >= first]
        before = [step for step in steps if step.time < changed_at]
        after = [step for step in steps if step.time > changed_at + window_s]
        # The end of the last eight steps below 90 % of the final rate, in the first window.
        final = rate_of(after)
        adapting = [one for one in steps if changed_at < one.time < changed_at + window_s]
        slow = [found for found in windows(adapting, 8) if rate_of(found) < 0.9 * final]
        return {
            "before": rate_of(before),
            "after": final,
            "seconds_to_adapt": slow[-1][-1].time - changed_at if slow else 0.0,
            **ended(job),
        }


def windows(steps: list[StepCompleted], size: int) -> Iterator[list[StepCompleted]]:
    """Yield all sequences of ``size`` steps."""
    for first in range(len(steps) - size + 1):
        yield steps[first : first + size]


@contextlib.contextmanager
def running(
    workload: str, speeds: Sequence[float], split: str
) -> Iterator[tuple[TrainingJob, list[Throttle] | list[Sleeper]]]:
    """Run a job whose ranks have these speeds."""
    world_size = len(speeds)
    keys: dict[str, Any] = {"batch": {"global": BATCH, "split": split}}
    if workload == "sleeping":
        keys = {
            "model": "benchmarks.steps.uneven_work:build_model",
            "data": {"train": "benchmarks.steps.uneven_work:make_points"},
            "loss": "benchmarks.steps.uneven_work:sleeping_loss",
            "batch": {"global": SLEEPING_BATCH, "split": split},
        }
    job = ours.submit(
        workload,
        num_steps=ours.NEVER,
        world_size=world_size,
        workers={"min": world_size, "max": world_size},
        **keys,
    )
    ours.wait_for(lambda: ours.settled_steps(job, world_size, 5), TIMEOUT_S, "full size", job)
    pids = [ours.trainer_of(job, rank) for rank in range(world_size)]
    throttles: list[Throttle] | list[Sleeper] = (
        [Sleeper(pid, speed) for pid, speed in zip(pids, speeds, strict=True)]
        if workload == "sleeping"
        else [Throttle(pid, speed) for pid, speed in zip(pids, speeds, strict=True)]
    )
    try:
        yield job, throttles
    finally:
        for throttle in throttles:
            throttle.close()
        job.stop()
        job.wait(timeout=60)


def settle(job: TrainingJob, count: int) -> int:
    """Wait for ``count`` more steps, and return the number of the last one."""
    wanted = job.step + count
    ours.wait_for_step(job, wanted, TIMEOUT_S)
    return wanted


def rate_of(steps: Sequence[StepCompleted]) -> float:
    """Return samples per second."""
    return sum(step.samples for step in steps[1:]) / (steps[-1].time - steps[0].time)


def ended(job: TrainingJob) -> dict[str, Any]:
    """Return the audit and the shares that the job has logged."""
    texts = [str(getattr(event, "text", "")) for event in job.events()]
    shares = [
        text.partition("train on ")[2].partition(" samples")[0]
        for text in texts
        if "samples each" in text
    ]
    return {"audit_ok": job.audit().ok, "shares": shares}


def table_of(result: dict[str, Any]) -> str:
    """Return the tables."""
    if virtual := result.get("virtual"):
        return _virtual_table(virtual)
    rows = [
        (
            name,
            ", ".join(f"{speed:g}" for speed in case["speeds"]),
            f"{case['even_ratio']:.2f}",
            f"{case['auto_ratio']:.2f}",
            "; ".join(
                run["auto"]["shares"][-1] if run["auto"]["shares"] else "" for run in case["runs"]
            ),
            str(case["audit_ok"]),
        )
        for name, case in result["cases"].items()
    ]
    head = ("case", "speeds", "even / sum", "auto / sum", "shares", "audit")
    changes = [
        (
            f"{one['before']:.0f}",
            f"{one['after']:.0f}",
            f"{one['seconds_to_adapt']:.1f} s",
            str(one["audit_ok"]),
        )
        for one in result["changed"]
    ]
    return "\n\n".join(
        [
            report.table(head, rows),
            report.table(("samples/s before", "after", "time to adapt", "audit"), changes),
        ]
    )


def _virtual_table(changes: Sequence[dict[str, Any]]) -> str:
    head = ("speeds", "then", "noise", "steps to adapt", "time", "changes before", "after")
    rows = [
        (
            ", ".join(f"{speed:g}" for speed in one["before"]),
            ", ".join(f"{speed:g}" for speed in one["after"]),
            f"{one['noise']:g}",
            f"{one['steps']:g}",
            f"{one['seconds']:.1f} s",
            f"{one['changes_before']:.1f}",
            f"{one['changes_after']:.1f}",
        )
        for one in changes
    ]
    return report.table(head, rows)
