"""Searches: samples that ASHA saves against random search, its decisions, and moved workers.

Both searches try the same values, because they have the same seed. The first figure is the ratio of
the samples that they trained on, next to the difference of their best values. The second compares
each decision at a rung with Optuna alone, on the values that the study has stored. The third is the
time from the decision to end a trial to the first step of another trial on one of its workers.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks import ours, report
from etrain_jupyter import launch
from etrain_jupyter.head.studies.optuna_study import make_pruner
from etrain_jupyter.log import events as e
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.notebook.study.study import Study
from etrain_jupyter.notebook.study.view import StudyView
from etrain_jupyter.storage.study_folder import import_optuna

BAR_RATIO = 0.4
"""Maximum share of the samples of random search."""
BAR_S = 1.0
"""Maximum median time until a freed worker trains again, in seconds."""
TIMEOUT_S = 1800.0
STEP_S = 0.05
"""Minimum duration of a step in seconds. Decisions arrive while a trial continues, so a trial of
milliseconds would end before them."""
NUM_REPEATS = 4
"""Seeds of one set of values, whose spread is the noise of the best value."""

BODY = """\
model: Net(width, seed)
data: {{train: make_train, eval: make_eval}}
loss: slow_loss
metrics: {{accuracy: accuracy}}
optimizer: {{name: Adam, lr: !py lr}}
batch: 128
epochs: 16
checkpoint: {{every: 100000 steps}}
workers: {{min: 1, max: 1}}
search:
  space: {space}
  metric: eval_accuracy
  mode: max
  trials: {trials}
  method: {method}
  concurrent: 2
"""
SPACE = (
    "{width: {choice: [8, 32, 128]}, lr: {low: 1e-5, high: 1e-1, log: true}, seed: {choice: [0]}}"
)


class Net(nn.Module):
    """A network of one hidden layer, with its own seed."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``(B, 10)``."""
        logits_BK: torch.Tensor = self.layers(x_BD)
        return logits_BK


def _digits(begin: int, end: int) -> TensorDataset:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images_BD = torch.tensor(digits.data[begin:end], dtype=torch.float32) / 16
    return TensorDataset(images_BD, torch.tensor(digits.target[begin:end]))


def make_train() -> TensorDataset:
    """Return 1,280 handwritten digits of scikit-learn."""
    return _digits(0, 1280)


def make_eval() -> TensorDataset:
    """Return the other 517 digits."""
    return _digits(1280, 1797)


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, after ``STEP_S`` seconds without computing."""
    if torch.is_grad_enabled():
        time.sleep(STEP_S)
    return F.cross_entropy(output, target)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return 1 for each digit that was recognized."""
    return (output.argmax(-1) == target).float()


NAMES = {f.__name__: f for f in (Net, make_train, make_eval, slow_loss, accuracy)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--trials", type=int, default=24, help="trials of each search (24)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both searches and the repeats on one cluster."""
    trials = 10 if options.quick else options.trials
    with ours.cluster():
        asha, full = run("asha", trials), run("random", trials)
        best = full.view().best
        assert best is not None, "every trial of the random search failed"
        width, lr = best.params["width"], best.params["lr"]
        space = f"{{width: {{choice: [{width}]}}, lr: {{choice: [{lr!r}]}}, "
        space += f"seed: {{choice: {list(range(1, NUM_REPEATS + 1))}}}}}"
        repeats = run("grid", NUM_REPEATS, space)
        noise = float(np.std([trial.value for trial in repeats.view().trials]))
        moved = moved_s(asha)
    values = [study.view().best for study in (asha, full)]
    samples = [sum(trial.samples for trial in study.view().trials) for study in (asha, full)]
    return {
        "benchmark": "search",
        "bar_ratio": BAR_RATIO,
        "bar_s": BAR_S,
        "trials": trials,
        "ratio": samples[0] / samples[1],
        "samples": samples,
        "best": [found.value if found is not None else float("nan") for found in values],
        "noise": noise,
        **compare_decisions(asha.view()),
        "moves": len(moved),
        "moved_s": moved,
        "median_s": float(np.median(moved)) if moved else float("nan"),
        "p95_s": float(np.percentile(moved, 95)) if moved else float("nan"),
        "load": os.getloadavg()[0],
    }


def run(method: str, trials: int, space: str = SPACE) -> Study:
    """Run a study to its end."""
    body = BODY.format(space=space, trials=trials, method=method)
    plan = launch.plan_search(body, NAMES, {"name": method}, "%%etrain search")
    study = launch.submit_study(plan)
    status = study.wait(timeout=TIMEOUT_S)
    assert status == "finished", study.view().reason
    return study


def compare_decisions(view: StudyView) -> dict[str, int]:
    """Repeat a study's decisions with Optuna alone, on the stored values in their order."""
    optuna = import_optuna()
    pruner = make_pruner(optuna, view.rungs, 4)
    alone = optuna.create_study(direction="maximize", pruner=pruner)
    trials = {trial.number: alone.ask() for trial in view.trials}
    limit = view.rungs[0] * 4 ** len(view.rungs)
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


def moved_s(study: Study) -> list[float]:
    """Return the time from each decision to the next first step of another trial on its worker."""
    decisions: list[tuple[float, set[str], int]] = []
    starts: list[tuple[float, str, int]] = []
    for trial in study.view().trials:
        workers: set[str] = set()
        is_new: set[str] = set()
        for event in read_events(study.job(trial.number).record.log_path):
            match event:
                case e.GenerationFormed():
                    is_new |= set(event.ranks) - workers
                    workers = set(event.ranks)
                case e.StepCompleted() if is_new:
                    starts += [(event.time, worker, trial.number) for worker in is_new]
                    is_new = set()
                case e.LogLine() if "The study stops it" in event.text:
                    decisions.append((event.time, set(workers), trial.number))
                case _:
                    pass
    found = []
    for at, workers, number in decisions:
        after = [
            time - at
            for time, worker, trial in starts
            if worker in workers and trial != number and time > at
        ]
        if after:  # the last trials' workers have nothing left to do
            found.append(min(after))
    return sorted(found)


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a table."""
    asha, full = result["best"]
    rows = [
        ["samples against random search", f"{result['ratio']:.2f}", f"<= {BAR_RATIO}"],
        ["best accuracy, ASHA", f"{asha:.4f}", f"within {2 * result['noise']:.4f} of random"],
        ["best accuracy, random search", f"{full:.4f}", ""],
        ["noise (std. of 4 seeds)", f"{result['noise']:.4f}", ""],
        ["decisions", str(result["decisions"]), ""],
        ["different from Optuna alone", str(result["different"]), "0"],
        ["freed worker's first step, median", f"{result['median_s']:.2f} s", f"<= {BAR_S:.0f} s"],
        ["freed worker's first step, p95", f"{result['p95_s']:.2f} s", ""],
        ["moves", str(result["moves"]), ""],
        ["load of the machine", f"{result['load']:.1f}", ""],
    ]
    return report.table(["figure", "value", "bar"], rows)
