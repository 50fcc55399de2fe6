"""Recovery of a peer: the time from SIGKILL of a rank until the ranks commit a step again.

A peer that restarts from a checkpoint repeats earlier steps first. So the benchmark measures two
times: until the next committed step, whether new or repeated, and until the first new step.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.step_log import Execution, changes, committed_at, ordinary_step
from benchmarks.peers.run import PeerRun, last_whole
from benchmarks.peers.systems import ElasticRun, System, new_task

STEPS = 1_000_000
"""More steps than needed; the run is stopped after the last kill."""
CHECKPOINT_EVERY = 50
TIMEOUT_S = 240.0
SETTLE_STEPS = 10
POLL_S = 0.02


def measure_peer(system: System, workload: str, world_size: int, num_kills: int) -> dict[str, Any]:
    """Kill ranks, and for ``torchrun`` whole nodes, in one run."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="etrain-bench-") as parent:
        task = new_task(
            Path(parent),
            workload=workload,
            num_steps=STEPS,
            world_size=world_size,
            checkpoint_every=CHECKPOINT_EVERY,
        )
        run = system.start(task)
        with run:
            head = f"recovery {workload}, {world_size} ranks, {system.name}"
            found = {
                "trainer": summary(
                    [
                        kill_rank(run, rng, f"{head} {count + 1}/{num_kills}")
                        for count in range(num_kills)
                    ]
                )
            }
            if isinstance(run, ElasticRun):
                found["node"] = summary([kill_node(run, head)])
            settle(run)
            gaps = changes(run.history())
        joins = [c.gap_s - c.ordinary_s for c in gaps if c.after > c.before and c.ordinary_s]
    first = found["trainer"]
    headline = {key: first[key] for key in ("median_s", "p95_s", "regained_median_s")}
    return {
        **headline,
        "version": system.version(),
        "checkpoint_every": CHECKPOINT_EVERY,
        "targets": found,
        "join": report.median_and_p95(joins) if joins else None,
        "leftovers": run.leftovers,
    }


def kill_rank(run: PeerRun, rng: random.Random, head: str) -> dict[str, float]:
    """Kill the process of a random rank and measure the recovery."""
    settled = settle(run)
    killed_at = run.kill(rng.choice(sorted(run.ranks())))
    return follow(run, settled, killed_at, head)


def kill_node(run: ElasticRun, head: str) -> dict[str, float]:
    """Kill an agent and its worker; start a new agent once the others have recovered."""
    settled = settle(run)
    agent = run.agents.pop()
    worker = run.worker_of(agent)
    killed_at = time.time()
    agent.kill()
    worker.kill()
    agent.wait()
    kill = follow(run, settled, killed_at, f"{head}, node")
    run.add_agent()
    return kill


def settle(run: PeerRun) -> list[Execution]:
    """Wait until all ranks have committed some steps together; return those steps."""

    def settled() -> list[Execution]:
        steps = last_whole(run.history(), run.task.world_size)
        return (
            steps if len(steps) > SETTLE_STEPS and len(run.ranks()) == run.task.world_size else []
        )

    return wait_for(run, settled, "full size")


def follow(run: PeerRun, settled: list[Execution], killed_at: float, head: str) -> dict[str, float]:
    """Wait for the next group's steps; return the recovery times, measured from the kill."""
    old = settled[-1].attempt

    def later() -> list[Execution]:
        done = run.history().committed()
        reached = max(d.step for d in done if d.attempt == old)
        new = [d for d in done if d.attempt != old and committed_at(d) > killed_at]
        return new if any(d.step > reached for d in new) else []

    new = wait_for(run, later, "a new step")
    reached = max(d.step for d in run.history().committed(old))
    regained = next(d for d in new if d.step > reached)
    step_s = ordinary_step(settled)
    kill = {
        "beyond_step_s": committed_at(new[0]) - killed_at - step_s,
        "regained_s": committed_at(regained) - killed_at - step_s,
        "ordinary_step_s": step_s,
        "steps_again": float(max(0, reached + 1 - new[0].step)),
    }
    print(f"{head}: {kill['beyond_step_s'] * 1e3:.0f} ms beyond a step", flush=True)
    return kill


def wait_for(run: PeerRun, condition: Callable[[], list[Execution]], what: str) -> list[Execution]:
    """Poll ``condition`` until it returns a non-empty list, and return that list."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (steps := condition()):
        run.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {TIMEOUT_S:.0f} s; output:\n{run.output()}")
        time.sleep(POLL_S)
    return steps


def summary(kills: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians and p95 of both times."""
    regained = report.median_and_p95([kill["regained_s"] for kill in kills])
    return {
        **report.median_and_p95([kill["beyond_step_s"] for kill in kills]),
        "regained_median_s": regained["median_s"],
        "regained_p95_s": regained["p95_s"],
        "kills": kills,
    }
