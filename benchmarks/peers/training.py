"""Common parts of the peers' scripts: task, model, data and checkpoint file.

Every system trains the same steps. The 128 samples of step ``s`` depend only on ``s``, so a script
that resumes from a checkpoint neither skips nor repeats a sample. Most user scripts do not do this;
a careful script for these systems would.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.common.workloads import (
    GLOBAL_BATCH_SIZE,
    LEARNING_RATE,
    MODELS,
    MOMENTUM,
    NUM_SAMPLES,
    make_images,
)

BATCHES_PER_EPOCH = NUM_SAMPLES // GLOBAL_BATCH_SIZE


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task of a peer. The ranks read it from the run's folder."""

    folder: Path
    """Folder for the step logs, the checkpoint and the output."""
    workload: str
    num_steps: int
    world_size: int
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0 for none."""

    @property
    def log_folder(self) -> Path:
        """Folder of the ranks' step logs."""
        return self.folder / "steps"

    @property
    def checkpoint(self) -> Path:
        """Path of the newest checkpoint; the file may not exist yet."""
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        """Write the task to its folder."""
        values = {**dataclasses.asdict(self), "folder": str(self.folder)}
        (self.folder / "task.json").write_text(json.dumps(values), encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> Task:
        """Read the task that ``save`` wrote."""
        values = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        return Task(**{**values, "folder": folder})

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step``."""
        return self.checkpoint_every > 0 and step % self.checkpoint_every == 0


@functools.lru_cache(maxsize=2)
def order_of(epoch: int) -> list[int]:
    """Return the order of the samples in an epoch."""
    order = list(range(NUM_SAMPLES))
    random.Random(epoch).shuffle(order)
    return order


def batch_of(step: int) -> list[int]:
    """Return the sample indices of a step; steps start at 1."""
    epoch, batch = divmod(step - 1, BATCHES_PER_EPOCH)
    return order_of(epoch)[batch * GLOBAL_BATCH_SIZE : (batch + 1) * GLOBAL_BATCH_SIZE]


def share_of(step: int, rank: int, world_size: int) -> list[int]:
    """Return a rank's share of a step's samples. Shares differ by at most one sample."""
    batch = batch_of(step)
    low, high = (len(batch) * end // world_size for end in (rank, rank + 1))
    return batch[low:high]


def expected_samples(num_steps: int) -> dict[int, tuple[int, int]]:
    """Return the number of samples and the sum of their indices, for each step."""
    batches = {step: batch_of(step) for step in range(1, num_steps + 1)}
    return {step: (len(batch), sum(batch)) for step, batch in batches.items()}


class Trainee:
    """Model, optimizer and data, set up identically in every script.

    Args:
        workload: Key of ``workloads.MODELS``.
    """

    def __init__(self, workload: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = MODELS[workload]()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        self._images, self._labels = make_images()

    def loss(self, model: nn.Module, indices: list[int]) -> torch.Tensor:
        """Return the loss of some samples under ``model``, which wraps ``self.model``."""
        chosen = torch.tensor(indices)
        return cross_entropy(model(self._images[chosen]), self._labels[chosen])

    def state(self, step: int) -> dict[str, Any]:
        """Return the contents of a checkpoint."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "step": step}

    def load(self, state: Mapping[str, Any]) -> int:
        """Load the state of a checkpoint and return its step."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically: a reader finds the previous or the new one."""
    temporary = path.with_suffix(".tmp")
    torch.save(dict(state), temporary)
    os.replace(temporary, path)
