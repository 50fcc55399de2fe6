"""A loss that switches the accounting of a step on and off, in the ranks of ``accounting``.

Every rank calls the loss once per step, so all ranks switch before the same step, and measure the
same blocks::

    step    0 .... settle | on on .. on | off off .. off | off .. | on .. | on .. | off ..
    block                 | 0, counted  | 1              | 2      | 3     | 4     | 5

The first steps of a block are not counted. The order within a pair of blocks alternates, so that a
slow drift of the machine does not favor one side. A block counts with the median of its steps,
which does not depend on the few steps in which another thread or program ran.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from operator import sub
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.trainer.rank_times import RankTimes
from etrain_jupyter.trainer.times import StepTimes, Stopwatch

FOLDER = "ACCOUNTING_FOLDER"
"""Variable with the folder for the results of the ranks."""
BLOCK = "ACCOUNTING_BLOCK"
"""Variable with the number of counted steps of a block."""
PAIRS = "ACCOUNTING_PAIRS"
"""Variable with the number of pairs of blocks."""
SETTLE_STEPS = 200
"""First steps, in which caches fill."""
SKIPPED_STEPS = 3
"""First steps of a block, which still belong to the previous setting."""


def is_on(block: int) -> bool:
    """Return True for the blocks with accounting: on, off, off, on, on, off, ...

    >>> [is_on(block) for block in range(6)]
    [True, False, False, True, True, False]
    """
    return (block + 1) // 2 % 2 == 0


def build_linear() -> nn.Module:
    """Return a linear model, whose step is mostly the loop around it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))


def build_small() -> nn.Module:
    """Return an MLP whose step takes about 5 ms, the smallest that is worth several workers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(28 * 28, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


def switching_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, after the accounting was switched if a block begins."""
    if output.requires_grad:
        _blocks.next_step()
    return F.cross_entropy(output, target)


class Blocks:
    """Counts the steps of this rank, and measures its blocks."""

    def __init__(self) -> None:
        self._step = -SETTLE_STEPS
        self._times: list[tuple[float, float]] = []
        """Wall and processor time at the borders of the block's counted steps."""
        self._measured: list[dict[str, Any]] = []

    def next_step(self) -> None:
        """Count a step; switch and measure at the borders of the blocks."""
        step, self._step = self._step, self._step + 1
        counted, num_pairs = int(os.environ[BLOCK]), int(os.environ[PAIRS])
        block, within = divmod(step, counted + SKIPPED_STEPS)
        if step < 0 or block > 2 * num_pairs:
            return
        if within == 0:
            self._times.append((time.perf_counter(), time.process_time()))
            if block:
                wall_s, cpu_s = (
                    statistics.median(map(sub, own[1:], own))
                    for own in zip(*self._times, strict=True)
                )
                self._measured.append({"is_on": is_on(block - 1), "wall_s": wall_s, "cpu_s": cpu_s})
            self._times = []
            if block == 2 * num_pairs:
                switch(is_on=True)
                path = Path(os.environ[FOLDER]) / f"{os.getpid()}.json"
                path.with_suffix(".part").write_text(json.dumps(self._measured), encoding="utf-8")
                path.with_suffix(".part").rename(path)
                return
            switch(is_on=is_on(block))
        if within >= SKIPPED_STEPS:
            self._times.append((time.perf_counter(), time.process_time()))


def switch(*, is_on: bool) -> None:
    """Turn the accounting of this process's steps on or off."""
    # The other side is the loop without any clock: the same calls, whose functions do nothing.
    # What rank 0 reports of each step, and the vector of the step header, stay.
    for (owner, name), (kept, empty) in _PARTS.items():
        setattr(owner, name, kept if is_on else empty)


def _nothing(*_: Any, **__: Any) -> None:
    return None


_NO_CONTEXT = nullcontext()
_NO_TIMES = StepTimes()
_EMPTY: dict[tuple[type, str], Callable[..., Any]] = {
    (Stopwatch, "begin"): _nothing,
    (Stopwatch, "fetching"): lambda _: _NO_CONTEXT,
    (Stopwatch, "bucket_is_ready"): _nothing,
    (Stopwatch, "gradients_are_summed"): _nothing,
    (Stopwatch, "updating"): lambda _: _NO_CONTEXT,
    (Stopwatch, "times"): lambda _: _NO_TIMES,
    (RankTimes, "add_step"): _nothing,
    (RankTimes, "is_due"): lambda _, **__: False,
}
_PARTS = {(owner, name): (vars(owner)[name], empty) for (owner, name), empty in _EMPTY.items()}
_blocks = Blocks()
