"""Cost of four kills on the way to a fixed step, in steps and in time.

Every system trains to the same step twice: once undisturbed, and once with SIGKILLs at fixed points
of its progress. ``wasted_steps`` is Ray's metric: the number of executed steps minus the number of
required steps. An interrupted step counts as executed. ``goodput`` is the duration of the
undisturbed run divided by that of the disturbed run. Timing starts after a tenth of the steps,
because the systems are still gathering their ranks before that. All systems save checkpoints at
the same interval.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.ours import NAME
from benchmarks.common.schedule import Kill, kill_schedule
from benchmarks.common.step_log import committed_at, sample_losses
from benchmarks.faults.churn_ours import run_ours
from benchmarks.peers.run import PeerRun
from benchmarks.peers.systems import System, new_task, runnable
from benchmarks.peers.training import expected_samples

Run = Callable[[tuple[Kill, ...]], dict[str, Any]]
TIMEOUT_S = 900.0
LAST_COMMITS_S = 5.0
POLL_S = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--rounds", type=int, help="rounds over all systems (default 3)")
    parser.add_argument("--steps", type=int, help="target step (default 1600)")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="in steps (default 50)")
    parser.add_argument("--world-size", type=int, default=4, help="default: 4")
    parser.add_argument("--workload", choices=("cnn", "mlp"), default="cnn", help="default: cnn")
    parser.add_argument("--no-peers", action="store_true", help="only etrain-jupyter")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all systems in rounds, each of them undisturbed and disturbed."""
    num_rounds = options.rounds or (1 if options.quick else 3)
    num_steps = options.steps or (600 if options.quick else 1600)
    every, world_size = options.checkpoint_every, options.world_size
    kills = kill_schedule(num_steps=num_steps, checkpoint_every=every, world_size=world_size)
    systems, skipped = ([], {}) if options.no_peers else runnable(survivors=True)
    sizes = {"num_steps": num_steps, "world_size": world_size, "checkpoint_every": every}
    runs: dict[str, Run] = {NAME: functools.partial(run_ours, options.workload, **sizes)}
    for system in systems:
        runs[system.name] = functools.partial(run_peer, system, options.workload, **sizes)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for number in range(num_rounds):
        for name in sorted(runs, reverse=number % 2 == 1):
            head = f"churn, round {number + 1}/{num_rounds}, {name}"
            rounds[name].append(measure_round(runs[name], kills, head))
    found = {name: summary(done) for name, done in rounds.items()}
    return {
        "benchmark": "churn",
        "wasted_steps": found[NAME].get("wasted_steps"),
        "goodput": found[NAME].get("goodput"),
        "systems": found,
        "skipped": skipped,
        "versions": {system.name: system.version() for system in systems},
        "kills": [vars(kill) for kill in kills],
        "workload": options.workload,
        **sizes,
    }


def measure_round(run: Run, kills: tuple[Kill, ...], head: str) -> dict[str, Any]:
    """Run one system undisturbed and disturbed; report a failure in the result."""
    try:
        calm, disturbed = run(()), run(kills)
    except (TimeoutError, RuntimeError) as exc:
        print(f"{head} failed: {exc}", flush=True)
        return {"failed": str(exc)}
    goodput = calm["duration_s"] / disturbed["duration_s"]
    wasted = disturbed["executed"] - disturbed["target"]
    print(f"{head}: {wasted} steps wasted, goodput {goodput:.3f}", flush=True)
    return {"goodput": goodput, "wasted_steps": wasted, "undisturbed": calm, "disturbed": disturbed}


def run_peer(
    system: System,
    workload: str,
    kills: tuple[Kill, ...],
    *,
    num_steps: int,
    world_size: int,
    checkpoint_every: int,
) -> dict[str, Any]:
    """Train once with a peer, with the given kills."""
    with tempfile.TemporaryDirectory(prefix="etrain-bench-") as parent:
        task = new_task(
            Path(parent),
            workload=workload,
            num_steps=num_steps,
            world_size=world_size,
            checkpoint_every=checkpoint_every,
        )
        run = system.start(task)
        with run:
            for kill in kills:
                wait_for_step(run, kill.step)
                ranks = sorted(run.ranks())
                run.kill(ranks[kill.rank % len(ranks)])
            wait_for_step(run, num_steps)
            wait_for_all_ranks(run, num_steps)
        history = run.history()
    times = {step: committed_at(done) for step, done in history.surviving().items()}
    lost, wrong = sample_losses(history, expected_samples(num_steps))
    return {
        "duration_s": times[num_steps] - first_commit(run, num_steps // 10),
        "executed": history.num_executed,
        "target": num_steps,
        "samples_lost": lost,
        "steps_with_wrong_samples": wrong,
        "leftovers": run.leftovers,
    }


def first_commit(run: PeerRun, step: int) -> float:
    """Return the time of the first commit of a step."""
    return min(committed_at(done) for done in run.history().committed() if done.step == step)


def wait_for_step(run: PeerRun, step: int) -> None:
    """Wait until a step is committed."""
    deadline = time.monotonic() + TIMEOUT_S
    while run.history().newest_step < step:
        run.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step {step} in {TIMEOUT_S:.0f} s; output:\n{run.output()}")
        time.sleep(POLL_S)


def wait_for_all_ranks(run: PeerRun, step: int) -> None:
    """Wait until every rank has logged its commit of a step, for a few seconds at most."""
    deadline = time.monotonic() + LAST_COMMITS_S
    while time.monotonic() < deadline:
        done = run.history().surviving()[step]
        if done.num_commits >= done.world_size:
            return
        time.sleep(POLL_S)


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the rounds that completed, or the first failure if none did."""
    whole = [done for done in rounds if "failed" not in done]
    if not whole:
        return {"failed": rounds[0]["failed"], "rounds": rounds}

    def median(run: str, key: str) -> float:
        return float(statistics.median(done[run][key] for done in whole))

    return {
        "wasted_steps": statistics.median(done["wasted_steps"] for done in whole),
        "goodput": statistics.median(done["goodput"] for done in whole),
        "undisturbed_s": median("undisturbed", "duration_s"),
        "disturbed_s": median("disturbed", "duration_s"),
        "samples_lost": median("disturbed", "samples_lost"),
        "samples_lost_undisturbed": median("undisturbed", "samples_lost"),
        "steps_with_wrong_samples": median("disturbed", "steps_with_wrong_samples"),
        "rounds": rounds,
    }


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    kills = ", ".join(f"rank {kill['rank']} at {kill['step']}" for kill in result["kills"])
    head = (
        "system",
        "steps wasted",
        "goodput",
        "undisturbed, s",
        "disturbed, s",
        "samples lost (undisturbed)",
    )
    rows = []
    for name, found in result["systems"].items():
        if "failed" in found:
            rows.append((name, f"failed: {found['failed'].splitlines()[0]}", *("-",) * 4))
            continue
        rows.append(
            (
                name,
                f"{found['wasted_steps']:g}",
                f"{found['goodput']:.3f}",
                f"{found['undisturbed_s']:.1f}",
                f"{found['disturbed_s']:.1f}",
                f"{found['samples_lost']:g} ({found['samples_lost_undisturbed']:g})",
            )
        )
    rows += [(name, f"not run: {why}", *("-",) * 4) for name, why in result["skipped"].items()]
    about = (
        f"{result['num_steps']} steps, {result['world_size']} ranks, a checkpoint every "
        f"{result['checkpoint_every']} steps; killed: {kills}."
    )
    return f"{about}\n\n{report.table(head, rows)}"
