"""Fine-tuning on SQuAD: scores and throughput next to the ``Trainer`` of ``transformers``.

Both sides start from the same pretrained encoder and use the same windows of tokens, seeds, number
of steps, initial weights, learning rate schedule and order of the samples. The trained weights of
both sides are scored in this process, with the same code. All windows are padded to the same
length, because the loss of these models counts padded positions: without the padding, it would
depend on how a batch is divided among the workers.

``--part scores``: the Trainer in one process, and etrain-jupyter with 1, 2 and 4 workers, and with
two workers of which four are killed. ``--part throughput``: two ranks, in alternating order.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import default_collate

from benchmarks.common import ours, report
from benchmarks.models.squad_work import Task, load_encoder, make_features, select
from benchmarks.peers.run import python_path
from benchmarks.steps.steady import alternate, ratios_to_ddp
from etrain_jupyter import TrainingJob
from etrain_jupyter.recipes import squad
from etrain_jupyter.recipes.pretrained import find_pretrained

ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
WORLD_SIZES = (1, 2, 4)
KILLS = 4
RANKS = 2
"""Ranks of the throughput part, and workers of the run with kills."""
MAX_CHARACTERS = 520
"""Longest context of a question."""
BAR = 0.98
"""Throughput of etrain-jupyter relative to the Trainer's."""
TIMEOUT_S = 7200.0
PARTS = ("scores", "throughput")
TRAINER = "Trainer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both")
    parser.add_argument("--encoder", default=ENCODER, help="folder, or model on the hub")
    parser.add_argument("--train", type=Path, help="SQuAD file; by default from the hub")
    parser.add_argument("--dev", type=Path, help="SQuAD file; by default from the hub")
    parser.add_argument("--questions", type=int, default=1200, help="questions for training")
    parser.add_argument("--dev-questions", type=int, default=300, help="questions to score")
    parser.add_argument(
        "--steps",
        type=int,
        help="steps (default 150, quick 40); on one core, 150 steps of 16 windows take about 5 "
        "minutes per run, and the part scores has 5 runs per seed",
    )
    parser.add_argument("--batch", type=int, default=16, help="windows per step (default 16)")
    parser.add_argument("--seeds", type=int, help="default 3, quick 1")
    parser.add_argument(
        "--world-size", type=int, action="append", help="workers of the part scores (1, 2 and 4)"
    )
    parser.add_argument("--no-kills", action="store_true", help="omit the runs with kills")
    parser.add_argument("--rounds", type=int, help="rounds of throughput (default 5, quick 2)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the requested parts."""
    parts = options.part or PARTS
    result: dict[str, Any] = {"benchmark": "squad", "encoder": Path(options.encoder).name}
    with tempfile.TemporaryDirectory(prefix="etrain-bench-") as folder:
        task = prepare(options, Path(folder))
        result["steps"], result["batch"] = task.steps, task.batch
        if "scores" in parts:
            result["scores"] = measure_scores(options, task)
        if "throughput" in parts:
            result["throughput"] = measure_throughput(options, task)
    return result


def prepare(options: argparse.Namespace, folder: Path) -> Task:
    """Select the questions, and return the task of both sides."""
    for split, questions in zip(("train", "dev"), select(options, MAX_CHARACTERS), strict=True):
        rows = [
            {
                "id": q.id,
                "context": q.context,
                "question": q.text,
                "answers": {
                    "text": [g.text for g in q.golds],
                    "answer_start": [g.start for g in q.golds],
                },
            }
            for q in questions
        ]
        (folder / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
    return Task(
        encoder=find_pretrained(options.encoder),
        folder=str(folder),
        steps=options.steps or (40 if options.quick else 150),
        batch=options.batch,
    )


# --- scores ---


def measure_scores(options: argparse.Namespace, task: Task) -> dict[str, Any]:
    """Train each kind with each seed, in turn."""
    kinds: dict[str, Callable[[Task], dict[str, float]]] = {TRAINER: score_trainer}
    for world_size in options.world_size or WORLD_SIZES:
        kinds[f"{world_size} workers"] = functools.partial(
            score_ours, world_size=world_size, num_kills=0
        )
    if not options.no_kills:
        kinds[f"{RANKS} workers, {KILLS} kills"] = functools.partial(
            score_ours, world_size=RANKS, num_kills=KILLS
        )
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for seed in range(options.seeds or (1 if options.quick else 3)):
        for kind, run in kinds.items():
            rows[kind].append(run(task.with_seed(seed)))
            print(f"squad, seed {seed}, {kind}: {rows[kind][-1]}", flush=True)
    return rows


def score_trainer(task: Task) -> dict[str, float]:
    """Train with the Trainer in one process."""
    cpu_s = ProcessorTime()
    times, folder = run_trainer(task, num_ranks=1, track=cpu_s.track)
    model = load_encoder(folder)
    return {
        **scores_of(model, task),
        "wall_s": times[-1] - times[0],
        "cpu_s": cpu_s.total(),
        "wasted_steps": 0,
    }


def score_ours(task: Task, world_size: int, num_kills: int) -> dict[str, float]:
    """Train with etrain-jupyter, and kill workers at even intervals."""
    cpu_s = ProcessorTime()
    with ours.cluster():
        job = submit(task, world_size)
        for number in range(num_kills):
            step = task.steps * (number + 1) // (num_kills + 1)
            ours.wait_for_step(job, step, TIMEOUT_S)
            ours.wait_for(lambda: job.world_size == world_size, TIMEOUT_S, "full size", job)
            cpu_s.track(trainers_of(job))
            job.kill()
        follow(job, cpu_s)
        model = job.load_into(load_encoder(task.encoder))
    times = [step.time for step in ours.steps_of(job)]
    undone = sum(event.kind == "StepUndone" for event in job.events())
    return {
        **scores_of(model, task),
        "wall_s": times[-1] - times[0],
        "cpu_s": cpu_s.total(),
        "wasted_steps": undone,
    }


def submit(task: Task, world_size: int) -> TrainingJob:
    """Start our job."""
    return ours.submit(
        "encoder",
        name="bench-squad",
        num_steps=task.steps,
        world_size=world_size,
        workers={"min": min(world_size, RANKS), "max": world_size},
        model=lambda: load_encoder(task.encoder, task.seed),
        data={"train": lambda: make_features(task, "train"), "collate": default_collate},
        loss=None,
        optimizer={
            "name": "AdamW",
            "lr": task.lr,
            "weight_decay": task.weight_decay,
            "no_decay": "auto",
        },
        schedule={"warmup": f"{task.warmup} steps", "decay": "linear"},
        clip_grad_norm=1.0,
        batch={"global": task.batch},
        seed=task.seed,
    )


def scores_of(model: Any, task: Task) -> dict[str, float]:
    """Return EM and F1 on the held-out questions."""
    dev = make_features(task, "dev")
    model.eval()
    records = []
    with torch.no_grad():
        for first in range(0, len(dev), 32):
            batch = squad.collate([dev[i] for i in range(first, min(first + 32, len(dev)))])
            records += squad.predict(model, batch)
    found = squad.score(records)
    return {"exact": found["exact_match"], "f1": found["f1"]}


# --- throughput ---


def measure_throughput(options: argparse.Namespace, task: Task) -> dict[str, Any]:
    """Measure both sides in alternating order."""
    cpu_s: dict[str, list[float]] = {"ours": [], "ddp": []}

    def run(side: str, measure_side: Callable[[Task], tuple[float, float]]) -> float:
        rate, per_sample_s = measure_side(task)
        cpu_s[side].append(per_sample_s)
        print(f"squad, {side}: {per_sample_s:.3f} s of processor time per sample", flush=True)
        return rate

    rates = alternate(
        "squad",
        {
            "ours": lambda: run("ours", rate_of_ours),
            "ddp": lambda: run("ddp", rate_of_trainer),
        },
        options.rounds or (2 if options.quick else 5),
    )
    ratios = ratios_to_ddp(rates, "ours")
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "rates": rates,
        "cpu_s": cpu_s,
        "cpu_ratio": statistics.median(
            ddp / own for own, ddp in zip(cpu_s["ours"], cpu_s["ddp"], strict=True)
        ),
        "bar": BAR,
    }


def rate_of_ours(task: Task) -> tuple[float, float]:
    """Return samples per second of two of our ranks, and processor seconds per sample."""
    cpu_s = ProcessorTime()
    with ours.cluster():
        job = submit(task, RANKS)
        follow(job, cpu_s)
    times = [step.time for step in ours.steps_of(job) if step.world_size == RANKS]
    return report.steady_rate(times, task.batch), cpu_s.per_sample(times, task.batch)


def rate_of_trainer(task: Task) -> tuple[float, float]:
    """Return samples per second of two ranks of the Trainer, and processor seconds per sample."""
    cpu_s = ProcessorTime()
    times, _ = run_trainer(task, num_ranks=RANKS, track=cpu_s.track)
    return report.steady_rate(times, task.batch), cpu_s.per_sample(times, task.batch)


def run_trainer(
    task: Task, *, num_ranks: int, track: Callable[[list[int]], None] | None = None
) -> tuple[list[float], str]:
    """Run the peer; return the completion times of its steps, and the folder with its weights."""
    folder = Path(task.folder) / "trainer"
    task_file = Path(task.folder) / "task.json"
    task_file.write_text(task.to_json(), encoding="utf-8")
    script = ["-m", "benchmarks.peers.squad_train", str(task_file), str(folder)]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *(launch if num_ranks > 1 else []), *script],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                if track is not None:
                    track(ranks_of(process.pid) if num_ranks > 1 else [process.pid])
                time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"the Trainer failed:\n{output.read()[-3000:]}")
    times = json.loads((folder / "times.json").read_text(encoding="utf-8"))
    return times, str(folder / "model")


# --- processor time ---


class ProcessorTime:
    """Processor time of tracked processes, also of those that have ended."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._times: list[float] = []
        self._totals: list[float] = []

    def track(self, pids: list[int]) -> None:
        """Read the times of running processes; call it at least every second."""
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                used = psutil.Process(pid).cpu_times()
                self._seconds[pid] = used.user + used.system
        self._times.append(time.time())
        self._totals.append(self.total())

    def per_sample(self, times: Sequence[float], samples_per_step: int) -> float:
        """Return the seconds per sample in the second half of the steps, as ``steady_rate``."""
        half = len(times) // 2
        first, last = np.interp([times[half], times[-1]], self._times, self._totals)
        return float(last - first) / ((len(times) - 1 - half) * samples_per_step)

    def total(self) -> float:
        """Return the sum, in seconds."""
        return sum(self._seconds.values())


def follow(job: TrainingJob, cpu_s: ProcessorTime) -> None:
    """Track a job's trainers until it has ended."""
    while job.status not in ("finished", "failed", "stopped"):
        cpu_s.track(trainers_of(job))
        time.sleep(0.5)
    job.result()


def ranks_of(agent: int) -> list[int]:
    """Return the processes that torchrun's agent has launched."""
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(agent).children()]
    return []


def trainers_of(job: TrainingJob) -> list[int]:
    """Return the process ids of the job's trainers."""
    return [int(worker["trainer_pid"]) for worker in job.workers() if worker["trainer_pid"]]


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as Markdown tables."""
    tables = []
    if "scores" in result:
        head = ("run", "EM (std)", "F1 (std)", "wall, s", "processor, s", "steps undone")
        rows = [
            (
                kind,
                *(spread([row[name] for row in runs]) for name in ("exact", "f1")),
                *(
                    f"{statistics.mean(row[name] for row in runs):.0f}"
                    for name in ("wall_s", "cpu_s")
                ),
                str(sum(row["wasted_steps"] for row in runs)),
            )
            for kind, runs in result["scores"].items()
        ]
        tables.append(report.table(head, rows))
    if "throughput" in result:
        found = result["throughput"]
        rounds = " ".join(f"{ratio:.2f}" for ratio in found["ratios"])
        medians = {side: f"{statistics.median(r):.1f}" for side, r in found["rates"].items()}
        cpu_s = {side: f"{statistics.median(s):.4f}" for side, s in found["cpu_s"].items()}
        pair = [
            (
                ours.NAME,
                *(medians["ours"], f"{found['ratio']:.3f}", rounds),
                *(cpu_s["ours"], f"{found['cpu_ratio']:.3f}"),
            ),
            (TRAINER, medians["ddp"], "1", str(len(found["ratios"])), cpu_s["ddp"], "1"),
        ]
        head = ("system", "samples/s", "ratio", "rounds", "processor s/sample", "ratio")
        tables.append(report.table(head, pair))
    return "\n\n".join(tables)


def spread(values: list[float]) -> str:
    """Return the mean and the standard deviation.

    >>> spread([1.0, 3.0])
    '2.0 (1.4)'
    """
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ({deviation:.1f})"
