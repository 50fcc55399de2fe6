"""What the peers' scripts have in common: the task, the model, the data and the checkpoint file.

Every system trains the same steps: step ``s`` is the same 128 samples whoever makes it, a function
of ``s`` alone, so that a script that goes on from a checkpoint neither skips nor repeats a sample.
That is more than most scripts do; it is how we would write one for these systems.
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

from benchmarks.workloads import (
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
    """What a peer is asked to do; its ranks read it from their folder."""

    folder: Path
    """Where the step logs, the checkpoint and the output go."""
    workload: str
    num_steps: int
    world_size: int
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0 for none."""

    @property
    def log_folder(self) -> Path:
        """Where the ranks write what they do."""
        return self.folder / "steps"

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint, once there is one."""
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        """Write it to its folder."""
        values = {**dataclasses.asdict(self), "folder": str(self.folder)}
        (self.folder / "task.json").write_text(json.dumps(values), encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> Task:
        """Read what ``save`` wrote."""
        values = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        return Task(**{**values, "folder": folder})

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after ``step``."""
        return self.checkpoint_every > 0 and step % self.checkpoint_every == 0


@functools.lru_cache(maxsize=2)
def order_of(epoch: int) -> list[int]:
    """The order in which an epoch goes through the samples."""
    order = list(range(NUM_SAMPLES))
    random.Random(epoch).shuffle(order)
    return order


def batch_of(step: int) -> list[int]:
    """The samples of a step, which counts from 1."""
    epoch, place = divmod(step - 1, BATCHES_PER_EPOCH)
    return order_of(epoch)[place * GLOBAL_BATCH_SIZE : (place + 1) * GLOBAL_BATCH_SIZE]


def share_of(step: int, rank: int, world_size: int) -> list[int]:
    """A rank's part of a step's samples; parts differ by at most one sample."""
    batch = batch_of(step)
    low, high = (len(batch) * end // world_size for end in (rank, rank + 1))
    return batch[low:high]


def expected_samples(num_steps: int) -> dict[int, tuple[int, int]]:
    """Number and index sum of the samples of each step."""
    batches = {step: batch_of(step) for step in range(1, num_steps + 1)}
    return {step: (len(batch), sum(batch)) for step, batch in batches.items()}


class Trainee:
    """The model with its optimizer and data, as every script sets it up.

    Args:
        workload: Which of ``workloads.MODELS``.
    """

    def __init__(self, workload: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = MODELS[workload]()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        self._images, self._labels = make_images()

    def loss(self, model: nn.Module, indices: list[int]) -> torch.Tensor:
        """Put samples through ``model``, the wrapped one, and return the loss."""
        chosen = torch.tensor(indices)
        return cross_entropy(model(self._images[chosen]), self._labels[chosen])

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "step": step}

    def load(self, state: Mapping[str, Any]) -> int:
        """Take a checkpoint's state; return its step."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint so that a reader finds the old or the new one, never half of one."""
    temporary = path.with_suffix(".tmp")
    torch.save(dict(state), temporary)
    os.replace(temporary, path)
