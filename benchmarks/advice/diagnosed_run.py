"""Run one slow job, diagnose it, and apply its remedy.

A process of its own, because a job with a slow link runs in a network namespace.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

import etrain_jupyter
from benchmarks.advice.diagnosed_jobs import BODY, JOBS, MARKER, SlowJob
from benchmarks.common import ours
from etrain_jupyter.insight.diagnosis.report import Diagnosis
from etrain_jupyter.log.events import RankTimed, StepCompleted
from etrain_jupyter.notebook.job.training_job import TrainingJob

TIMEOUT_S = 120.0
SETTLE_STEPS = 12
"""Steps of a generation that do not count."""


def run(name: str, *, window_s: float, rounds: int) -> dict[str, Any]:
    """Return the verdict on a job, and the measured and predicted gain of its remedy."""
    slow = JOBS[name]
    with ours.cluster():
        job = submit(slow, {})
        ours.wait_for(lambda: num_timed(job, slow.workers) >= 24, TIMEOUT_S, "reports", job)
        before = [rate_of(job, window_s, slow.workers)]
        began_at = time.monotonic()
        diagnosis = etrain_jupyter.diagnose(job)
        took_s = time.monotonic() - began_at
        print(diagnosis, flush=True)
        found = {"name": name, "cause": slow.cause, "took_s": took_s, **facts_of(diagnosis)}
        line = diagnosis.remedy.line if diagnosis.remedy is not None else ""
        if not line or found["gain"] is None:
            job.stop(now=True)
            job.wait()
            return found
        after: list[float] = []
        if line.startswith("%etrain"):
            # The command changes the running job.
            after.append(apply_command(job, line, window_s, slow.workers))
            job.stop(now=True)
            job.wait()
        else:
            job.stop(now=True)
            job.wait()
            changed = yaml.safe_load(line)
            for number in range(rounds):
                after.append(rate_of_new(slow, changed, window_s))
                if number + 1 < rounds:
                    before.append(rate_of_new(slow, {}, window_s))
    found["before"], found["after"] = before, after
    found["real_gain"] = statistics.median(after) / statistics.median(before) - 1
    return found


def facts_of(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the verdict and its remedy for the JSON."""
    main = diagnosis.verdict.main
    remedy = diagnosis.remedy
    return {
        "verdict": main.cause if main else "",
        "reason": diagnosis.verdict.reason,
        "confidence": main.confidence if main else "",
        "share": main.share if main else None,
        "workers": list(main.workers) if main else [],
        "remedy": remedy.line if remedy else "",
        "gain": remedy.gain if remedy else None,
        "text": str(diagnosis),
    }


def submit(slow: SlowJob, changed: dict[str, Any]) -> TrainingJob:
    """Start the job with some keys changed."""
    body = {**BODY, "name": "slow", "steps": ours.NEVER, **slow.keys}
    body["workers"] = {"min": 1, "max": slow.workers}
    job = etrain_jupyter.distributed({**body, **changed})
    ours.wait_for(lambda: job.world_size == slow.workers, TIMEOUT_S, "workers", job)
    return job


def rate_of_new(slow: SlowJob, changed: dict[str, Any], window_s: float) -> float:
    """Return the throughput of a new job."""
    job = submit(slow, changed)
    try:
        return rate_of(job, window_s, slow.workers)
    finally:
        job.stop(now=True)
        job.wait()


def rate_of(job: TrainingJob, window_s: float, workers: int) -> float:
    """Return the samples per second of a generation, over a window of its steps."""
    ours.wait_for(lambda: len(steps_of(job, workers)) > SETTLE_STEPS, TIMEOUT_S, "steps", job)
    skipped = len(steps_of(job, workers))
    time.sleep(window_s)
    steps = steps_of(job, workers)[skipped - 1 :]
    return sum(one.samples for one in steps[1:]) / (steps[-1].time - steps[0].time)


def steps_of(job: TrainingJob, workers: int) -> list[StepCompleted]:
    """Return the steps of the newest generation if it has this number of workers."""
    steps = [event for event in job.events() if isinstance(event, StepCompleted)]
    newest = max((one.generation for one in steps), default=0)
    return [one for one in steps if one.generation == newest and one.world_size == workers]


def num_timed(job: TrainingJob, workers: int) -> int:
    """Return the number of steps that all workers of the newest generation have reported."""
    counts: dict[tuple[int, int], int] = {}
    for event in job.events():
        if isinstance(event, RankTimed) and event.world_size == workers:
            key = (event.generation, event.rank)
            counts[key] = counts.get(key, 0) + event.num_steps
    newest = max((generation for generation, _ in counts), default=0)
    mine = [count for (generation, _), count in counts.items() if generation == newest]
    return min(mine) if len(mine) == workers else 0


def apply_command(job: TrainingJob, line: str, window_s: float, workers: int) -> float:
    """Apply ``preempt`` or ``scale``, and return the throughput afterwards."""
    words = line.split()
    if words[1] == "scale":
        job.scale(max=int(words[2]))
        return rate_of(job, window_s, int(words[2]))
    job.preempt(words[2], notice_s=120)
    # The prediction is for training without the worker, so the pool must not replace it.
    job.scale(max=workers - 1)
    return rate_of(job, window_s, workers - 1)


def main() -> None:
    """Run the job that the command line names, and write the result as JSON."""
    name, path, window_s, rounds = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.environ[MARKER] = f"{folder}/slow"
        ours.prepare()
        result = run(name, window_s=float(window_s), rounds=int(rounds))
    Path(path).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
