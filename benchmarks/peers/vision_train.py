"""torchvision's ResNet under plain DDP and ``torchrun``: the peer of ``vision``.

It reads the same samples with the same augmentation through ``DataLoader`` and
``DistributedSampler``. Before each step, it waits for its turn (``vision_turns``). Rank 0 writes
the completion time of each step, one per line, until the process is terminated.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.vision_turns import Turn
from benchmarks.vision_work import RESNET_BATCH, photo_batches, photo_resnet, read
from benchmarks.workloads import LEARNING_RATE, MOMENTUM


def main() -> None:
    """Train, and write the times of the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--times", type=Path, required=True, help="output file")
    parser.add_argument("--turn", required=True, help="folder of the turns")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(photo_resnet())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    batches = loader_batches(read(options.data, "photos", "train"))
    turn = Turn(folder=options.turn, side="ddp")
    path = options.times if dist.get_rank() == 0 else os.devnull
    with open(path, "w", buffering=1) as output:
        for step in itertools.count(1):
            turn.wait_for(step)
            images, labels = next(batches)
            loss = cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            output.write(f"{time.time()}\n")


def loader_batches(samples: Any) -> Iterator[Any]:
    """Yield this rank's share of every batch."""
    sampler: DistributedSampler[Any] = DistributedSampler(samples, seed=0)
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size=RESNET_BATCH // dist.get_world_size(),
        sampler=sampler,
        collate_fn=photo_batches(),
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


if __name__ == "__main__":
    main()
