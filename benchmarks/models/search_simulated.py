"""Simulated searches: which share of the samples ASHA can save with so many trials.

The curves of all trials are trained once in this process. The pruner is Optuna's, with the rungs of
the product, so that no cluster is needed to compare numbers of trials and divisors.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.models import search_work
from etrain_jupyter.plugins.search.folder import import_optuna
from etrain_jupyter.plugins.search.optuna_study import make_pruner
from etrain_jupyter.plugins.search.rules import place_rungs

LENGTH = search_work.NUM_TRAIN
DELAY_EPOCHS = 0.7
"""Epochs between a rung and the end of a pruned trial: the decision takes some time."""
CONCURRENT = 2
NUM_REPEATS = 4
"""Initial weights of one set of values, whose spread is the noise of the best value."""


def train_curves(
    model: str, *, num_trials: int, num_epochs: int, seed: int
) -> tuple[list[list[float]], float]:
    """Return the accuracy of random trials after each epoch, and the noise of the best one.

    The noise is the standard deviation of the best trial's accuracy over other initial weights.

    Args:
        model: Name of a model in ``search_work``.
        num_trials: Number of trials.
        num_epochs: Length of each trial.
        seed: Seed of the values.
    """
    optuna = import_optuna()
    kinds = optuna.distributions
    space = {
        "width": kinds.CategoricalDistribution([4, 8, 16]),
        "lr": kinds.FloatDistribution(1e-5, 1e-1, log=True),
    }
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    tried = [study.ask(space).params for _ in range(num_trials)]
    curves = [_train(model, values, num_epochs) for values in tried]
    best = tried[max(range(num_trials), key=lambda number: curves[number][-1])]
    inits = range(1, NUM_REPEATS + 1)
    repeats = [_train(model, best, num_epochs, init=init)[-1] for init in inits]
    return curves, statistics.pstdev(repeats)


def _train(model: str, values: dict[str, Any], num_epochs: int, *, init: int = 0) -> list[float]:
    train_set, eval_set = search_work.make_digits()
    net = search_work.MODELS[model](values["width"], init)
    optimizer = torch.optim.Adam(net.parameters(), lr=values["lr"])
    inputs, targets = train_set.tensors
    order = torch.Generator().manual_seed(0)
    curve = []
    for _ in range(num_epochs):
        shuffled = torch.randperm(LENGTH, generator=order)
        for batch in shuffled.tensor_split(LENGTH // search_work.BATCH):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(inputs[batch]), targets[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            hits = search_work.accuracy(net(eval_set.tensors[0]), eval_set.tensors[1])
        curve.append(float(hits.mean()))
    return curve


def simulate_asha(curves: Sequence[Sequence[float]], divisor: int) -> tuple[float, float]:
    """Return ASHA's share of the samples of random search, and by how much its best is lower.

    Args:
        curves: The metric of each trial after each epoch, of equal length.
        divisor: Ratio between two rungs.
    """
    optuna = import_optuna()
    num_epochs = len(curves[0])
    rungs = place_rungs(num_samples=num_epochs * LENGTH, divisor=divisor, min_samples=LENGTH)
    pruner = make_pruner(optuna, rungs, divisor)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    limit = rungs[0] * divisor ** len(rungs)
    trials = [study.ask() for _ in curves]
    waiting = iter(range(len(curves)))
    # Ends of epochs: time in epochs, trial, epoch. The first trials begin one after another.
    due = [(1.0 + n / 10, next(waiting), 1) for n in range(min(CONCURRENT, len(curves)))]
    heapq.heapify(due)
    epochs, best = 0.0, 0.0
    while due:
        at, number, epoch = heapq.heappop(due)
        trials[number].report(curves[number][epoch - 1], epoch * LENGTH)
        is_pruned = epoch * LENGTH < limit and trials[number].should_prune()
        if epoch < num_epochs and not is_pruned:
            heapq.heappush(due, (at + 1, number, epoch + 1))
            continue
        delay = DELAY_EPOCHS if is_pruned else 0.0
        epochs += epoch + delay
        best = best if is_pruned else max(best, curves[number][-1])
        if (following := next(waiting, None)) is not None:
            heapq.heappush(due, (at + delay + 1, following, 1))
    full = max(curve[-1] for curve in curves)
    return epochs / (num_epochs * len(curves)), full - best
