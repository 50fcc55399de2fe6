"""Steps at which ranks wait for the test, so that a requested change takes effect exactly there."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from tests.chaos.rig import RigJob

HEARD_WITHIN_S = 5.0
"""Maximum wait for a change message; without one, an earlier message included the change."""


@dataclass(frozen=True)
class Gates:
    """Steps in whose forward pass every rank waits until the test opens the gate."""

    folder: str
    steps: tuple[int, ...]
    seed: int = 0
    """Seed of the job."""

    def path(self, step: int) -> Path:
        """Return the gate's named pipe: opening it for reading blocks until a writer opens it."""
        return Path(self.folder) / f"gate-{self.seed}-{step}"

    def pass_through(self) -> None:
        """Wait, on a rank, while the current step has a closed gate."""
        # A model can derive the current step from the RNG seed only.
        step = torch.initial_seed() // 4_099 - self.seed * 1_000_003
        if step in self.steps:
            with contextlib.suppress(FileNotFoundError), self.path(step).open():
                _wait_for_change()


def _wait_for_change() -> None:
    """Wait, on a rank, for the message about the change that the gate was opened for.

    The message is already in flight when the gate opens, but the step could end before it arrives.
    """
    for known in gc.get_objects():
        if isinstance(known, TrainLoop):
            known.change_pending.wait(HEARD_WITHIN_S)


class Gated(nn.Module):
    """A model that waits at gates in training mode."""

    def __init__(self, model: nn.Module, gates: Gates) -> None:
        super().__init__()
        self.model = model
        self.gates = gates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.gates.pass_through()
        return self.model(x)


class Keeper:
    """Create closed gates and open them."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self._writers = contextlib.ExitStack()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[Keeper]:
        """Create the gates; open all of them at the end."""
        for step in self._gates.steps:
            os.mkfifo(self._gates.path(step))
        with self._writers:
            yield self
            for step in self._gates.steps:
                self.open(step)

    def open(self, step: int) -> None:
        """Open a gate for all ranks, including those that reach it later."""
        path = self._gates.path(step)
        if path.exists():
            self._writers.callback(os.close, os.open(path, os.O_RDWR))
            path.unlink()

    async def scale(self, job: RigJob, step: int, world_size: int) -> None:
        """Change to ``world_size`` workers right after ``step``, at whose gate all ranks wait."""

        def is_ready() -> bool:
            state = job.hosted.state
            num_here = len([*state.in_phase("ranked"), *state.in_phase("warm")])
            # The change may have been applied together with a join that was in progress.
            is_made = state.phase == "running" and state.current.world_size == world_size
            return is_made or (state.phase == "changing" and num_here >= world_size)

        await job.until(lambda: job.step >= step - 1)
        await job.request("scale", min=world_size, max=world_size)
        await job.until(is_ready)
        self.open(step)
