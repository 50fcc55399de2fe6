"""Attacks on a running job by another user's process: received bytes, and progress of the job.

A job of four ranks trains while an attacker process (with uid 65534 if root runs the benchmark)
connects to every port as soon as it is opened. Meanwhile the benchmark repeatedly kills a trainer,
so that the ranks must form new generations, and gives the job time to return to full size. Three
attacks run one after the other: ``place`` takes the places of ranks; ``relay`` also forwards what
it receives to other ranks; ``flood`` opens 1,500 connections to each port that a rank opens.

The attacker connects to every listener on the machine. Run the benchmark in an empty network
namespace::

    unshare --net sh -c 'ip link set lo up; python -m benchmarks strangers --json FILE'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import ours, report
from benchmarks.stranger import LISTENING
from etrain_jupyter import TrainingJob
from etrain_jupyter.log.events import GenerationFormed, GenerationReady, LogLine, WorkerLost

MODES = ("place", "relay", "flood")
WORLD_SIZE = 4
FORM_TIMEOUT_S = 300.0
PAUSE_S = 3.0
"""Pause in seconds between the first steps of a generation and the next kill."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--seconds", type=float, help="length of each attack (default 60)")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run each attack on a separate job."""
    refuse_to_attack_others()
    seconds = options.seconds or (20.0 if options.quick else 60.0)
    found = {mode: measure_attack(mode, seconds) for mode in options.mode or MODES}
    return {"benchmark": "strangers", "seconds": seconds, "attacks": found}


def refuse_to_attack_others() -> None:
    """Exit if other programs on this machine would be attacked."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    if any(row[3] == LISTENING for row in rows):
        raise SystemExit(
            "benchmarks strangers: other programs listen on this machine and would be attacked. "
            "Run it in a separate network: unshare --net sh -c 'ip link set lo up; ...'"
        )


def measure_attack(mode: str, seconds: float) -> dict[str, Any]:
    """Attack one job and return the figures."""
    rng = random.Random(0)
    with ours.cluster():
        job = ours.submit("mlp", num_steps=ours.NEVER, world_size=WORLD_SIZE)
        ours.wait_for(lambda: ours.settled_steps(job, WORLD_SIZE, 3), 180.0, "full size", job)
        before = len(job.events())
        first_step = job.step
        kills: list[float] = []
        with attacked_by(mode) as figures:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                kills.append(kill_once(job, rng))
                print(f"strangers {mode}: next step after {kills[-1]:.2f} s", flush=True)
                time.sleep(PAUSE_S)
        facts = job.events()[before:]
        step = job.step
        job.stop()
        status = job.wait(timeout=120)
        is_sound = job.audit().ok
    formed = {fact.generation for fact in facts if isinstance(fact, GenerationFormed)}
    ready = {fact.generation for fact in facts if isinstance(fact, GenerationReady)}
    warnings = [f.text for f in facts if isinstance(f, LogLine) and "unknown process" in f.text]
    return {
        **figures,
        "kills": len(kills),
        "lost": sum(isinstance(fact, WorkerLost) for fact in facts),
        "causes": [fact.cause for fact in facts if isinstance(fact, WorkerLost)],
        "formed": len(ready),
        "refused": len(formed - ready),
        "again": report.median_and_p95(kills),
        "steps": step - first_step,
        "status": status,
        "audit_ok": is_sound,
        "warnings": warnings[:3],
    }


def kill_once(job: TrainingJob, rng: random.Random) -> float:
    """Kill a random trainer; return the seconds until a later generation commits a step."""
    ranked = [worker for worker in job.workers() if worker["rank"] is not None]
    generation = job.generation
    killed_at = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(rng.choice(ranked)["trainer_pid"]), signal.SIGKILL)
    ours.wait_for_generation(job, generation, FORM_TIMEOUT_S)
    return time.monotonic() - killed_at


@contextlib.contextmanager
def attacked_by(mode: str) -> Iterator[dict[str, Any]]:
    """Run the attacker inside the context; yield its figures, which are complete at the end."""
    script = Path(__file__).with_name("stranger.py")
    figures: dict[str, Any] = {}
    with subprocess.Popen(
        [sys.executable, str(script), mode, str(WORLD_SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            figures |= json.loads(process.stdout.readline())
            yield figures
            process.stdin.close()
            figures |= json.loads(process.stdout.readline())
        finally:
            process.kill()


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    head = (
        *("attack", "uid", "ports", "connections", "bytes received", "kills", "lost"),
        *("formed", "refused", "next step after: median, p95", "audit"),
    )
    rows = []
    for mode, found in result["attacks"].items():
        again = f"{found['again']['median_s']:.2f}, {found['again']['p95_s']:.2f}"
        keys = ("uid", "ports", "connections", "bytes", "kills", "lost", "formed", "refused")
        audit = "ok" if found["audit_ok"] else "NOT OK"
        rows.append((mode, *(str(found[key]) for key in keys), again, audit))
    what = f"Attacks of {result['seconds']:.0f} s on a job of {WORLD_SIZE} ranks; seconds."
    return f"{what}\n\n{report.table(head, rows)}"
