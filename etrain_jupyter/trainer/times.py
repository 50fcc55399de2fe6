"""Measure the parts of a step on one rank.

The parts are consecutive: waiting for samples, forward and backward passes, the communication not
hidden by a backward pass, and the update. On a GPU the host runs ahead, so the exposed
communication is measured on the device, from the last gradient to the last sum.
"""

from __future__ import annotations

import time
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


class TimeSum:
    """Adds up the time spent inside ``with`` blocks that end without an exception."""

    # A generator with ``contextmanager`` takes three times as long.
    __slots__ = ("_began_at", "spent_s")

    def __init__(self) -> None:
        self._began_at = 0.0
        self.spent_s = 0.0

    def __enter__(self) -> None:
        self._began_at = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.spent_s += time.perf_counter() - self._began_at


class Stopwatch:
    """Measures the parts of consecutive steps."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self._ready_at = 0.0
        self._ready: Any = None
        self._summed: Any = None
        self._fetch, self._update, self._exchange = TimeSum(), TimeSum(), TimeSum()
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._began_at = self._summed_at = time.perf_counter()
        self._fetch.spent_s = self._update.spent_s = self._exchange.spent_s = 0.0
        self._ready_at, self._ready, self._summed = 0.0, None, None

    def fetching(self) -> TimeSum:
        """Measure the wait for samples."""
        return self._fetch

    def exchanging(self) -> TimeSum:
        """Measure an exchange within a pass, which waits for the other ranks."""
        return self._exchange

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

    def updating(self) -> TimeSum:
        """Measure the update."""
        return self._update

    def times(self) -> StepTimes:
        """Return the parts of the current step."""
        communication_s = self._communication_s() + self._exchange.spent_s
        # begin | fetch  forward  backward | exposed communication | summed | update
        #         data_s                     communication_s                  optimizer_s
        #
        # compute_s is the rest. The clocks of host and device differ, so ``compute_s`` may be
        # slightly negative.
        spent = self._summed_at - self._began_at - self._fetch.spent_s - communication_s
        return StepTimes(
            data_s=self._fetch.spent_s,
            compute_s=max(0.0, spent),
            communication_s=communication_s,
            optimizer_s=self._update.spent_s,
        )

    def _communication_s(self) -> float:
        if not self._ready_at:  # a single rank sends no bucket
            return 0.0
        # The host has run ahead of the device, so only the device knows when the sums were
        # complete.
        if self._summed is not None:
            self._summed.synchronize()
            return float(self._ready.elapsed_time(self._summed)) / 1e3
        return self._summed_at - self._ready_at
