"""A rank dies: how long until training goes on?

A job runs at full size; again and again one process is killed with SIGKILL, and the job is given
time to grow back. Measured is the time from the signal to the first step that the next generation
commits, less one ordinary step (the median of those before the kill). Steps of the old generation
that were committed after the signal do not count as recovery.

Targets: ``trainer`` kills a random rank's process, ``rank0`` that of rank 0, ``worker`` the Dask
worker process of a random rank, and with it its trainer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import ours, report
from etrain_jupyter import TrainingJob
from etrain_jupyter.events.types import Event, GenerationFormed, StepCompleted, WorkerLost

TARGETS = ("trainer", "rank0", "worker")
GROW_TIMEOUT_S = 120.0
RECOVER_TIMEOUT_S = 60.0
STEPS_PER_KILL = 1000
"""More than are ever needed, but an end: a job outlives the benchmark that loses it."""
SETTLE_STEPS = 10
"""Steps at full size before the next kill: they give the ordinary step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen on the command line."""
    parser.add_argument("--kills", type=int, help="kills a target (default 20)")
    parser.add_argument("--world-size", type=int, action="append", help="default: 4")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--workload", choices=("cnn", "mlp"), action="append", help="default: cnn")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every target at every size; random trainers at the first size stand at the top."""
    num_kills = options.kills or (4 if options.quick else 20)
    targets = options.target or TARGETS
    sizes = {
        f"{workload}, {size} ranks": measure_job(workload, size, targets, num_kills)
        for workload in options.workload or ["cnn"]
        for size in options.world_size or [4]
    }
    first = next(iter(sizes.values()))["targets"][targets[0]]
    headline = {key: first[key] for key in ("median_s", "p95_s", "phases")}
    return {"benchmark": "recovery", **headline, "sizes": sizes}


def measure_job(
    workload: str, world_size: int, targets: tuple[str, ...], num_kills: int
) -> dict[str, Any]:
    """Kill ``num_kills`` times a target in one job, and check afterwards that nothing was lost."""
    chance = random.Random(0)
    num_steps = STEPS_PER_KILL * num_kills * len(targets)
    with ours.cluster():
        job = ours.submit(workload, num_steps=num_steps, world_size=world_size)
        found = {}
        for target in targets:
            kills = []
            for count in range(num_kills):
                kill = kill_once(job, world_size, target, chance)
                kills.append(kill)
                head = f"recovery {workload}, {world_size} ranks, {target} {count + 1}/{num_kills}"
                print(f"{head}: {kill['beyond_step_s'] * 1e3:.0f} ms beyond a step", flush=True)
            found[target] = summary(kills)
        job.stop()
        status = job.wait(timeout=60)
        audit = job.audit()
    if not audit.ok:
        print(audit)
    return {"targets": found, "status": status, "audit_ok": audit.ok, "steps": job.step}


def kill_once(
    job: TrainingJob, world_size: int, target: str, chance: random.Random
) -> dict[str, float]:
    """Wait for the full size, kill one process and time what follows."""
    settled = wait_for(lambda: settled_steps(job, world_size), GROW_TIMEOUT_S, "full size", job)
    step_s = statistics.median(b.time - a.time for a, b in itertools.pairwise(settled))
    generation = settled[-1].generation
    pid = choose_pid(job, target, chance)
    killed_at = time.time()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: has_recovered(job, generation), RECOVER_TIMEOUT_S, "the next step", job)
    return timing(job.events(), generation, killed_at, step_s)


def settled_steps(job: TrainingJob, world_size: int) -> list[StepCompleted]:
    """The steps of the present generation, once it is of full size and has made enough of them."""
    generation = job.generation
    recent = [s for s in ours.steps_of(job) if s.generation == generation]
    is_full = job.world_size == world_size and len(recent) > SETTLE_STEPS
    return recent if is_full and is_complete(job, world_size) else []


def is_complete(job: TrainingJob, world_size: int) -> bool:
    """Whether every rank is at work, so that the kill hits a job that is whole."""
    return len([worker for worker in job.workers() if worker["rank"] is not None]) == world_size


def choose_pid(job: TrainingJob, target: str, chance: random.Random) -> int:
    """The process to kill, as the coordinator knows it."""
    ranks = {w["rank"]: w for w in job.workers() if w["rank"] is not None}
    victim = ranks[0 if target == "rank0" else chance.choice(sorted(ranks))]
    return int(victim["pid" if target == "worker" else "trainer_pid"])


def has_recovered(job: TrainingJob, generation: int) -> list[StepCompleted]:
    """The steps that later generations than this one have committed."""
    return [step for step in ours.steps_of(job) if step.generation > generation]


def timing(
    events: list[Event], generation: int, killed_at: float, step_s: float
) -> dict[str, float]:
    """Take the phases of one recovery out of the events, in seconds from the kill on."""
    lost = first_of(events, WorkerLost, lambda event: event.time >= killed_at)
    formed = first_of(events, GenerationFormed, lambda event: event.generation > generation)
    step = first_of(events, StepCompleted, lambda event: event.generation > generation)
    return {
        "detect_s": lost.time - killed_at,
        "form_s": formed.time - lost.time,
        "first_step_s": step.time - formed.time,
        "total_s": step.time - killed_at,
        "ordinary_step_s": step_s,
        "beyond_step_s": step.time - killed_at - step_s,
    }


def first_of(events: list[Event], kind: type[Event], holds: Callable[[Event], bool]) -> Event:
    """The first event of a kind for which ``holds``."""
    return next(event for event in events if isinstance(event, kind) and holds(event))


def wait_for(
    condition: Callable[[], list[StepCompleted]], timeout_s: float, what: str, job: TrainingJob
) -> list[StepCompleted]:
    """Ask again and again, gently, until the answer is not empty."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline or job.status not in ("submitted", "waiting", "running"):
            raise TimeoutError(f"{job!r} did not reach {what} within {timeout_s:.0f} s")
        time.sleep(0.25)
    return answer


def summary(kills: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians and p95, over all and of each phase."""
    phases = {
        name.removesuffix("_s"): report.median_and_p95([kill[name] for kill in kills])
        for name in ("detect_s", "form_s", "first_step_s", "total_s", "ordinary_step_s")
    }
    beyond = [kill["beyond_step_s"] for kill in kills]
    return {**report.median_and_p95(beyond), "phases": phases, "kills": kills}


def table_of(result: dict[str, Any]) -> str:
    """Return the table for the reader; times in milliseconds."""
    phases = ("detect", "form", "first_step", "total", "ordinary_step")
    head = ("job", "killed", "kills", "beyond a step: median", "p95", *phases, "audit")
    rows = []
    for name, size in result["sizes"].items():
        for target, found in size["targets"].items():
            medians = [f"{found['phases'][phase]['median_s'] * 1e3:.0f}" for phase in phases]
            times = [f"{found[key] * 1e3:.0f}" for key in ("median_s", "p95_s")]
            audit = "ok" if size["audit_ok"] else "NOT OK"
            rows.append((name, target, str(len(found["kills"])), *times, *medians, audit))
    return "Milliseconds; phases are medians.\n\n" + report.table(head, rows)
