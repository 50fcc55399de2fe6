"""Searches: samples that ASHA saves against random search, its decisions, and moved workers.

For each model, both searches try the same values, because they have the same seed. The first figure
is the ratio of the samples that they trained on, next to the difference of their best values. The
second compares each decision at a rung with Optuna alone, on the values that the study has stored.
The third is the time from the decision to end a trial to the first step of another trial on one of
its workers, and its parts. The fourth is the share of the workers' time that is spent in steps,
next to that of the same study with one fixed worker for each trial, and to that of Ray Tune.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ours, report, search_work
from benchmarks.peers.run import python_path
from benchmarks.peers.systems import import_error
from benchmarks.search_log import PARTS, Move, moves_of, share_of_spans, utilization_of
from benchmarks.search_simulated import simulate_asha, train_curves
from etrain_jupyter import launch
from etrain_jupyter.head.studies.optuna_study import make_pruner
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.events import Event
from etrain_jupyter.notebook.study.study import Study
from etrain_jupyter.notebook.study.view import StudyView
from etrain_jupyter.storage.study_folder import import_optuna

BAR_RATIO = 0.4
"""Maximum share of the samples of random search."""
BAR_S = 1.0
"""Maximum median and 95th percentile of the time until a freed worker trains again, in seconds."""
TIMEOUT_S = 1800.0
NUM_WORKERS = 2
NUM_EPOCHS = 16
DIVISOR = 4
NUM_REPEATS = 4
"""Seeds of one set of values, whose spread is the noise of the best value."""

BODY = """\
model: Model(width, seed)
data: {{train: train_set, eval: eval_set}}
loss: slow_loss
metrics: {{accuracy: accuracy}}
optimizer: {{name: Adam, lr: !py lr}}
batch: {batch}
epochs: {epochs}
checkpoint: {{every: 100000 steps}}
workers: {{min: 1, max: {max_workers}}}
search:
  space: {space}
  metric: eval_accuracy
  mode: max
  trials: {trials}
  method: {method}
  divisor: {divisor}
  concurrent: 2
"""
SPACE = "{width: {choice: [4, 8, 16]}, lr: {low: 1e-5, high: 1e-1, log: true}, seed: {choice: [0]}}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--trials", type=int, default=24, help="trials of each search (24)")
    models = sorted(search_work.MODELS)
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="(all)")
    help = "simulate searches instead, with this number of seeds; they need no cluster"
    parser.add_argument("--simulate", type=int, default=0, metavar="SEEDS", help=help)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the searches of each model on one cluster, and then the peer; or simulate them."""
    if options.simulate:
        return simulate(options.models, options.trials, options.simulate)
    trials = 10 if options.quick else options.trials
    moves: list[Move] = []
    with ours.cluster():
        models = {model: compare_searches(model, trials, moves) for model in options.models}
    first = models[options.models[0]]
    ray = measure_ray(options.models[0], first.pop("tried"))
    for figures in models.values():
        figures.pop("tried", None)
    totals = sorted(move.total_s for move in moves)
    return {
        "benchmark": "search",
        "bar_ratio": BAR_RATIO,
        "bar_s": BAR_S,
        "trials": trials,
        **first,
        "models": models,
        "moves": len(moves),
        "moved_s": totals,
        "median_s": float(np.median(totals)) if totals else float("nan"),
        "p95_s": report.percentile(totals, 0.95) if totals else float("nan"),
        "parts_s": {
            part: float(np.median([move.parts_s[part] for move in moves])) if moves else None
            for part in PARTS
        },
        "ray": ray,
        "load": os.getloadavg()[0],
    }


def simulate(models: Sequence[str], trials: int, num_seeds: int) -> dict[str, Any]:
    """Simulate searches with a quarter of the trials and all, and with two divisors."""
    torch.set_num_threads(1)
    rows = []
    for model in models:
        curves = [
            train_curves(model, num_trials=trials, num_epochs=NUM_EPOCHS, seed=seed)
            for seed in range(num_seeds)
        ]
        for count, divisor in itertools.product((max(1, trials // 4), trials), (2, DIVISOR)):
            found = np.array([simulate_asha(some[:count], divisor) for some in curves])
            ratios, lost = found[:, 0], found[:, 1]
            rows.append(
                {
                    "model": model,
                    "trials": count,
                    "divisor": divisor,
                    "ratio": float(ratios.mean()),
                    "most": float(ratios.max()),
                    "lost": float(lost.mean()),
                }
            )
    return {"benchmark": "search", "simulated": rows, "seeds": num_seeds}


def compare_searches(model: str, trials: int, moves: list[Move]) -> dict[str, Any]:
    """Run ASHA, ASHA with fixed workers, random search and the repeats; add to ``moves``."""
    asha, full = run(model, "asha", trials), run(model, "random", trials)
    fixed = run(model, "asha", trials, max_workers=1)
    best = full.view().best
    assert best is not None, "every trial of the random search failed"
    width, lr = best.params["width"], best.params["lr"]
    seeds = list(range(1, NUM_REPEATS + 1))
    space = f"{{width: {{choice: [{width}]}}, lr: {{choice: [{lr!r}]}}, seed: {{choice: {seeds}}}}}"
    repeats = run(model, "grid", NUM_REPEATS, space)
    moves += moves_of(dict(enumerate(logs_of(asha)))) + moves_of(dict(enumerate(logs_of(fixed))))
    values = [study.view().best for study in (asha, full)]
    samples = [sum(trial.samples for trial in study.view().trials) for study in (asha, full)]
    shares = [utilization_of(logs_of(study)) for study in (asha, fixed)]
    return {
        "ratio": samples[0] / samples[1],
        "samples": samples,
        "best": [found.value if found is not None else float("nan") for found in values],
        "noise": float(np.std([trial.value for trial in repeats.view().trials])),
        **compare_decisions(asha.view()),
        "utilization": [share for share, _ in shares],
        "duration_s": [duration_s for _, duration_s in shares],
        "tried": [trial.params for trial in full.view().trials],
    }


def run(
    model: str, method: str, trials: int, space: str = SPACE, *, max_workers: int = NUM_WORKERS
) -> Study:
    """Run a study to its end."""
    body = BODY.format(
        space=space, trials=trials, method=method, max_workers=max_workers,
        batch=search_work.BATCH, epochs=NUM_EPOCHS, divisor=DIVISOR,
    )  # fmt: skip
    train_set, eval_set = search_work.make_digits()
    names = {
        "Model": search_work.MODELS[model],
        "train_set": train_set,
        "eval_set": eval_set,
        "slow_loss": search_work.slow_loss,
        "accuracy": search_work.accuracy,
    }
    plan = launch.plan_search(body, names, {"name": f"{model}-{method}"}, "%%etrain search")
    study = launch.submit_study(plan)
    status = study.wait(timeout=TIMEOUT_S)
    assert status == "finished", study.view().reason
    return study


def logs_of(study: Study) -> list[list[Event]]:
    """Return the events of each trial."""
    numbers = [trial.number for trial in study.view().trials]
    return [read_events(study.job(number).record.log_path) for number in numbers]


def compare_decisions(view: StudyView) -> dict[str, int]:
    """Repeat a study's decisions with Optuna alone, on the stored values in their order."""
    optuna = import_optuna()
    pruner = make_pruner(optuna, view.rungs, DIVISOR)
    alone = optuna.create_study(direction="maximize", pruner=pruner)
    trials = {trial.number: alone.ask() for trial in view.trials}
    limit = view.rungs[0] * DIVISOR ** len(view.rungs)
    pruned: set[int] = set()
    num_decisions = 0
    for number, samples, value in reports_of(view):
        trials[number].report(value, samples)
        if samples < limit and number not in pruned:
            num_decisions += 1
            if trials[number].should_prune():
                pruned.add(number)
    ours_pruned = {trial.number for trial in view.trials if trial.state == "PRUNED"}
    return {"decisions": num_decisions, "different": len(pruned ^ ours_pruned)}


def reports_of(view: StudyView) -> list[tuple[int, int, float]]:
    """Return trial, samples and value of each evaluation, in the order of Optuna's journal."""
    import_optuna()  # or an error that says how to install it
    from optuna.storages.journal import JournalFileBackend

    folder = Path(os.environ["ETRAIN_RUNS"]) / view.study_id
    logs = JournalFileBackend(str(folder / "optuna.journal")).read_logs(0)
    found = [log for log in logs if "intermediate_value" in log]
    return [(log["trial_id"], log["step"], log["intermediate_value"]) for log in found]


def measure_ray(model: str, tried: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Run the same search with Ray Tune: the same values, ASHA, and two trials at the same time."""
    missing = import_error("ray.tune")
    if missing:
        return {"skipped": f"Ray Tune cannot run here: {missing}. Install it with: make peers"}
    with tempfile.TemporaryDirectory(prefix="etrain-ray-") as folder:
        task = Path(folder) / "task.json"
        task.write_text(json.dumps({"model": model, "tried": list(tried), "epochs": NUM_EPOCHS}))
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.ray_tune", str(task)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=TIMEOUT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            last = (output.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            return {"skipped": f"Ray Tune failed: {last}"}
        spans = [
            (begin, end)
            for path in Path(folder).glob("steps-*.jsonl")
            for begin, end in map(json.loads, path.read_text().splitlines())
        ]
    share, duration_s = share_of_spans(spans, NUM_WORKERS)
    num_samples = len(spans) * search_work.BATCH
    return {"utilization": share, "duration_s": duration_s, "samples": num_samples}


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a table."""
    if "simulated" in result:
        head = ["model", "trials", "divisor", "share of the samples", "at most", "accuracy lost"]
        found = [
            [row["model"], str(row["trials"]), str(row["divisor"]), f"{row['ratio']:.2f}",
             f"{row['most']:.2f}", f"{row['lost']:.4f}"]
            for row in result["simulated"]
        ]  # fmt: skip
        return report.table(head, found)
    rows = []
    for model, found in result["models"].items():
        asha, full = found["best"]
        elastic, fixed = found["utilization"]
        elastic_s, fixed_s = found["duration_s"]
        within = f"within {2 * found['noise']:.4f} of random"
        rows += [
            [f"{model}: samples against random search", f"{found['ratio']:.2f}", f"<= {BAR_RATIO}"],
            [f"{model}: best accuracy, ASHA", f"{asha:.4f}", within],
            [f"{model}: best accuracy, random search", f"{full:.4f}", ""],
            [f"{model}: noise (std. of 4 seeds)", f"{found['noise']:.4f}", ""],
            [f"{model}: decisions", str(found["decisions"]), ""],
            [f"{model}: different from Optuna alone", str(found["different"]), "0"],
            [f"{model}: share of the workers' time in steps", f"{elastic:.2f}", ""],
            [f"{model}: the same with fixed workers", f"{fixed:.2f}", ""],
            [f"{model}: duration", f"{elastic_s:.0f} s", ""],
            [f"{model}: duration with fixed workers", f"{fixed_s:.0f} s", ""],
        ]
    ray = result["ray"]
    rows += [
        ["freed worker's first step, median", f"{result['median_s']:.2f} s", f"<= {BAR_S:.0f} s"],
        ["freed worker's first step, p95", f"{result['p95_s']:.2f} s", f"<= {BAR_S:.0f} s"],
        *(
            [f"median of part {part.removesuffix('_s')}", f"{seconds:.2f} s", ""]
            for part, seconds in result["parts_s"].items()
            if seconds is not None
        ),
        ["moves", str(result["moves"]), "20 for a p95"],
        ["Ray Tune, share of the workers' time", _shown(ray, "utilization", "{:.2f}"), ""],
        ["Ray Tune, duration", _shown(ray, "duration_s", "{:.0f} s"), ""],
        ["load of the machine", f"{result['load']:.1f}", ""],
    ]
    return report.table(["figure", "value", "bar"], rows)


def _shown(figures: dict[str, Any], key: str, form: str) -> str:
    return form.format(figures[key]) if key in figures else str(figures["skipped"])
