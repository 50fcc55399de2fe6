"""A gate in the loss that lets two running jobs take turns, in the ranks of ``paired``.

Every rank calls the loss once per step. After its first steps, it stops at the gate until the
benchmark grants it more steps. While it waits, it blocks in ``read`` and uses no processor time::

    benchmark   grant ours 24 ............. all arrived | grant ddp 24 ........ all arrived |
    ours        step step step ... step | blocked ...............................
    ddp         blocked ................................ | step step ... step | blocked
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

FOLDER = "PAIRED_GATE"
"""Variable with the folder of the side's gate."""
FREE_STEPS = 60
"""First steps, before the gate: warm-up and caches."""
_COUNT_BYTES = 8


def gated_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy; wait at the gate first, if the rank has used up its steps."""
    if output.requires_grad:
        _rank.pass_gate()
    return F.cross_entropy(output, target)


class RankGate:
    """The gate of one rank. It opens its pipes when the rank first arrives."""

    def __init__(self) -> None:
        self._remaining = FREE_STEPS
        self._arrive_fd = self._grant_fd = -1

    def pass_gate(self) -> None:
        """Use up one step; without any left, report the arrival and wait for the next grant."""
        if self._remaining == 0:
            if self._grant_fd < 0:
                self._open(Path(os.environ[FOLDER]))
            if torch.cuda.is_available():  # the steps so far are only queued
                torch.cuda.synchronize()
            os.write(self._arrive_fd, b".")
            self._remaining = int.from_bytes(os.read(self._grant_fd, _COUNT_BYTES), "little")
        self._remaining -= 1

    def _open(self, folder: Path) -> None:
        slot = 0
        while True:
            try:
                os.close(os.open(folder / f"slot-{slot}", os.O_CREAT | os.O_EXCL))
                break
            except FileExistsError:
                slot += 1
        # Opened for reading and writing, a named pipe neither waits for its other end nor ends.
        self._arrive_fd = os.open(folder / "arrive", os.O_RDWR)
        self._grant_fd = os.open(folder / f"grant-{slot}", os.O_RDWR)
        (folder / f"rank-{slot}.json").write_text(json.dumps({"pid": os.getpid()}))


class Gate:
    """The benchmark's end of a side's gate.

    Args:
        folder: An empty folder, which the ranks get in the variable ``FOLDER``.
        world_size: Number of ranks of the side.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self._world_size = world_size
        os.mkfifo(folder / "arrive")
        self._arrive_fd = os.open(folder / "arrive", os.O_RDWR)
        self._grant_fds = []
        for slot in range(world_size):
            os.mkfifo(folder / f"grant-{slot}")
            self._grant_fds.append(os.open(folder / f"grant-{slot}", os.O_RDWR))

    def run(self, num_steps: int, check: Callable[[], Any], timeout_s: float = 120.0) -> float:
        """Let all ranks train ``num_steps`` steps; return the seconds until all have arrived."""
        began = time.perf_counter()
        self.grant(num_steps)
        self.wait(check, timeout_s)
        return time.perf_counter() - began

    def grant(self, num_steps: int) -> None:
        """Let all ranks train ``num_steps`` more steps."""
        for fd in self._grant_fds:
            os.write(fd, num_steps.to_bytes(_COUNT_BYTES, "little"))

    def wait(self, check: Callable[[], Any], timeout_s: float) -> None:
        """Wait until all ranks have arrived.

        Args:
            check: Raises an error if the side has failed. Called every second.
            timeout_s: Limit in seconds.

        Raises:
            TimeoutError: If not all ranks arrive in time.
        """
        deadline = time.monotonic() + timeout_s
        num_arrived = 0
        while num_arrived < self._world_size:
            if select.select([self._arrive_fd], [], [], 1.0)[0]:
                num_arrived += len(os.read(self._arrive_fd, self._world_size - num_arrived))
                continue
            check()
            if time.monotonic() > deadline:
                arrived = f"{num_arrived} of {self._world_size} ranks"
                raise TimeoutError(f"{arrived} arrived at the gate within {timeout_s:.0f} s")


_rank = RankGate()
