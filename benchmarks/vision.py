"""Elastic training on images: scores by scaling policy, and throughput next to plain DDP.

``--part scores`` trains three tasks (classification of photographs, detection of blood cells,
segmentation of nuclei) while the number of workers changes: 1, 12, 4, 12, 2, 8. The policies are a
fixed global batch, and a fixed batch per worker whose learning rate jumps, rises over the ramp, or
follows AdaScale. The score of each run is compared with that of one worker on the same samples and
seed. A run is one JSON file; existing ones are kept, so the series can be continued.

``--part throughput`` trains torchvision's ResNet on two ranks. The peer is DDP under torchrun,
which reads the same augmented batches through ``DataLoader``. Both take turns, in blocks of some
seconds.

Both need torchvision and a folder with the data sets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ours, report
from benchmarks.accounting import interval_of
from benchmarks.steady import ratios_to_ddp
from benchmarks.vision_figure import draw

DATA = Path(__file__).parents[2] / "shared" / "data"
SIZES = (1, 12, 4, 12, 2, 8)
"""Workers in the phases of a run, which have equal numbers of steps."""
FIXED = "fixed"
POLICIES = (FIXED, "global", "immediate", "ramp", "adascale")
TASK_NAMES = ("photos", "cells", "nuclei")
HOW = ("emulated", "processes")
BAR_SCORE = 0.01
"""Largest mean difference between an elastic run with the ramp and the fixed run."""
BAR = 0.98
"""Throughput of etrain-jupyter relative to plain DDP."""
PARTS = ("scores", "throughput")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the data sets")
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: temporary)")
    parser.add_argument("--task", choices=TASK_NAMES, action="append", help="default: all")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1, 2; quick: 0")
    parser.add_argument(
        "--how",
        choices=HOW,
        action="append",
        help="one process per worker, or the same steps in one process (default: emulated)",
    )
    parser.add_argument("--figure", type=Path, help="draw the losses of the first seed")
    parser.add_argument("--pairs", type=int, help="blocks of throughput (default 30; quick: 4)")
    parser.add_argument("--minutes", type=float, help="begin no further block of throughput after")
    parser.add_argument("--steps", type=int, help="steps per block (default 20)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the requested parts."""
    from benchmarks.vision_work import store

    parts = options.part or PARTS
    result: dict[str, Any] = {"benchmark": "vision"}
    with tempfile.TemporaryDirectory(prefix="etrain-bench-") as temporary:
        folder = options.folder or Path(temporary)
        data = folder / "data"
        if not data.exists():
            data.mkdir(parents=True)
            store(options.data, data)
        if "scores" in parts:
            result["scores"] = measure_scores(options, folder, str(data))
            if options.figure:
                draw(result["scores"], options.task or TASK_NAMES, 0, options.figure)
        if "throughput" in parts:
            result["throughput"] = measure_throughput(options, str(data))
    return result


# --- scores ---


def measure_scores(options: argparse.Namespace, folder: Path, data: str) -> list[dict[str, Any]]:
    """Run what is missing; return all runs of the folder."""
    seeds = options.seed or (range(1) if options.quick else range(3))
    for seed, task, how, policy in itertools.product(
        seeds, options.task or TASK_NAMES, options.how or HOW[:1], options.policy or POLICIES
    ):
        path = folder / f"{task}-{policy}-{seed}-{how}.json"
        if path.exists():
            continue
        began = time.monotonic()
        run = run_one(task, policy, seed, how, data)
        run = {"task": task, "policy": policy, "seed": seed, "how": how, **run}
        path.write_text(json.dumps({**run, "wall_s": time.monotonic() - began}), encoding="utf-8")
        scores = {name: round(value, 4) for name, value in run["scores"].items()}
        print(f"vision, {path.stem}: {scores}, {run['cpu_s']:.0f} s", flush=True)
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def run_one(task_name: str, policy: str, seed: int, how: str, data: str) -> dict[str, Any]:
    """Train once."""
    from benchmarks.vision_emulated import run_emulated
    from benchmarks.vision_processes import run_processes
    from benchmarks.vision_work import TASKS, read

    task = TASKS[task_name]
    train = read(data, task_name, "train")
    phases = phases_of(policy, task.epochs * len(train) // task.batch)
    if how == "processes":
        run = run_processes(task, keys_of(policy, task.batch), seed, data=data, phases=phases)
    else:
        ends = list(itertools.accumulate(steps for _, steps in phases[:-1]))
        run = run_emulated(
            task,
            policy,
            seed,
            train=train,
            test=read(data, task_name, "test"),
            world_size_at=lambda step: phases[sum(step >= end for end in ends)][0],
        )
    return {**run, "score": run["scores"][task.score]}


def phases_of(policy: str, num_batches: int) -> list[tuple[int, int]]:
    """Return the number of workers and the steps of each phase.

    Args:
        policy: The policy.
        num_batches: Batches of one worker in the whole run.

    >>> phases_of("ramp", 390)
    [(1, 10), (12, 10), (4, 10), (12, 10), (2, 10), (8, 10)]
    >>> phases_of("global", 390)[:2]
    [(1, 65), (12, 65)]
    """
    if policy == FIXED:
        return [(1, num_batches)]
    per_step = len(SIZES) if policy == "global" else sum(SIZES)
    return [(size, num_batches // per_step) for size in SIZES]


def keys_of(policy: str, batch: int) -> dict[str, Any]:
    """Return the keys of the cell that select a policy."""
    if policy in (FIXED, "global"):
        return {"batch": {"global": batch}}
    scaling: dict[str, dict[str, Any]] = {
        "immediate": {"rule": "linear", "ramp": 0},
        "ramp": {"rule": "linear"},
        "adascale": {"rule": "adascale"},
    }
    return {"batch": {"per_worker": batch}, "scaling": scaling[policy]}


def differences(runs: Sequence[dict[str, Any]], task: str, policy: str, how: str) -> list[float]:
    """Return the score of each elastic run minus that of the fixed run with the same seed."""
    fixed = {
        run["seed"]: run["score"]
        for run in runs
        if run["task"] == task and run["policy"] == FIXED and run["how"] == HOW[0]
    }
    return [
        run["score"] - fixed[run["seed"]]
        for run in sorted(runs, key=lambda run: int(run["seed"]))
        if (run["task"], run["policy"], run["how"]) == (task, policy, how) and run["seed"] in fixed
    ]


# --- throughput ---


def measure_throughput(options: argparse.Namespace, data: str) -> dict[str, Any]:
    """Measure both sides in turns."""
    from benchmarks.vision_turns import measure_turns

    num_steps = options.steps or 20
    num_pairs = options.pairs or (4 if options.quick else 30)
    limit_s = 60 * options.minutes if options.minutes else math.inf
    found = measure_turns(data, num_pairs=num_pairs, num_steps=num_steps, limit_s=limit_s)
    return {
        **interval_of(ratios_to_ddp(found["rates"], "ours")),
        "cpu": interval_of(ratios_to_ddp(found["cpu_s"], "ours")),
        **found,
        "steps": num_steps,
        "bar": BAR,
    }


# --- tables ---


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as Markdown tables."""
    tables = []
    if "scores" in result:
        tables.append(scores_table(result["scores"]))
    if "throughput" in result:
        found = result["throughput"]
        rows = [
            (
                name,
                f"{statistics.median(found[key]['ours']):{digits}}",
                f"{statistics.median(found[key]['ddp']):{digits}}",
                f"{ratio['ratio']:.3f}",
                f"{ratio['low']:.3f} to {ratio['high']:.3f}",
            )
            for name, key, digits, ratio in (
                ("samples/s", "rates", ".1f", found),
                ("processor s/sample", "cpu_s", ".5f", found["cpu"]),
            )
        ]
        head = ("", ours.NAME, "torchrun DDP, DataLoader", "ratio to DDP", "95 % interval")
        tables.append(report.table(head, rows))
    return "\n\n".join(tables)


def scores_table(runs: Sequence[dict[str, Any]]) -> str:
    """Return one row for each task, policy and way to run it."""
    rows = []
    for task, policy, how in itertools.product(TASK_NAMES, POLICIES, HOW):
        own = [r for r in runs if (r["task"], r["policy"], r["how"]) == (task, policy, how)]
        if not own:
            continue
        found = differences(runs, task, policy, how)
        rows.append(
            (
                task,
                policy,
                how,
                str(len(own)),
                f"{statistics.mean(run['score'] for run in own):.3f}",
                f"{statistics.mean(found):+.3f}" if found else "-",
                " ".join(f"{one:+.3f}" for one in found),
            )
        )
    head = ("task", "policy", "how", "runs", "score", "minus fixed", "by seed")
    return report.table(head, rows)
