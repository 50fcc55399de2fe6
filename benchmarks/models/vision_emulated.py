"""Train as an elastic job does, in one process: the same samples, rates and weights, but no ranks.

The order of the samples, the augmentation, the schedule, the ramp and the estimate of the gradient
noise are those of the package. Each rank's share of a step is one forward pass. So a run has the
losses of a job with as many processes, except for rounding, for a fraction of the processor time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.models.vision_work import MOMENTUM, VisionTask
from etrain_jupyter.data.batch_key import EVALUATION, fetching
from etrain_jupyter.rules.learning_rate import GradientNoise, LrSchedule, Ramp, factor_of
from etrain_jupyter.rules.samples.ledger import Cursor, epoch_order
from etrain_jupyter.trainer.seeds import seed_all

EVAL_BATCH = 64


def run_emulated(
    task: VisionTask,
    policy: str,
    seed: int,
    *,
    train: Sequence[Any],
    test: Sequence[Any],
    world_size_at: Callable[[int], int],
) -> dict[str, Any]:
    """Train once.

    Args:
        task: The task.
        policy: Key of ``vision.POLICIES``.
        seed: Seed of the job.
        train: Training samples.
        test: Evaluation samples.
        world_size_at: Returns the number of workers of a step, from 0.

    Returns:
        ``scores`` of the trained model, ``losses`` of the steps, ``sizes``: the number of workers
        of each step, and ``cpu_s``.
    """
    began = time.process_time()
    collate = task.batches()
    seed_all(seed, step=0, rank=0)
    model = task.model().train()
    rates = _Rates(policy, task, end=task.epochs * len(train))
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=MOMENTUM)
    cursor = Cursor(epoch=0, first=0)
    losses: list[float] = []
    sizes: list[int] = []
    order = epoch_order(seed=seed, epoch=0, num_samples=len(train))
    while cursor.epoch < task.epochs:
        step, world_size = len(losses), world_size_at(len(losses))
        scale = 1 if policy in FIXED_BATCH else world_size
        span = cursor.next_range(num_samples=len(train), global_batch_size=task.batch * scale)
        if span.first == 0:
            order = epoch_order(seed=seed, epoch=span.epoch, num_samples=len(train))
        rows = order[span.first : span.first + span.samples].tolist()
        optimizer.param_groups[0]["lr"] = task.lr * rates.factor(
            span.position(len(train)), span.samples, world_size
        )
        seed_all(seed, step=step + 1, rank=0)
        batches = []
        for part in _shares(rows, world_size):
            with fetching(seed=seed, epoch=span.epoch, samples=part):
                batches.append((len(part) / len(rows), collate([train[row] for row in part])))
        loss, squares = set_gradients(task, model, batches)
        optimizer.step()
        rates.commit(squares, _square_of(w.grad for w in model.parameters()), len(batches))
        losses.append(loss)
        sizes.append(world_size)
        cursor = cursor.advance(span.samples, num_samples=len(train))
    scores = evaluate(task, model, test)
    cpu_s = time.process_time() - began
    return {"scores": scores, "losses": losses, "sizes": sizes, "cpu_s": cpu_s}


FIXED_BATCH = ("fixed", "global")
"""Policies whose batch does not depend on the number of workers."""


class _Rates:
    """The learning rate factor of each step, as ``trainer.loop.learning_rate`` computes it."""

    def __init__(self, policy: str, task: VisionTask, *, end: int) -> None:
        self._policy = policy
        self._schedule = LrSchedule(decay=task.decay, end=end)
        self._ramp, self._noise = Ramp(), GradientNoise()

    def factor(self, position: int, count: int, world_size: int) -> float:
        """Return the factor of the next step."""
        factor = self._schedule.factor(position, count)
        if self._policy in FIXED_BATCH:
            return factor
        length = 0 if self._policy == "immediate" else None
        self._ramp = self._ramp.aim(factor_of("linear", world_size), MOMENTUM, length)
        most = math.inf
        if self._policy == "adascale":
            most = self._noise.gain(world_size=world_size, base_workers=1)
        return factor * min(self._ramp.factor, most)

    def commit(self, mean_of_squares: float, square_of_mean: float, world_size: int) -> None:
        """Continue after a step."""
        self._ramp = self._ramp.advance()
        self._noise = self._noise.take(
            mean_of_squares=mean_of_squares, square_of_mean=square_of_mean, world_size=world_size
        )


def set_gradients(
    task: VisionTask, model: nn.Module, batches: Sequence[tuple[float, Any]]
) -> tuple[float, float]:
    """Set the gradients of a step.

    Args:
        task: The task.
        model: The model, whose gradients are replaced.
        batches: Share of the samples, and batch, of each rank.

    Returns:
        The loss of the step, and the mean over the ranks of the squared norm of their gradients.
    """
    weights = list(model.parameters())
    total = [torch.zeros_like(weight) for weight in weights]
    loss, squares = 0.0, 0.0
    for share, batch in batches:
        own = loss_of(task, model, batch)
        gradients = torch.autograd.grad(own, weights)
        torch._foreach_add_(total, gradients, alpha=share)
        loss += own.item() * share
        squares += _square_of(gradients) / len(batches)
    for weight, gradient in zip(weights, total, strict=True):
        weight.grad = gradient
    return loss, squares


def _square_of(gradients: Iterable[torch.Tensor | None]) -> float:
    return sum(float(one.square().sum()) for one in gradients if one is not None)


def _shares(rows: list[int], num_ranks: int) -> list[list[int]]:
    """Return the samples of each rank that has some."""
    num_ranks = min(num_ranks, len(rows))
    ends = [len(rows) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [rows[low:high] for low, high in itertools.pairwise(ends)]


def loss_of(task: VisionTask, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch."""
    found = task.step(model, batch)
    loss: torch.Tensor = found["loss"] if isinstance(found, dict) else found
    return loss


@torch.no_grad()
def evaluate(task: VisionTask, model: nn.Module, samples: Sequence[Any]) -> dict[str, float]:
    """Return the scores of a model, as the evaluation of a job computes them."""
    collate, records = task.batches(), []
    model.eval()
    for first in range(0, len(samples), EVAL_BATCH):
        chosen = range(first, min(first + EVAL_BATCH, len(samples)))
        with fetching(seed=0, epoch=EVALUATION, samples=chosen):
            batch = collate([samples[row] for row in chosen])
        found = task.predict(model, batch)
        if isinstance(found, dict):
            found = [{k: v[place] for k, v in found.items()} for place in range(len(chosen))]
        records += list(found)
    model.train()
    return dict(task.score_records(records))
