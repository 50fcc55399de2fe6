"""Plain PyTorch training loop in one process: the reference that jobs must equal bit for bit.

It uses only the order of the samples from the product, because that order defines a job. The
guarantees of ``reproducible`` are implemented here independently, after
docs/explanation/reproducibility.md: even shards, a seed per shard, and one binary tree of
additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.rules.samples.ledger import epoch_order

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Gradient = torch.Tensor | None


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the default optimizer of the jobs in these tests."""
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


@dataclass(frozen=True, kw_only=True)
class PlainJob:
    """A training job with seed 0."""

    model: Callable[[], nn.Module]
    data: tuple[torch.Tensor, torch.Tensor]
    batch_size: int
    num_steps: int
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = adamw
    loss: Loss = F.cross_entropy
    num_shards: int | None = None
    """Number of shards of a ``reproducible`` job."""
    precision: str = "fp32"
    clip: float | None = None
    lr_at: Callable[[int, int], float] | None = None
    """Learning rate of a step, from the samples before it and its own; None for a constant rate."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a training job."""

    model: nn.Module
    losses: list[float]
    skipped: list[int]
    """Steps whose gradients overflowed."""


def train_plainly(job: PlainJob) -> Trained:
    """Train a job; with shards in one thread, because sums in kernels depend on the threads."""
    num_threads = torch.get_num_threads()
    if job.num_shards is not None:
        torch.set_num_threads(1)  # like ``reproducible``
    try:
        return _train(job)
    finally:
        torch.set_num_threads(num_threads)


def _train(job: PlainJob) -> Trained:
    seed(step=0)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=job.precision == "fp16")
    losses, skipped, position = [], [], 0
    for step, rows in zip(range(1, job.num_steps + 1), batches(job), strict=False):
        if job.num_shards is None:
            losses.append(_whole(job, model, scaler, step, rows))
        else:
            losses.append(_in_shards(job, model, scaler, step, rows))
        if job.lr_at is not None:
            optimizer.param_groups[0]["lr"] = job.lr_at(position, len(rows))
        position += len(rows)
        scaler.unscale_(optimizer)
        if job.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped.append(step)
        optimizer.zero_grad()
    return Trained(model=model, losses=losses, skipped=skipped)


def seed(*, step: int, stream: int = 0) -> None:
    """Set the RNG state of a step on a rank or shard, for jobs of seed 0."""
    torch.manual_seed(step * 4_099 + stream)


def batches(job: PlainJob) -> Iterator[torch.Tensor]:
    """Yield the rows of each step; the last step of an epoch has the remaining rows."""
    num_samples = len(job.data[0])
    for epoch in count():
        order = epoch_order(seed=0, epoch=epoch, num_samples=num_samples)
        yield from torch.as_tensor(order).split(job.batch_size)


def _whole(
    job: PlainJob, model: nn.Module, scaler: torch.amp.GradScaler, step: int, rows: torch.Tensor
) -> float:
    seed(step=step)
    loss = _loss(job, model, rows)
    scaler.scale(loss).backward()
    return loss.item()


def _loss(job: PlainJob, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    x, y = job.data
    dtype = DTYPES.get(job.precision, torch.bfloat16)
    with torch.autocast("cpu", dtype=dtype, enabled=job.precision in DTYPES):
        return job.loss(model(x[rows]), y[rows])


def _in_shards(
    job: PlainJob, model: nn.Module, scaler: torch.amp.GradScaler, step: int, rows: torch.Tensor
) -> float:
    """Compute the gradient into the model; each shard is a separate pass."""
    assert job.num_shards is not None
    before = {name: b.clone() for name, b in model.named_buffers()}
    losses: list[torch.Tensor] = []
    gradients: list[list[Gradient]] = []
    moves: list[list[torch.Tensor]] = []
    for shard, own in enumerate(shards_of(job, rows)):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        model.zero_grad()
        seed(step=step, stream=shard)
        weight = len(own) / len(rows)
        loss = _loss(job, model, own) * weight
        scaler.scale(loss).backward()
        losses.append(loss.detach().double())
        gradients.append([p.grad for p in model.parameters()])
        pairs = [(b.double(), before[n].double()) for n, b in model.named_buffers()]
        moves.append([(now - old) * weight for now, old in pairs])
    for parameter, found in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
        zeros = torch.zeros_like(parameter)
        is_touched = any(g is not None for g in found)
        values = [zeros if g is None else g for g in found]
        parameter.grad = add_up(values, job.num_shards) if is_touched else None
    for (name, buffer), found in zip(model.named_buffers(), zip(*moves, strict=True), strict=False):
        value = before[name].double() + add_up(list(found), job.num_shards)
        buffer.copy_(value if buffer.is_floating_point() else value.round())
    return add_up(losses, job.num_shards).item()


def shards_of(job: PlainJob, rows: torch.Tensor) -> list[torch.Tensor]:
    """Split a step's rows as evenly as possible; the first shards get more, none gets a single row.

    The last step of an epoch may have too few rows: the last shards are empty then.
    """
    assert job.num_shards is not None
    fewest = min(2, max(1, job.batch_size // job.num_shards))
    num_busy = min(job.num_shards, max(1, len(rows) // fewest))
    return list(rows.tensor_split(num_busy))


def add_up(values: list[torch.Tensor], num_leaves: int) -> torch.Tensor:
    """Add up along the tree over ``num_leaves`` leaves; leaves without a value are 0."""
    leaves = [*values, *[torch.zeros_like(values[0])] * (num_leaves - len(values))]
    if num_leaves == 1:
        return leaves[0]
    middle = num_leaves // 2
    left, right = leaves[:middle], leaves[middle:]
    return add_up(left, len(left)) + add_up(right, len(right))
