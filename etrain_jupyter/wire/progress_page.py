"""A trainer's progress in shared memory, which its supervisor can always read.

A trainer cannot respond to messages while it is stopped, or while one of its threads holds the
interpreter lock. Therefore, it writes its progress to a page that both processes map, and the
supervisor reads it from there. This module does not import torch, because the supervisor uses it
too.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass

PULSE_S = 0.25
"""Interval of the trainer's heartbeat thread, in seconds."""

PHASES = ("idle", "forming", "syncing", "computing", "evaluating", "saving")

# Slots of the page: aligned and 8 bytes each, so that every read and write is atomic, and the
# reader needs no lock. A trainer that is stopped while it holds a lock would block the reader.
_GENERATION, _STEP, _COLLECTIVES, _BEATS, _PHASE, _ALIVE_AT = range(6)
_SIZE = mmap.PAGESIZE


@dataclass(frozen=True, kw_only=True)
class TrainerProgress:
    """Contents of the page at one moment."""

    generation: int
    """Newest generation entered by the main thread; 0 before the first."""
    step: int
    """Last step reported by the trainer."""
    collectives: int
    """Number of collectives this rank has started in the generation. All ranks start the same
    collectives in the same order, so the rank with the fewest is the straggler."""
    beats: int
    """Number of heartbeats from the main thread so far."""
    phase: str
    """One of ``PHASES``."""
    alive_age_s: float
    """Seconds since any Python code ran in the process; 0.0 before the first pulse. Large if the
    process is stopped or one of its threads holds the interpreter lock."""


class ProgressPage:
    """Page of shared memory written by the trainer and read by its supervisor.

    Args:
        fd: Open file of at least one page; it is mapped and kept open.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._slots = memoryview(self._map).cast("q")
        # Several threads start collectives, so the lock makes increments atomic.
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> ProgressPage:
        """Create a page. Child processes inherit its descriptor only if it is passed explicitly."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("etrain-progress", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    def close(self) -> None:
        """Unmap and close the page, which must not be used afterwards. Idempotent."""
        if self.fd >= 0:
            self._slots.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    # --- the trainer writes ---

    def begin(self, generation: int) -> None:
        """Enter a generation and reset its count of collectives."""
        with self._lock:
            # With this order, a concurrent reader may see too few collectives, but never too many:
            #
            #     trainer      collectives = 0              generation = 4
            #     supervisor                    reads (3, 0)
            #
            # The other order could show (4, 812), which would make all other ranks look like
            # stragglers.
            self._slots[_COLLECTIVES] = 0
            self._slots[_GENERATION] = generation
        self.beat(phase="forming")

    def count_collective(self) -> None:
        """Count a collective just before it starts. Thread-safe."""
        with self._lock:
            self._slots[_COLLECTIVES] += 1

    def beat(self, step: int | None = None, phase: str | None = None) -> None:
        """Record a heartbeat. Only the main thread calls this.

        Args:
            step: Current step; None if it has not changed.
            phase: One of ``PHASES``; None if it has not changed.
        """
        slots = self._slots
        if step is not None:
            slots[_STEP] = step
        if phase is not None:
            slots[_PHASE] = PHASES.index(phase)
        slots[_BEATS] += 1

    def pulse(self) -> None:
        """Record that this process is running Python code."""
        # All processes on a machine share the monotonic clock.
        self._slots[_ALIVE_AT] = time.monotonic_ns()

    # --- the supervisor reads ---

    def has_pulsed(self) -> bool:
        """Return True if the trainer has pulsed. From then on, it handles SIGUSR1 (log stacks)."""
        return bool(self._slots[_ALIVE_AT])

    def read(self) -> TrainerProgress:
        """Return the current contents of the page."""
        slots = self._slots
        alive_at = slots[_ALIVE_AT]
        return TrainerProgress(
            generation=slots[_GENERATION],
            step=slots[_STEP],
            collectives=slots[_COLLECTIVES],
            beats=slots[_BEATS],
            phase=PHASES[slots[_PHASE]],
            alive_age_s=max(0, time.monotonic_ns() - alive_at) / 1e9 if alive_at else 0.0,
        )


class Pulse(threading.Thread):
    """Pulse every ``PULSE_S`` seconds until it is stopped or the page is closed."""

    def __init__(self, page: ProgressPage) -> None:
        super().__init__(name="etrain-pulse", daemon=True)
        self._page = page
        self._is_stopped = threading.Event()

    def run(self) -> None:
        """Pulse. Called by the thread."""
        while self._page.fd >= 0:
            try:
                self._page.pulse()
            except ValueError:  # closed after the check
                return
            if self._is_stopped.wait(PULSE_S):
                return

    def stop(self) -> None:
        """End the thread, for example because only one thread may exist at a fork."""
        self._is_stopped.set()
        self.join()


def start_pulse(page: ProgressPage) -> Pulse:
    """Start the pulse in a daemon thread."""
    page.pulse()
    thread = Pulse(page)
    thread.start()
    return thread
