"""Run an etrain-jupyter job for ``churn``, with or without kills; its audit gives the counts."""

from __future__ import annotations

import os
import signal
from typing import Any

from benchmarks.common import ours
from benchmarks.common.schedule import Kill

TIMEOUT_S = 900.0


def run_ours(
    workload: str,
    kills: tuple[Kill, ...],
    *,
    num_steps: int,
    world_size: int,
    checkpoint_every: int,
) -> dict[str, Any]:
    """Train once; kill a rank's trainer as soon as the step of each kill is committed."""
    with ours.cluster():
        job = ours.submit(
            workload,
            num_steps=num_steps,
            world_size=world_size,
            checkpoint_every=checkpoint_every,
        )
        for kill in kills:
            ours.wait_for_step(job, kill.step, TIMEOUT_S)
            ranks = sorted(w["rank"] for w in job.workers() if w["rank"] is not None)
            os.kill(ours.trainer_of(job, ranks[kill.rank % len(ranks)]), signal.SIGKILL)
        job.wait(timeout=TIMEOUT_S)
        audit = job.audit()
    if not audit.ok:
        raise RuntimeError(f"the audit failed: {audit}")
    times = {step.step: step.time for step in ours.steps_of(job)}
    return {
        "duration_s": times[num_steps] - times[num_steps // 10],
        "executed": audit.steps_executed,
        "target": num_steps,
        "steps_undone": audit.steps_undone,
        "steps_rolled_back": audit.steps_rolled_back,
        "samples_lost": sum(epoch.missing for epoch in audit.epochs),
        "steps_with_wrong_samples": sum(epoch.repeated for epoch in audit.epochs),
        "leftovers": 0,
    }
