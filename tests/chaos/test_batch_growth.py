"""Learning rate scaling on the real system when the batch grows and shrinks with the workers.

Each worker is a trainer process that is connected to all others. Up to twelve of them share the
available cores: the result depends only on their number, and the models are small. Changes take
effect at a known step (``tests/chaos/gates.py``). The setups are those of an experiment in plain
PyTorch whose findings became the defaults (Lin et al., arXiv 1904.12043, and
``rules/learning_rate.py``). A change is judged by the loss on the whole training set after each
step: the highest loss in the 60 steps after the change, divided by the mean of the 20 steps before.

The system differs from that experiment in one point: its epochs end with a smaller step at the full
learning rate. That adds noise (peaks of up to 1.7 at a constant rate), and large batches that
overshoot recover more often. Tests of the experiment's thresholds therefore train on its samples as
one long epoch.

The ordinary suite runs one or two of three or five seeds; ``make endurance`` runs all of them.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from etrain_jupyter.rules.samples.ledger import cursor_at, epoch_order
from tests.capabilities import LONG, long, only_in_endurance
from tests.chaos.digits import (
    Pair,
    Run,
    as_one_epoch,
    digits,
    linear_factors,
    mlp,
    train,
    train_plainly,
)
from tests.chaos.forks import Zygote

pytestmark = pytest.mark.timeout(600)

GROWTH = ((1, 200), (12, 100))
RAMP = 105
"""Steps of the default ramp for momentum 0.9 and a rate that grows by a factor of twelve."""
OTHER_SEEDS = [
    pytest.mark.slow,
    only_in_endurance("ETRAIN_ALL_SEEDS"),
]
SEEDS = [
    pytest.param(range(2), id="seeds 0-1"),
    pytest.param(range(2, 5), id="seeds 2-4", marks=OTHER_SEEDS),
]
MNIST = Path("shared", "data", "mnist10k")
"""Relative to the repository or one of its parent folders."""


def sgd(lr: float) -> dict[str, Any]:
    return {"name": "SGD", "lr": lr, "momentum": 0.9}


def peak_by_pre(run: Run) -> float:
    """Assert that the only change took effect at the planned step; return its overshoot."""
    [change] = run.changes()
    assert change == GROWTH[0][1]
    return run.peak_by_pre(change)


def assert_is_the_plain_loop(run: Run, seed: int) -> None:
    """Assert that the losses of the job equal those of the plain PyTorch loop."""
    [change] = run.changes()
    phases = ((1, change), (12, len(run.steps) - change))
    losses, _ = train_plainly(linear_factors(phases, up=RAMP), seed=seed)
    for step, loss in run.evals.items():
        assert loss == pytest.approx(losses[step], rel=0.05, abs=1e-3), f"seed {seed}, step {step}"


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param((2, 3), id="seeds 2-3", marks=LONG),
        pytest.param(range(5), id="seeds 0-4", marks=OTHER_SEEDS),
    ],
)
async def test_learning_rate_overshoots_without_a_ramp_and_not_with_one(
    zygote: Zygote, folder: Path, seeds: Sequence[int]
) -> None:
    """Uses the samples and weights of the experiment, so its thresholds apply."""
    jumped, ramped = [], []
    for seed in seeds:
        (train_set, test_set), copies = digits(), as_one_epoch(seed)
        keys = {
            **{"seed": seed, "make": functools.partial(mlp, seed)},
            **{"data": (copies, test_set), "eval_set": train_set},
        }
        phases = ((1, 200), (12, 120))
        jump = await train(zygote, folder, phases, scaling={"rule": "linear", "ramp": 0}, **keys)
        ramp = await train(zygote, folder, phases, scaling={"rule": "linear", "ramp": 96}, **keys)
        assert peak_by_pre(jump) > 3
        assert peak_by_pre(ramp) < 1.6
        jumped.append(jump.accuracy)
        ramped.append(ramp.accuracy)
    assert statistics.mean(jumped) < 0.90
    assert statistics.mean(ramped) > 0.95


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=OTHER_SEEDS)])
@long
async def test_twelve_processes_reproduce_the_losses_of_one_process(
    zygote: Zygote, folder: Path, seed: int
) -> None:
    """Epochs end with a smaller step, and the momentum determines the length of the ramp."""
    run = await train(zygote, folder, GROWTH, seed=seed, scaling={"rule": "linear"})
    assert_is_the_plain_loop(run, seed)


@pytest.mark.parametrize("seeds", SEEDS)
@long
async def test_ramp_shorter_than_the_momentum_requires_overshoots(
    zygote: Zygote, folder: Path, seeds: range
) -> None:
    phases, peaks = (GROWTH[0], (12, 62)), {}
    for ramp in (8, 96):
        scaling = {"rule": "linear", "ramp": ramp}
        runs = [await train(zygote, folder, phases, seed=seed, scaling=scaling) for seed in seeds]
        peaks[ramp] = statistics.mean(peak_by_pre(run) for run in runs)
    assert peaks[8] > 2
    assert peaks[96] < (1.3 if 4 not in seeds else 1.4)  # seed 4 is noisy; see the module docstring


SHRINKING = ((1, 200), (12, 200), (1, 120))


@pytest.mark.parametrize(
    ("lr", "seeds"),
    [
        pytest.param(0.1, range(1), id="lr 0.1, seed 0", marks=LONG),
        pytest.param(0.1, range(1, 5), id="lr 0.1, seeds 1-4", marks=OTHER_SEEDS),
        pytest.param(0.05, range(5), id="lr 0.05", marks=OTHER_SEEDS),
    ],
)
async def test_shrinking_batch_lowers_the_learning_rate_immediately(
    zygote: Zygote, folder: Path, lr: float, seeds: range
) -> None:
    for seed in seeds:
        keys = {"seed": seed, "scaling": {"rule": "linear"}, "optimizer": sgd(lr)}
        run = await train(zygote, folder, SHRINKING, **keys)
        _, change = run.changes()
        assert run.peak(change) < 0.15
        assert run.accuracy > 0.95


@pytest.mark.parametrize("lr", [0.1, 0.05])
@long
def test_control_ramp_down_in_plain_pytorch_diverges_with_the_small_batch(lr: float) -> None:
    """Uses plain PyTorch, because the system has no such ramp."""
    peaks = []
    for seed in range(5):
        losses, _ = train_plainly(linear_factors(SHRINKING, up=96, down=96), seed=seed, lr=lr)
        peaks.append(max(losses[step] for step in range(401, 461)))
    assert statistics.median(peaks) > 1


def cnn() -> nn.Module:
    """Return a model without normalization, which would hide an excessive learning rate."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def mnist() -> tuple[Pair, Pair]:
    """Return 8,000 training and 2,000 test samples."""
    found = [folder / MNIST for folder in Path(__file__).parents if (folder / MNIST).is_dir()]
    if not found:
        pytest.skip(f"data: needs the 10,000 digits of MNIST's test half in {MNIST}")
    images, labels = (
        np.frombuffer(gzip.decompress((found[0] / name).read_bytes()), np.uint8, offset=offset)
        for name, offset in (("t10k-images-idx3-ubyte.gz", 16), ("t10k-labels-idx1-ubyte.gz", 8))
    )
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images.reshape(-1, 1, 28, 28).astype(np.float32) / 255)[order]
    y = torch.tensor(labels.astype(np.int64))[order]
    return (x[:8_000], y[:8_000]), (x[8_000:], y[8_000:])


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1), id="seed 0"),
        pytest.param(range(1, 3), id="seeds 1-2", marks=OTHER_SEEDS),
    ],
)
@long
async def test_cnn_does_not_recover_from_the_overshoot_without_a_ramp(
    zygote: Zygote, folder: Path, seeds: range
) -> None:
    """Judged by the losses of the steps, because 768 of 8,000 samples represent the whole set."""
    data, phases = mnist(), ((1, 250), (12, 60))
    batch = {"per_worker": 64}
    keys = {"optimizer": sgd(0.05), "make": cnn, "data": data, "batch": batch, "eval": "1e6 steps"}
    for seed in seeds:
        jumps = {"rule": "linear", "ramp": 0}
        assert (
            await train(zygote, folder, phases, seed=seed, scaling=jumps, **keys)
        ).accuracy < 0.7
        run = await train(zygote, folder, phases, seed=seed, scaling={"rule": "linear"}, **keys)
        [change] = run.changes()
        losses = [e.loss for e in run.steps]
        assert run.accuracy > 0.94
        assert max(losses[change:]) / statistics.mean(losses[change - 20 : change]) < 1.5


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1), id="seed 0"),
        pytest.param(range(1, 5), id="seeds 1-4", marks=OTHER_SEEDS),
    ],
)
@long
async def test_adascale_converges_at_a_rate_at_which_the_linear_rule_fails(
    zygote: Zygote, folder: Path, seeds: range
) -> None:
    """A ramp only postpones the final rate of 12 x 0.2, which is too large."""
    accuracies: dict[str, list[float]] = {"linear": [], "adascale": []}
    for rule, seed in itertools.product(accuracies, seeds):
        keys = {"seed": seed, "optimizer": sgd(0.2), "scaling": {"rule": rule}}
        run = await train(zygote, folder, ((1, 200), (12, 120)), eval="1000000 steps", **keys)
        accuracies[rule].append(run.accuracy)
    assert statistics.mean(accuracies["linear"]) < 0.92, accuracies
    assert statistics.mean(accuracies["adascale"]) > 0.95, accuracies


@long
async def test_spot_like_scaling_costs_no_accuracy(zygote: Zygote, folder: Path) -> None:
    """Compare with one worker that trains the same number of samples, the unit of a job's length.

    It takes 2,340 steps for them, the elastic job 360. With equal steps it would be less accurate.
    """
    sizes = (1, 12, 4, 12, 2, 8)
    phases, num_static = [(size, 60) for size in sizes], 60 * sum(sizes)
    keys = {"optimizer": sgd(0.05), "scaling": {"rule": "linear"}, "eval": "1000000 steps"}
    run = await train(zygote, folder, phases, **keys)
    assert [e.world_size for e in run.steps if e.step % 60 == 30] == list(sizes)
    _, static = train_plainly(((1, 1.0) for _ in range(num_static)), lr=0.05)
    assert run.accuracy >= static - 0.01


def mean_of_means(num_steps: int, sizes: list[int] | None) -> dict[str, torch.Tensor]:
    """Train with the mean over 64 samples, or with the mean of the means of parts of these sizes.

    DistributedDataParallel computes the latter if ranks have unequal shares.
    """
    (x, y), _ = digits()
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        span = cursor_at(step, len(x), 64)
        order = epoch_order(seed=0, epoch=span.epoch, num_samples=len(x))
        rows = torch.as_tensor(order[span.first : span.first + span.samples])
        parts = (
            [rows] if sizes is None else [p for p in rows.split(sizes_of(rows, sizes)) if len(p)]
        )
        optimizer.zero_grad()
        for part in parts:
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            (loss / len(parts)).backward()
        optimizer.step()
    return model.state_dict()


def sizes_of(rows: torch.Tensor, sizes: list[int]) -> list[int]:
    """Return the sizes of the parts in proportion for a smaller step."""
    first, second = (round(len(rows) * size / 64) for size in sizes[:2])
    return [first, second, len(rows) - first - second]


async def test_uneven_shares_compute_the_exact_mean_over_samples(
    zygote: Zygote, folder: Path
) -> None:
    """Eight shards on three workers, which get 24, 24 and 16 of 64 samples."""
    keys = {
        "batch": {"global": 64},
        "reproducible": {"shards": 8},
        "eval": "1000000 steps",
        "steps": 200,
    }
    one = await train(zygote, folder, [(1, 200)], **keys)
    three = await train(zygote, folder, [(3, 200)], **keys)
    assert len(one.steps) == len(three.steps) == 200
    assert all(torch.equal(three.weights[name], value) for name, value in one.weights.items())

    exact, means = mean_of_means(200, None), mean_of_means(200, [24, 24, 16])
    assert farthest(one.weights, exact) < 1e-4
    assert farthest(one.weights, means) > 1e-3


def farthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights."""
    return max((value - theirs[name]).abs().max().item() for name, value in ours.items())
