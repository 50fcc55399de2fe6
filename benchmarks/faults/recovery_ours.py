"""Kills and planned changes of ``recovery`` in one etrain-jupyter job."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

from benchmarks.common import ours, report, timeline
from etrain_jupyter import TrainingJob
from etrain_jupyter.log.events import StepCompleted

GROW_TIMEOUT_S = 180.0
RECOVER_TIMEOUT_S = 60.0
NOTICE_S = 30.0
STEPS_PER_CHANGE = 1000
"""More steps than needed. The limit ends a job whose benchmark has crashed."""
SETTLE_STEPS = 10
"""Steps at full size before the next kill; they determine the ordinary step."""
KILLED = ("trainer", "rank0", "worker")
"""Trainer of a random rank, trainer of rank 0, Dask worker process of a random rank."""
PLANNED = "planned"
"""A random worker receives a notice and leaves; a replacement joins."""


def measure_job(
    workload: str, world_size: int, targets: tuple[str, ...], num_changes: int
) -> dict[str, Any]:
    """Make ``num_changes`` changes per target, and audit the job at the end."""
    rng = random.Random(0)
    num_steps = STEPS_PER_CHANGE * num_changes * len(targets)
    found: dict[str, Any] = {}
    with ours.cluster():
        job = ours.submit(workload, num_steps=num_steps, world_size=world_size)
        for target in targets:
            head = f"recovery {workload}, {world_size} ranks, {target}"
            if target == PLANNED:
                found |= planned_changes(job, world_size, num_changes, rng, head)
            else:
                kills = [
                    kill_once(job, world_size, target, rng, f"{head} {count + 1}/{num_changes}")
                    for count in range(num_changes)
                ]
                found[target] = summary(kills)
        job.stop()
        status = job.wait(timeout=60)
        audit = job.audit()
    if not audit.ok:
        print(audit)
    return {"targets": found, "status": status, "audit_ok": audit.ok, "steps": job.step}


def kill_once(
    job: TrainingJob, world_size: int, target: str, rng: random.Random, head: str
) -> dict[str, float]:
    """Wait for the full size, kill one process and measure the recovery."""
    settled = settle(job, world_size)
    generation = settled[-1].generation
    rank = 0 if target == "rank0" else rng.randrange(world_size)
    victim = next(worker for worker in job.workers() if worker["rank"] == rank)
    killed_at = time.time()
    os.kill(int(victim["pid" if target == "worker" else "trainer_pid"]), signal.SIGKILL)
    ours.wait_for_generation(job, generation, RECOVER_TIMEOUT_S)
    step_s = timeline.ordinary_step([step.time for step in settled])
    kill = timeline.recovery(
        job.events(), generation=generation, killed_at=killed_at, step_s=step_s
    )
    print(f"{head}: {kill['beyond_step_s'] * 1e3:.0f} ms beyond a step", flush=True)
    return kill


def planned_changes(
    job: TrainingJob, world_size: int, count: int, rng: random.Random, head: str
) -> dict[str, Any]:
    """Preempt a worker with a notice and let a replacement join, ``count`` times."""
    first = settle(job, world_size)[-1].generation
    for number in range(count):
        generation = settle(job, world_size)[-1].generation
        rank = rng.randrange(world_size)
        victim = next(worker for worker in job.workers() if worker["rank"] == rank)
        job.preempt(worker=victim["worker"], notice_s=NOTICE_S)
        ours.wait_for_generation(job, generation, RECOVER_TIMEOUT_S)
        print(f"{head} {number + 1}/{count}: rank {rank} has left", flush=True)
    settle(job, world_size)
    found = timeline.stalls(job.events(), least_steps=SETTLE_STEPS // 2, first=first)
    return {
        why: stall_summary([stall for stall in found if stall.why == why])
        for why in ("leave", "join")
    }


def settle(job: TrainingJob, world_size: int) -> list[StepCompleted]:
    """Wait until all ranks have committed some steps together; return those steps."""
    return ours.wait_for(
        lambda: ours.settled_steps(job, world_size, SETTLE_STEPS), GROW_TIMEOUT_S, "full size", job
    )


def summary(kills: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median and p95 of the whole recovery and of each phase."""
    phases = {
        name.removesuffix("_s"): report.median_and_p95([kill[name] for kill in kills])
        for name in (*timeline.PHASES, "total_s", "ordinary_step_s")
    }
    beyond = [kill["beyond_step_s"] for kill in kills]
    return {**report.median_and_p95(beyond), "phases": phases, "kills": kills}


def stall_summary(found: list[timeline.Stall]) -> dict[str, Any]:
    """Return the median and p95 of the stalls beyond a step, or no figures without stalls."""
    if not found:
        return {"stalls": []}
    beyond = [stall.beyond_step_s for stall in found]
    return {**report.median_and_p95(beyond), "stalls": [vars(stall) for stall in found]}
