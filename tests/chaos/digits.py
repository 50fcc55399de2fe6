"""Train on scikit-learn's digits with the real system while the number of workers changes.

The setup is the same as in the plain PyTorch experiment that the thresholds come from: 1,437
training samples, 360 test samples, an MLP 64-64-10, SGD with momentum 0.9, 16 samples per worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from etrain_jupyter.log.events import EvalCompleted, Event, StepCompleted
from etrain_jupyter.rules.samples.ledger import epoch_order
from etrain_jupyter.storage.checkpoints import open_newest, open_store
from etrain_jupyter.testing.invariants import assert_invariants
from etrain_jupyter.trainer.state.capture import load_model_state
from tests.chaos.forks import Zygote
from tests.chaos.gates import Gated, Gates, Keeper
from tests.chaos.rig import RigJob, make_rig

Pair = tuple[torch.Tensor, torch.Tensor]
NUM_TRAIN = 1_437
NUM_COPIES = 20
PATIENCE_S = 240.0


@functools.cache
def digits() -> tuple[Pair, Pair]:
    """Return the training set and the test set."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pixels / 16, dtype=torch.float32)[order]
    y = torch.tensor(labels)[order]
    return (x[:NUM_TRAIN], y[:NUM_TRAIN]), (x[NUM_TRAIN:], y[NUM_TRAIN:])


def as_one_epoch(seed: int) -> Pair:
    """Return many copies of the training set as one epoch that is longer than the job.

    A job with this seed sees one shuffled copy after another, as in the experiment, without the
    smaller step at the end of an epoch.
    """
    (x, y), _ = digits()
    generator = torch.Generator().manual_seed(1000 + seed)
    seen = torch.cat([torch.randperm(len(x), generator=generator) for _ in range(NUM_COPIES)])
    places = torch.empty_like(seen)
    order = epoch_order(seed=seed, epoch=0, num_samples=len(seen))
    places[torch.as_tensor(order)] = seen
    return x[places], y[places]


def mlp(seed: int | None = None) -> nn.Module:
    """Return the network, initialized from ``seed`` as in the experiment, or by the job."""
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def gated(make: Callable[[], nn.Module], gates: Gates) -> nn.Module:
    return Gated(make(), gates)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of a finished job."""

    steps: list[StepCompleted]
    evals: dict[int, float]
    """Loss on the evaluation set after each step."""
    accuracy: float
    """Final accuracy on the test set."""
    weights: dict[str, torch.Tensor]
    """Final weights."""

    def changes(self) -> list[int]:
        """Return the last step before each change of the world size."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [a.step for a, b in pairs if a.world_size != b.world_size]

    def peak(self, change: int, num_steps: int = 60) -> float:
        """Return the highest loss in the steps after a change."""
        return max(self.evals[step] for step in range(change + 1, change + 1 + num_steps))

    def peak_by_pre(self, change: int) -> float:
        """Return the peak after a change divided by the mean loss of the 20 steps before it."""
        before = [self.evals[step] for step in range(change - 19, change + 1)]
        return self.peak(change) * len(before) / sum(before)


async def train(
    zygote: Zygote,
    folder: Path,
    phases: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    make: Callable[[], nn.Module] = mlp,
    data: tuple[Pair, Pair] | None = None,
    eval_set: Pair | None = None,
    **keys: Any,
) -> Run:
    """Train through ``phases`` of (number of workers, number of steps), then stop the job.

    The job may take one extra step if the stop request arrives late; the key ``steps`` prevents it.
    """
    (train_set, test_set), folder = data or digits(), folder / f"{len(list(folder.iterdir()))}"
    folder.mkdir()
    ends, num_steps = [], 0
    for _, length in phases:
        num_steps += length
        ends.append(num_steps)
    gates = Gates(str(folder), tuple(ends), seed)
    body = {
        "model": functools.partial(gated, make, gates),
        "data": {"train": train_set, "eval": train_set if eval_set is None else eval_set},
        "loss": F.cross_entropy,
        "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
        "batch": {"per_worker": 16, "micro": NUM_TRAIN},
        "eval": "1 step",
        "checkpoint": {"every": "1000000 steps"},
        **({} if "steps" in keys else {"epochs": 10_000}),
        "seed": seed,
        **keys,
    }
    most = max(world_size for world_size, _ in phases)
    async with make_rig(zygote, folder, slots=most) as rig:
        with Keeper(gates).at_work() as keeper:
            first = phases[0][0]
            job = await rig.submit({**body, "workers": {"min": first, "max": first}})
            for end, (world_size, _) in zip(ends, phases[1:], strict=False):
                await keeper.scale(job, end, world_size)
            await job.until(lambda: job.step >= num_steps - 1, PATIENCE_S)
            await job.request("stop")
            keeper.open(num_steps)
            log = await job.end()
        assert job.status in ("stopped", "finished"), job.describe()
        assert_invariants(log)
        weights = weights_of(job)
        return Run(
            steps=found(log, StepCompleted),
            evals={e.step: e.loss for e in found(log, EvalCompleted)},
            accuracy=accuracy_of(weights, make, test_set),
            weights=weights,
        )


def train_plainly(
    factors: Iterable[tuple[int, float]], *, seed: int = 0, lr: float = 0.1
) -> tuple[dict[int, float], float]:
    """Train the same model in one process with plain PyTorch and given learning rate factors.

    Args:
        factors: Number of workers and learning rate factor of each step.
        seed: Seed of the job, which determines the initial weights and the order of samples.
        lr: Learning rate for the base batch.

    Returns:
        The loss on the training set after each step, and the final accuracy.
    """
    (x, y), test_set = digits()
    torch.manual_seed(seed * 1_000_003 * 4_099)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    position, losses = 0, {}
    for step, (world_size, factor) in enumerate(factors, 1):
        epoch, first = divmod(position, len(x))
        order = epoch_order(seed=seed, epoch=epoch, num_samples=len(x))
        rows = torch.as_tensor(order[first : first + 16 * world_size])
        position += len(rows)
        optimizer.param_groups[0]["lr"] = lr * factor
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        with torch.no_grad():
            losses[step] = F.cross_entropy(model(x), y).item()
    return losses, accuracy_of(model.state_dict(), mlp, test_set)


def linear_factors(
    phases: Sequence[tuple[int, int]], *, up: int, down: int = 0
) -> Iterator[tuple[int, float]]:
    """Yield the number of workers and the linear factor of each step, with ramps up and down."""
    factor = float(phases[0][0])
    for world_size, num_steps in phases:
        start, length = factor, up if world_size > factor else down
        for since in range(num_steps):
            passed = 1.0 if since >= length else since / length
            factor = start + (world_size - start) * passed
            yield world_size, factor


def weights_of(job: RigJob) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint, without the gates."""
    found = open_newest(open_store(str(job.hosted.spec.run_dir)), job_id=job.id)
    state = load_model_state(found.files["model.safetensors"])
    return {name.removeprefix("model."): value for name, value in state.items()}


def accuracy_of(state: dict[str, torch.Tensor], make: Callable[[], nn.Module], to: Pair) -> float:
    model = make()
    model.load_state_dict(state)
    x, y = to
    with torch.no_grad():
        return (model.eval()(x).argmax(1) == y).float().mean().item()


def found(log: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in log if isinstance(event, kind)]
