"""Training stall of ``eval.score``: the same job without it, with it, and with 4 MB of figures.

Each step sleeps for 40 ms without using a CPU, like a step on a GPU, and so does each batch of an
evaluation. The jobs run in turn. A job without ``score`` evaluates the same batches, so the
difference is what ``predict``, the merge of its records and ``score`` add.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.common import ours, report
from benchmarks.common.workloads import make_images
from etrain_jupyter.log.events import EvalScored

WORLD_SIZE = 2
EVERY = 200
"""Steps between two evaluations; ``score`` must end in between."""
NUM_EVAL = 2048
SCORE_S = 0.5
"""Duration of ``score``, which uses no CPU."""
NUM_PICTURES, PICTURE_SIDE = 4, 570
BAR_STEPS = 1.0
"""Largest stall by one evaluation, in steps."""
KINDS = ("without", "score", "figures")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--rounds", type=int, help="jobs of each kind (default 5; quick: 2)")
    parser.add_argument("--evals", type=int, help="evaluations per job (default 6; quick: 3)")


def make_eval_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the evaluation set, shapes ``(B, C, H, W)`` and ``(B,)``."""
    images_BCHW, labels_B = make_images()
    return images_BCHW[:NUM_EVAL].clone(), labels_B[:NUM_EVAL].clone()


def build_small() -> nn.Module:
    """Return a linear model, whose computation takes no time next to the sleep."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))


def predict(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Return the logits and labels of a batch, as slowly as a step."""
    images_BCHW, labels_B = batch
    time.sleep(0.04)
    return {"logits": model(images_BCHW), "label": labels_B}


def score(records: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the accuracy."""
    time.sleep(SCORE_S)
    right = [int(record["logits"].argmax()) == int(record["label"]) for record in records]
    return {"accuracy": sum(right) / len(right)}


def score_with_figures(records: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the accuracy and 3.9 MB of pictures."""
    return {**score(records), **{f"picture-{i}": noise_png(i) for i in range(NUM_PICTURES)}}


def noise_png(seed: int) -> bytes:
    """Return a PNG of noise, which cannot be compressed."""
    side = PICTURE_SIDE
    noise = torch.randint(256, (side, 3 * side), generator=torch.Generator().manual_seed(seed))
    rows = b"".join(b"\0" + bytes(row) for row in noise.tolist())
    header = struct.pack("!IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack("!I", len(data)) + name + data + struct.pack("!I", zlib.crc32(name + data))
        for name, data in chunks
    )


def evaluation_of(kind: str) -> dict[str, Any]:
    """Return the key ``eval`` of a job."""
    every = {"every": f"{EVERY} steps"}
    if kind == "without":
        return every
    function = score if kind == "score" else score_with_figures
    return {**every, "predict": predict, "score": function, "loss": False}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the jobs in turn."""
    num_rounds = options.rounds or (2 if options.quick else 5)
    num_evals = options.evals or (3 if options.quick else 6)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with ours.cluster():
        for number, kind in itertools.product(range(num_rounds), KINDS):
            run = run_job(kind, num_evals)
            found[kind] += run
            gaps = statistics.median(row["gap_steps"] for row in run)
            slowest = statistics.median(row["slowest_steps"] for row in run)
            print(
                f"scores, round {number + 1}/{num_rounds}, {kind}: {gaps:.1f} steps for the "
                f"evaluation, slowest step afterwards {slowest:.2f} steps",
                flush=True,
            )
    kinds = {kind: summary_of(rows) for kind, rows in found.items()}
    names = ("gap_steps", "slowest_steps")
    for row in kinds.values():
        row["stall_steps"] = sum(row[name] - kinds["without"][name] for name in names)
    return {
        "benchmark": "scores",
        "stall_steps": max(kinds[kind]["stall_steps"] for kind in KINDS[1:]),
        "bar_steps": BAR_STEPS,
        "world_size": WORLD_SIZE,
        "evaluations": min(map(len, found.values())),
        "kinds": kinds,
    }


def run_job(kind: str, num_evals: int) -> list[dict[str, float]]:
    """Train, and return the figures of each evaluation but the last, which ends the job."""
    job = ours.submit(
        "small",
        name=f"scores-{kind}",
        num_steps=EVERY * (num_evals + 1),
        world_size=WORLD_SIZE,
        workers={"min": WORLD_SIZE, "max": WORLD_SIZE},
        model=build_small,
        data={"train": make_images, "eval": make_eval_images},
        loss="benchmarks.common.workloads:patient_loss",
        eval=evaluation_of(kind),
    )
    job.result()
    times = {step.step: step.time for step in ours.steps_of(job)}
    scored = {event.step: event.time for event in job.events() if isinstance(event, EvalScored)}
    # On a busy machine, the next evaluation may wait for the scores, which is not what is measured.
    return [
        figures_of(times, step)
        for step in range(EVERY, EVERY * (num_evals + 1), EVERY)
        if scored.get(step - EVERY, 0.0) < times[step]
    ]


def figures_of(times: dict[int, float], evaluated: int) -> dict[str, float]:
    """Return the figures of the evaluation after a step, in ordinary steps.

    Args:
        times: Commit time of each step.
        evaluated: The step.

    >>> figures_of({step: float(step + 10 * (step > 200)) for step in range(401)}, 200)
    {'step_s': 1.0, 'gap_steps': 10.0, 'slowest_steps': 1.0}
    """
    gap_s = times[evaluated + 1] - times[evaluated]
    steps = [times[n + 1] - times[n] for n in range(evaluated + 1, evaluated + EVERY)]
    step_s = statistics.median(steps)
    return {
        "step_s": step_s,
        "gap_steps": gap_s / step_s - 1,
        "slowest_steps": max(steps) / step_s,
    }


def summary_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def table_of(result: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    head = ("evaluation", "step", "pass, steps", "slowest step after it, steps", "stall, steps")
    rows = [
        (
            kind,
            f"{1e3 * row['step_s']:.1f} ms",
            f"{row['gap_steps']:.2f}",
            f"{row['slowest_steps']:.2f}",
            f"{row['stall_steps']:.2f}",
        )
        for kind, row in result["kinds"].items()
    ]
    bar = f"Bar: {result['bar_steps']:.0f} step; {result['evaluations']} evaluations of each kind."
    return f"{report.table(head, rows)}\n\n{bar}"
