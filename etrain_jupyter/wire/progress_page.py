"""How far a trainer is, in memory that its supervisor can read whatever the trainer does.

A trainer that is stopped, or of which one thread keeps the interpreter to itself, answers nobody.
So it writes its progress into a page that both processes map, and the supervisor looks at it from
outside. Imports no torch, because the supervisor reads it too.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass

PULSE_S = 0.25
"""How often a living trainer says so."""

PHASES = ("idle", "forming", "syncing", "computing", "evaluating", "saving")

# The slots of the page, 8 bytes each: a slot is written and read at once, never half.
_GENERATION, _STEP, _COLLECTIVES, _BEATS, _PHASE, _ALIVE_AT = range(6)
_SIZE = mmap.PAGESIZE


@dataclass(frozen=True, kw_only=True)
class TrainerProgress:
    """What the page said at one moment."""

    generation: int
    """The newest one that the main thread has begun; 0 before the first."""
    step: int
    """The last step that it told of."""
    collectives: int
    """Collectives that this rank has started in the generation. All ranks start the same ones in
    the same order, so the rank with the fewest holds the others up."""
    beats: int
    """Signs of life of the main thread so far."""
    phase: str
    """One of ``PHASES``."""
    alive_age_s: float
    """How long ago any Python code of the process ran; 0.0 before it has told for the first time.
    Large if the process is stopped, or a thread of it keeps the interpreter's lock."""


class ProgressPage:
    """A page of shared memory: the trainer writes it, its supervisor reads it.

    Args:
        fd: An open file of at least one page; it is mapped and stays open.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._slots = memoryview(self._map).cast("q")
        # The count goes on from what the page says, and several threads start collectives.
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> ProgressPage:
        """Make a page that no other process has yet; its descriptor is not inherited by itself."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("etrain-progress", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    def close(self) -> None:
        """Give the page back; nothing may be written or read any more. May be called twice."""
        if self.fd >= 0:
            self._slots.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    # --- the trainer writes ---

    def begin(self, generation: int) -> None:
        """Enter a generation: no collective of it has been started."""
        with self._lock:
            # In this order, a reader between the two sees too few collectives, never too many.
            self._slots[_COLLECTIVES] = 0
            self._slots[_GENERATION] = generation
        self.beat(phase="forming")

    def count_collective(self) -> None:
        """Count a collective that is about to be started. Safe from any thread."""
        with self._lock:
            self._slots[_COLLECTIVES] += 1

    def beat(self, step: int | None = None, phase: str | None = None) -> None:
        """Give a sign of life. Only the main thread does.

        Args:
            step: The step that is being made; None if it is still the same.
            phase: One of ``PHASES``; None if it is still the same.
        """
        slots = self._slots
        if step is not None:
            slots[_STEP] = step
        if phase is not None:
            slots[_PHASE] = PHASES.index(phase)
        slots[_BEATS] += 1

    def pulse(self) -> None:
        """Say that Python code of this process runs."""
        # The monotonic clock is the machine's, the same in all of its processes.
        self._slots[_ALIVE_AT] = time.monotonic_ns()

    # --- the supervisor reads ---

    def has_pulsed(self) -> bool:
        """Whether the trainer has come to life: it may be asked for its stacks from then on."""
        return bool(self._slots[_ALIVE_AT])

    def read(self) -> TrainerProgress:
        """Return what the page says now."""
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
    """Pulse every ``PULSE_S`` from a daemon thread, as long as the process lives."""
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
