"""Shared memory page with a trainer's progress, readable while the trainer is stopped or hung.

A trainer that is stopped, or of which one thread holds the GIL, sends no message. So it writes its
progress into a page that both processes map, and the supervisor reads it. Imports no torch, because
the supervisor's process imports it too.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass

PULSE_S = 0.25
"""Interval of a trainer's pulse, in seconds."""

PHASES = ("idle", "forming", "syncing", "computing", "evaluating", "saving")

# The slots of the page, 8 bytes each, so that each is written and read atomically.
_GENERATION, _STEP, _COLLECTIVES, _BEATS, _PHASE, _ALIVE_AT = range(6)
_SIZE = mmap.PAGESIZE


@dataclass(frozen=True, kw_only=True)
class TrainerProgress:
    """A snapshot of the page."""

    generation: int
    """The newest one that the main thread has begun; 0 before the first."""
    step: int
    """The current step."""
    collectives: int
    """Collectives that this rank has started in the generation. All ranks start the same ones in
    the same order, so the rank with the fewest blocks the others."""
    beats: int
    """Heartbeats of the main thread so far."""
    phase: str
    """One of ``PHASES``."""
    alive_age_s: float
    """Seconds since any Python code of the process ran; 0.0 before its first pulse. Large if the
    process is stopped, or a thread of it holds the GIL."""


class ProgressPage:
    """A page of shared memory: the trainer writes it, its supervisor reads it.

    Args:
        fd: An open file of at least one page; it is mapped and stays open.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._slots = memoryview(self._map).cast("q")
        # Several threads start collectives, and each increments the count in the page.
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> ProgressPage:
        """Create a page. Child processes do not inherit its descriptor by default."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("etrain-progress", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    def close(self) -> None:
        """Unmap the page, which must not be used afterwards. May be called twice."""
        if self.fd >= 0:
            self._slots.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    # --- the trainer writes ---

    def begin(self, generation: int) -> None:
        """Enter a generation, of which no collective has started."""
        with self._lock:
            # In this order, a reader between the two writes sees too few collectives, not too many.
            self._slots[_COLLECTIVES] = 0
            self._slots[_GENERATION] = generation
        self.beat(phase="forming")

    def count_collective(self) -> None:
        """Count a collective that is about to start. Safe from any thread."""
        with self._lock:
            self._slots[_COLLECTIVES] += 1

    def beat(self, step: int | None = None, phase: str | None = None) -> None:
        """Send a heartbeat. Only the main thread does.

        Args:
            step: The current step; None if it is unchanged.
            phase: One of ``PHASES``; None if it is unchanged.
        """
        slots = self._slots
        if step is not None:
            slots[_STEP] = step
        if phase is not None:
            slots[_PHASE] = PHASES.index(phase)
        slots[_BEATS] += 1

    def pulse(self) -> None:
        """Note that Python code of this process runs."""
        # The monotonic clock is the machine's, the same in all of its processes.
        self._slots[_ALIVE_AT] = time.monotonic_ns()

    # --- the supervisor reads ---

    def has_pulsed(self) -> bool:
        """Return whether the trainer has started to pulse: then it can dump its stacks."""
        return bool(self._slots[_ALIVE_AT])

    def read(self) -> TrainerProgress:
        """Return a snapshot of the page."""
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


def start_pulse(page: ProgressPage) -> threading.Thread:
    """Pulse every ``PULSE_S`` from a daemon thread, for as long as the process runs."""
    page.pulse()
    thread = threading.Thread(target=_pulse, args=(page,), name="etrain-pulse", daemon=True)
    thread.start()
    return thread


def _pulse(page: ProgressPage) -> None:
    while page.fd >= 0:
        try:
            page.pulse()
        except ValueError:  # closed between the two lines
            return
        time.sleep(PULSE_S)
