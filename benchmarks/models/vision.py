"""Elastic training on images: the scores of five scaling policies.

Three tasks (classification of photographs, detection of blood cells, segmentation of nuclei) are
trained while the number of workers changes: 1, 12, 4, 12, 2, 8. The policies are a fixed global
batch, and a fixed batch per worker whose learning rate jumps, rises over the ramp, or follows
AdaScale. The score of each run is compared with that of one worker on the same samples and seed. A
run is one JSON file; existing ones are kept, so the series can be continued.

It needs torchvision and a folder with the data sets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.models.vision_figure import draw

DATA = Path(__file__).parents[3] / "shared" / "data"
SIZES = (1, 12, 4, 12, 2, 8)
"""Workers in the phases of a run, which have equal numbers of steps."""
FIXED = "fixed"
POLICIES = (FIXED, "global", "immediate", "ramp", "adascale")
TASK_NAMES = ("photos", "cells", "nuclei")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the data sets")
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: temporary)")
    parser.add_argument("--task", choices=TASK_NAMES, action="append", help="default: all")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1, 2; quick: 0")
    parser.add_argument("--figure", type=Path, help="draw the losses of the first seed")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing in the folder."""
    from benchmarks.models.vision_work import store

    with tempfile.TemporaryDirectory(prefix="etrain-bench-") as temporary:
        folder = options.folder or Path(temporary)
        data = folder / "data"
        if not data.exists():
            data.mkdir(parents=True)
            store(options.data, data)
        runs = measure_scores(options, folder, str(data))
    if options.figure:
        draw(runs, options.task or TASK_NAMES, 0, options.figure)
    return {"benchmark": "vision", "scores": runs}


def measure_scores(options: argparse.Namespace, folder: Path, data: str) -> list[dict[str, Any]]:
    """Run what is missing; return all runs of the folder."""
    seeds = options.seed or (range(1) if options.quick else range(3))
    for seed, task, policy in itertools.product(
        seeds, options.task or TASK_NAMES, options.policy or POLICIES
    ):
        path = folder / f"{task}-{policy}-{seed}.json"
        if path.exists():
            continue
        run = {"task": task, "policy": policy, "seed": seed, **run_one(task, policy, seed, data)}
        path.write_text(json.dumps(run), encoding="utf-8")
        scores = {name: round(value, 4) for name, value in run["scores"].items()}
        print(f"vision, {path.stem}: {scores}, {run['cpu_s']:.0f} s", flush=True)
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def run_one(task_name: str, policy: str, seed: int, data: str) -> dict[str, Any]:
    """Train once."""
    from benchmarks.models.vision_emulated import run_emulated
    from benchmarks.models.vision_work import TASKS, read

    task = TASKS[task_name]
    train = read(data, task_name, "train")
    phases = phases_of(policy, task.epochs * len(train) // task.batch)
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


def differences(runs: Sequence[dict[str, Any]], task: str, policy: str) -> list[float]:
    """Return the score of each elastic run minus that of the fixed run with the same seed."""
    own = sorted((run for run in runs if run["task"] == task), key=lambda run: int(run["seed"]))
    fixed = {run["seed"]: run["score"] for run in own if run["policy"] == FIXED}
    return [
        run["score"] - fixed[run["seed"]]
        for run in own
        if run["policy"] == policy and run["seed"] in fixed
    ]


def table_of(result: dict[str, Any]) -> str:
    """Format the scores as a Markdown table: one row for each task and policy."""
    runs, rows = result["scores"], []
    for task, policy in itertools.product(TASK_NAMES, POLICIES):
        own = [run["score"] for run in runs if (run["task"], run["policy"]) == (task, policy)]
        if not own:
            continue
        found = differences(runs, task, policy)
        rows.append(
            (
                *(task, policy, str(len(own)), f"{statistics.mean(own):.3f}"),
                f"{statistics.mean(found):+.3f}" if found else "-",
                " ".join(f"{one:+.3f}" for one in found),
            )
        )
    return report.table(("task", "policy", "runs", "score", "minus fixed", "by seed"), rows)
