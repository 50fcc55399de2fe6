"""Plain DDP with checkpoints under ``torchrun``: the peer of ``checkpoint``.

``--how save`` writes with ``torch.save`` on rank 0 while all ranks wait, as most scripts do.
``--how async`` uses ``torch.distributed.checkpoint.async_save`` on all ranks, as its documentation
shows: it waits for the previous save, copies the state, and lets a thread write it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.workloads import LARGE_MODELS, LEARNING_RATE, MOMENTUM, make_images
from benchmarks.peers.ddp_train import index_batches

State = dict[str, Any]


def main() -> None:
    """Train; on rank 0, write the completion time of each step and the stall of each save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=LARGE_MODELS, required=True)
    parser.add_argument("--how", choices=("save", "async"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LARGE_MODELS[options.workload]()
    saver: Saver = Saver(options.folder) if options.how == "save" else AsyncSaver(options.folder)
    result = train(model, saver, options.steps, options.every)
    if dist.get_rank() == 0:
        text = json.dumps(result)
        (options.folder / "result.json").write_text(text, encoding="utf-8")
    dist.destroy_process_group()


class Saver:
    """Save with ``torch.save`` on rank 0, replacing the previous checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, state: Callable[[], State], step: int) -> None:
        """Save the state. Return when training may continue."""
        if dist.get_rank() == 0:
            temporary = self.folder / "checkpoint.tmp"
            torch.save(state(), temporary)
            os.replace(temporary, self.folder / "checkpoint.pt")

    def close(self) -> None:
        """Wait for what is still being written."""


class AsyncSaver(Saver):
    """Save with ``async_save`` on all ranks, one save at a time, each into a separate folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._group = dist.new_group(backend="gloo")
        self._pending: Future[Any] | None = None

    def save(self, state: Callable[[], State], step: int) -> None:
        """Copy the state and return while a thread writes it."""
        self.close()
        folder = self.folder / f"checkpoint-{step}"
        pending = async_save(state(), checkpoint_id=folder, process_group=self._group)
        assert isinstance(pending, Future)
        self._pending = pending

    def close(self) -> None:
        """Wait for what is still being written."""
        if self._pending is not None:
            self._pending.result()


def train(module: nn.Module, saver: Saver, num_steps: int, every: int) -> dict[str, list[Any]]:
    """Run ``num_steps`` updates; return their completion times, and each save's step and stall."""
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    batches = index_batches(*make_images())
    times, stalls = [], []

    def state() -> State:
        return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}

    for step in range(1, num_steps + 1):
        inputs, target = next(batches)
        cross_entropy(model(inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.time())
        if step % every == 0 and step < num_steps:
            begin = time.perf_counter()
            saver.save(state, step)
            stalls.append([step, time.perf_counter() - begin])
    saver.close()
    return {"times": times, "stalls": stalls}


if __name__ == "__main__":
    main()
