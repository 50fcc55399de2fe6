"""Measure the parts of a step on one rank.

The parts are consecutive: waiting for samples, forward and backward passes, the communication not
hidden by a backward pass, and the update. On a GPU the host runs ahead, so the exposed
communication is measured on the device, from the last gradient to the last sum.
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
    """Durations of the parts of one step on this rank, in seconds."""

    data_s: float = 0.0
    """Waiting for samples."""
    compute_s: float = 0.0
    """Forward and backward passes."""
    communication_s: float = 0.0
    """Waiting for the other ranks and for their data."""
    optimizer_s: float = 0.0
    """Clipping and the optimizer's update."""


class Stopwatch:
    """Measures the parts of consecutive steps."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self._ready_at = 0.0
        self._ready: Any = None
        self._summed: Any = None
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._began_at = self._summed_at = time.perf_counter()
        self._data_s = self._optimizer_s = self._exchange_s = 0.0
        self._ready_at, self._ready, self._summed = 0.0, None, None

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Measure the wait for samples."""
        started = time.perf_counter()
        yield
        self._data_s += time.perf_counter() - started

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Measure an exchange within a pass, which waits for the other ranks."""
        started = time.perf_counter()
        yield
        self._exchange_s += time.perf_counter() - started

    def bucket_is_ready(self) -> None:
        """Record that a bucket of gradients has been computed; only the last call matters."""
        self._ready_at = time.perf_counter()
        if self._is_cuda:
            self._ready = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._ready.record()

    def gradients_are_summed(self) -> None:
        """Record that the gradients are summed, or that their sums are queued on the device."""
        self._summed_at = time.perf_counter()
        if self._ready is not None:
            self._summed = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._summed.record()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Measure the update."""
        started = time.perf_counter()
        yield
        self._optimizer_s += time.perf_counter() - started

    def times(self) -> StepTimes:
        """Return the parts of the current step."""
        communication_s = self._communication_s() + self._exchange_s
        # begin | fetch  forward  backward | exposed communication | summed | update
        #         data_s                     communication_s                  optimizer_s
        #
        # compute_s is the rest. The clocks of host and device differ, so ``compute_s`` may be
        # slightly negative.
        spent = self._summed_at - self._began_at - self._data_s - communication_s
        return StepTimes(
            data_s=self._data_s,
            compute_s=max(0.0, spent),
            communication_s=communication_s,
            optimizer_s=self._optimizer_s,
        )

    def _communication_s(self) -> float:
        if not self._ready_at:  # a single rank sends no bucket
            return 0.0
        # The host has run ahead of the device: only the device knows when the sums were complete.
        if self._summed is not None:
            self._summed.synchronize()
            return float(self._ready.elapsed_time(self._summed)) / 1e3
        return self._summed_at - self._ready_at
