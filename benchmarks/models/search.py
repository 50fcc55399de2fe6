"""Searches: samples that ASHA saves, its decisions, moved workers, and the use of a pool.

``samples``: for each model and seed, ASHA and random search try the same values. The figures are
the ratio of the samples that they trained on, the difference of their best values, and the
decisions at rungs that differ from those of Optuna alone on the values that the study has stored.

``moves``: the time from the decision to end a trial to the first step of another trial on one of
its workers, and its parts.

``pool``: the share of the workers' time that is spent in steps, and the duration: for elastic
trials, for one fixed worker per trial, and for Ray Tune, each on the same number of workers.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distributed import Client

from benchmarks.common import ours, report
from benchmarks.models import search_work
from benchmarks.models.search_log import MOVE_PARTS, moves_of, share_of_spans, utilization_of
from benchmarks.models.search_simulated import NUM_REPEATS, simulate_asha, train_curves
from benchmarks.peers.run import python_path
from benchmarks.peers.systems import import_error
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.events import Event
from etrain_jupyter.plugins.search.commands import plan_search
from etrain_jupyter.plugins.search.folder import import_optuna
from etrain_jupyter.plugins.search.open_studies import submit_study
from etrain_jupyter.plugins.search.optuna_study import make_pruner
from etrain_jupyter.plugins.search.report import StudyView
from etrain_jupyter.plugins.search.study import Study

BAR_RATIO = 0.4
"""Maximum share of the samples of random search."""
BAR_S = 1.0
"""Maximum median and 95th percentile of the time until a freed worker trains again, in seconds."""
TIMEOUT_S = 1800.0
START_S = 60.0
PARTS = ("samples", "moves", "pool")
NUM_WORKERS = 2
NUM_EPOCHS = 16
DIVISOR = 4
"""The default of the product."""

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
pool: {pool}
search:
  space: {space}
  metric: eval_accuracy
  mode: max
  trials: {trials}
  method: {method}
  seed: {seed}
  concurrent: 2
"""
SPACE = "{width: {choice: [4, 8, 16]}, lr: {low: 1e-5, high: 1e-1, log: true}, seed: {choice: [0]}}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--trials", type=int, default=24, help="trials of each search (24)")
    models = sorted(search_work.MODELS)
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="(all)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(all)")
    help = "seeds of the searches whose samples are compared (0)"
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help=help)
    help = "simulate searches instead, with this number of seeds; they need no cluster"
    parser.add_argument("--simulate", type=int, default=0, metavar="SEEDS", help=help)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts that were asked for, or simulate searches."""
    if options.simulate:
        return simulate(options.models, options.trials, options.simulate)
    trials = 10 if options.quick else options.trials
    result: dict[str, Any] = {"benchmark": "search", "trials": trials, "bar_ratio": BAR_RATIO}
    with ours.cluster():
        if "samples" in options.parts:
            result["samples"] = [
                compare_samples(model, trials, seed)
                for model in options.models
                for seed in options.seeds
            ]
        if "moves" in options.parts:
            studies = [run(model, "asha", trials) for model in options.models]
            moves = [m for s in studies for m in moves_of(dict(enumerate(logs_of(s))))]
            result["moves"] = [{"total_s": move.total_s, **move.parts_s} for move in moves]
    if "pool" in options.parts:
        result["pool"] = compare_pools(options.models[0], trials)
    return {**result, "bar_s": BAR_S, "load": os.getloadavg()[0]}


def simulate(models: Sequence[str], trials: int, num_seeds: int) -> dict[str, Any]:
    """Simulate searches with a quarter of the trials and all, and with two divisors."""
    torch.set_num_threads(1)
    rows = []
    for model in models:
        trained = [
            train_curves(model, num_trials=trials, num_epochs=NUM_EPOCHS, seed=seed)
            for seed in range(num_seeds)
        ]
        noise = float(np.sqrt(np.mean([noise**2 for _, noise in trained])))
        for count, divisor in itertools.product((max(1, trials // 4), trials), (2, DIVISOR)):
            found = np.array([simulate_asha(curves[:count], divisor) for curves, _ in trained])
            ratios, lost = found[:, 0], found[:, 1]
            rows.append(
                {
                    "model": model,
                    "trials": count,
                    "divisor": divisor,
                    "ratio": float(ratios.mean()),
                    "most": float(ratios.max()),
                    "lost": float(lost.mean()),
                    "noise": noise,
                    "within": int((lost <= 2 * noise).sum()),
                }
            )
    return {"benchmark": "search", "simulated": rows, "seeds": num_seeds}


def compare_samples(model: str, trials: int, seed: int) -> dict[str, Any]:
    """Run ASHA and random search with the same values, and the best ones with other seeds."""
    asha, full = (run(model, method, trials, seed=seed) for method in ("asha", "random"))
    best = full.view().best
    assert best is not None, "every trial of the random search failed"
    width, lr = best.params["width"], best.params["lr"]
    inits = list(range(1, NUM_REPEATS + 1))
    space = f"{{width: {{choice: [{width}]}}, lr: {{choice: [{lr!r}]}}, seed: {{choice: {inits}}}}}"
    repeats = run(model, "grid", NUM_REPEATS, space=space)
    values = [study.best_value for study in (asha, full)]
    samples = [sum(trial.samples for trial in study.view().trials) for study in (asha, full)]
    return {
        "model": model,
        "seed": seed,
        "ratio": samples[0] / samples[1],
        "samples": samples,
        "best": values,
        "noise": float(np.std([trial.value for trial in repeats.view().trials])),
        **compare_decisions(asha.view()),
    }


def compare_pools(model: str, trials: int) -> dict[str, Any]:
    """Run the same search with elastic trials, with fixed ones, and with Ray Tune.

    Each has ``NUM_WORKERS`` workers. The local pool starts as many workers as its jobs want, so
    etrain's studies run on a Dask cluster of that size.
    """
    with tempfile.TemporaryDirectory(prefix="etrain-dask-") as folder, dask_cluster(folder) as pool:
        elastic = run(model, "asha", trials, pool=pool)
        fixed = run(model, "asha", trials, pool=pool, max_workers=1)
        figures = {
            name: dict(zip(("utilization", "duration_s"), utilization_of(logs_of(s)), strict=True))
            for name, s in (("elastic", elastic), ("fixed", fixed))
        }
        tried = [trial.params for trial in fixed.view().trials]
    return {**figures, "Ray Tune": measure_ray(model, tried)}


@contextlib.contextmanager
def dask_cluster(folder: str) -> Iterator[str]:
    """Run a Dask scheduler with ``NUM_WORKERS`` workers; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    commands = [["scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]]
    for number in range(NUM_WORKERS):
        words = f"--name w{number} --host 127.0.0.1 --no-dashboard --no-nanny --nthreads 1"
        commands.append(["worker", address, *words.split(), "--memory-limit", "0"])
    with contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, "-m", "dask", *command],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        deadline = time.monotonic() + START_S
        make: Any = Client  # it has no types
        with make(address, timeout=START_S, set_as_default=False) as client:
            client.wait_for_workers(NUM_WORKERS, timeout=deadline - time.monotonic())
        yield address


def run(
    model: str,
    method: str,
    trials: int,
    *,
    space: str = SPACE,
    seed: int = 0,
    max_workers: int = NUM_WORKERS,
    pool: str = "local",
) -> Study:
    """Run a study to its end."""
    body = BODY.format(
        space=space, trials=trials, method=method, max_workers=max_workers, seed=seed, pool=pool,
        batch=search_work.BATCH, epochs=NUM_EPOCHS,
    )  # fmt: skip
    train_set, eval_set = search_work.make_digits()
    names = {
        "Model": search_work.MODELS[model],
        "train_set": train_set,
        "eval_set": eval_set,
        "slow_loss": search_work.slow_loss,
        "accuracy": search_work.accuracy,
    }
    plan = plan_search(body, names, {"name": f"{model}-{method}"}, "%%etrain search")
    study = submit_study(plan)
    status = study.wait(timeout=TIMEOUT_S)
    assert status == "finished", study.view().reason
    print(f"{study!r}", file=sys.stderr, flush=True)
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
        head = ["model", "trials", "divisor", "share of the samples", "at most"]
        head += ["accuracy lost", "noise", f"within twice the noise, of {result['seeds']}"]
        found = [
            [row["model"], str(row["trials"]), str(row["divisor"]), f"{row['ratio']:.2f}",
             f"{row['most']:.2f}", f"{row['lost']:.4f}", f"{row['noise']:.4f}", str(row["within"])]
            for row in result["simulated"]
        ]  # fmt: skip
        return report.table(head, found)
    return "\n".join(
        [
            *([_samples_table(result["samples"])] if "samples" in result else []),
            *([_moves_table(result["moves"])] if result.get("moves") else []),
            *([_pool_table(result["pool"])] if "pool" in result else []),
            f"{result['trials']} trials; load of the machine {result['load']:.1f}",
        ]
    )


def _samples_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["model", "seed", f"share of the samples (bar {BAR_RATIO})", "best, ASHA"]
    head += ["best, random search", "noise", "decisions", "different from Optuna alone"]
    found = [
        [row["model"], str(row["seed"]), f"{row['ratio']:.2f}", f"{row['best'][0]:.4f}",
         f"{row['best'][1]:.4f}", f"{row['noise']:.4f}", str(row["decisions"]),
         str(row["different"])]
        for row in rows
    ]  # fmt: skip
    return report.table(head, found)


def _moves_table(moves: Sequence[dict[str, float]]) -> str:
    head = [
        f"{len(moves)} moves",
        f"median (bar {BAR_S:.0f} s)",
        f"95 % (bar {BAR_S:.0f} s)",
        "most",
    ]
    found = []
    for name in ("total_s", *MOVE_PARTS):
        values = sorted(move[name] for move in moves)
        seconds = (float(np.median(values)), report.percentile(values, 0.95), values[-1])
        found.append([name.removesuffix("_s"), *(f"{value:.2f} s" for value in seconds)])
    return report.table(head, found)


def _pool_table(pool: dict[str, dict[str, Any]]) -> str:
    found = [
        [name, _shown(row, "utilization", "{:.2f}"), _shown(row, "duration_s", "{:.0f} s")]
        for name, row in pool.items()
    ]
    return report.table([f"on {NUM_WORKERS} workers", "workers' time in steps", "duration"], found)


def _shown(figures: dict[str, Any], key: str, form: str) -> str:
    return form.format(figures[key]) if key in figures else str(figures["skipped"])
