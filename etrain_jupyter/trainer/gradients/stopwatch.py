"""Where the time of a step goes, on one rank.

The parts follow each other: fetching the samples, forward and backward passes, communication as far
as no backward pass hides it, the update. On a GPU the host runs ahead of the device, so that the
exposed communication is timed on the device: from the moment at which the last gradient was there
to the one at which all sums were.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What one step took this rank, in seconds."""

    data_s: float = 0.0
    """Waiting for samples."""
    compute_s: float = 0.0
    """Forward and backward passes."""
    communication_s: float = 0.0
    """Waiting for the other ranks and for what they send."""
    optimizer_s: float = 0.0
    """Clipping, and the update."""


class Stopwatch:
    """Measures one step after the other.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self._ready_at = 0.0
        self._ready: Any = None
        self._summed: Any = None
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._began_at = self._computed_at = self._summed_at = time.perf_counter()
        self._data_s = self._optimizer_s = 0.0
        self._ready_at, self._ready, self._summed = 0.0, None, None

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Time the wait for samples."""
        started = time.perf_counter()
        yield
        self._data_s += time.perf_counter() - started

    def bucket_is_ready(self) -> None:
        """Note that gradients are there; of the last ones it counts."""
        self._ready_at = time.perf_counter()
        if self._is_cuda:
            self._ready = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._ready.record()

    def gradients_are_summed(self) -> None:
        """Note that the gradients are the sums over the ranks, or will be on the device."""
        self._summed_at = time.perf_counter()
        if self._ready is not None:
            self._summed = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._summed.record()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Time the update."""
        started = time.perf_counter()
        yield
        self._optimizer_s += time.perf_counter() - started

    def times(self) -> StepTimes:
        """Return the parts of the step that was begun last."""
        communication_s = self._communication_s()
        spent = self._summed_at - self._began_at - self._data_s - communication_s
        return StepTimes(
            data_s=self._data_s,
            compute_s=max(0.0, spent),
            communication_s=communication_s,
            optimizer_s=self._optimizer_s,
        )

    def _communication_s(self) -> float:
        if not self._ready_at:  # alone
            return 0.0
        if self._summed is not None:
            self._summed.synchronize()
            return float(self._ready.elapsed_time(self._summed)) / 1e3
        return self._summed_at - self._ready_at
