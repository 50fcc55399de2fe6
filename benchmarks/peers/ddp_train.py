"""Plain DDP under ``torchrun``: the peer of ``steady``.

The script is written for speed: every rank has the whole data set as tensors and selects its share
of each batch by indices, without a data loader, logging or checkpoints. ``--loader`` reads the
samples through ``DataLoader`` and ``DistributedSampler`` instead, as most scripts do.
``--aggregation 4`` splits each share into four passes and runs all except the last under
``no_sync``. ``--gated`` lets the benchmark ``paired`` start and stop the ranks. The workload
``photos`` always uses a ``DataLoader``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from benchmarks.common.gate import gated_loss
from benchmarks.common.workloads import (
    GLOBAL_BATCH_SIZE,
    LEARNING_RATE,
    MODELS,
    MOMENTUM,
    PHOTOS,
    make_images,
)

Batch = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    """Train; on rank 0, write the completion time of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=[*MODELS, PHOTOS], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--loader", action="store_true")
    parser.add_argument("--num-workers", type=int, default=0, help="of the data loader")
    parser.add_argument("--aggregation", type=int, default=1, help="passes per step")
    parser.add_argument("--gated", action="store_true", help="wait in the loss for the benchmark")
    options = parser.parse_args()
    device = choose_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    build, batches = task_of(options, device)
    loss = gated_loss if options.gated else cross_entropy
    times = train(build().to(device), batches, options.steps, options.aggregation, loss)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps({"times": times}), encoding="utf-8")
    dist.destroy_process_group()


def task_of(
    options: argparse.Namespace, device: torch.device
) -> tuple[Callable[[], nn.Module], Iterator[Batch]]:
    """Return the function that builds the model, and this rank's batches."""
    if options.workload == PHOTOS:
        from benchmarks.common import photos

        loaded = loader_batches(photos.Photos(), options.num_workers, photos.collate)
        return photos.build, ((some.to(device), wanted.to(device)) for some, wanted in loaded)
    images, labels = (values.to(device) for values in make_images())
    if options.loader:
        batches = loader_batches(TensorDataset(images, labels), options.num_workers)
    else:
        batches = index_batches(images, labels)
    return MODELS[options.workload], batches


def choose_device() -> torch.device:
    """Return this rank's own GPU, or the CPU if there are fewer GPUs than ranks."""
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def train(
    module: nn.Module,
    batches: Iterator[Batch],
    num_steps: int,
    num_passes: int = 1,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy,
) -> list[float]:
    """Run ``num_steps`` updates and return their completion times."""
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    times = []
    for _ in range(num_steps):
        inputs, target = next(batches)
        parts = list(zip(inputs.chunk(num_passes), target.chunk(num_passes), strict=True))
        for number, (some, wanted) in enumerate(parts, 1):
            is_last = number == len(parts)
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = loss_of(model(some), wanted) * (len(wanted) / len(target))
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.time())
    return times


def index_batches(images: torch.Tensor, labels: torch.Tensor) -> Iterator[Batch]:
    """Yield this rank's share of every batch, with a new permutation for each epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(labels), generator=generator)
        for batch in torch.split(order, GLOBAL_BATCH_SIZE):
            mine = batch.chunk(world_size)[rank]
            yield images[mine], labels[mine]


def loader_batches(
    data: Dataset[Any], num_workers: int, collate: Callable[[list[Any]], Batch] | None = None
) -> Iterator[Batch]:
    """Yield this rank's share of every batch through ``DataLoader``."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)
    loader: DataLoader[Any] = DataLoader(
        data,
        batch_size=GLOBAL_BATCH_SIZE // dist.get_world_size(),
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        persistent_workers=num_workers > 0,
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


if __name__ == "__main__":
    main()
