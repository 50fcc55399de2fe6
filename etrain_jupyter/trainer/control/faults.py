"""Inject faults into a trainer, from a plan or at a user's request.

A planned fault is a plain dict on the wire: ``id``, ``kind``, ``rank``, ``step``, ``at``. It fires
in the first trainer with this rank that reaches the place ``at`` in this step or a later one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from etrain_jupyter.wire.messages import Fault, FaultFired
from etrain_jupyter.wire.progress_page import ProgressPage

Send = Callable[[FaultFired], None]

ANYWHERE = ""
"""Place of a user-requested fault: the next place that the main thread reaches."""

EXIT_CODE = 7
DIVERGENCE = 1e-3
"""Amount by which ``diverge`` changes one weight."""


class InjectedError(RuntimeError):
    """An injected exception that counts as a bug in this package, not in the notebook."""


class FaultInjector:
    """The faults that may fire in this trainer.

    Args:
        planned: Faults that have not fired in this job yet.
        send: Sends a report immediately, so that the coordinator learns of a fault before it fires.
    """

    def __init__(self, planned: Iterable[Fault], send: Send) -> None:
        self.disconnect: Callable[[], None] = _nothing
        """Breaks the connections to the other ranks; set when a generation forms."""
        self._send = send
        self._planned: list[Fault] = []
        self.renew(planned)

    def renew(self, planned: Iterable[Fault]) -> None:
        """Adopt a new generation's plan, which omits faults that have fired in other trainers."""
        # Requested faults belong to this trainer, and are not in the coordinator's plan.
        requested = [fault for fault in self._planned if fault["at"] == ANYWHERE]
        mine = [fault for fault in planned if fault["kind"] in _AT_A_PLACE | _CORRUPTIONS]
        self._planned = requested + mine

    def at(self, place: str, *, rank: int, step: int) -> None:
        """Inject the faults planned for this place; may not return.

        Args:
            place: ``warm``, ``form``, ``sync``, ``forward``, ``all_reduce``, ``commit``, ``eval``,
                ``evaluated``; with ``shard``, also ``agree``, ``agreed`` and ``updated``.
            rank: This trainer's rank. At ``warm``, before it has a rank, its index among all
                trainers that the job has started.
            step: The step in progress; between steps, the last committed step.

        Raises:
            InjectedError: For the kind ``error``.
        """
        # This is called several times per step, so it must cost almost nothing without planned
        # faults.
        if not self._planned:
            return
        # Iterate over a copy, because a fault that fires is removed, and the control thread may
        # append another.
        for fault in list(self._planned):
            is_here = fault["kind"] in _AT_A_PLACE and fault["at"] in (place, ANYWHERE)
            if is_here and self._fires(fault, rank, step):
                inject_fault(fault["kind"], disconnect=self.disconnect)

    def inject(self, kind: str) -> None:
        """Inject a fault that a user requested. Called by the control thread."""
        # These two kinds must affect the main thread, so they fire when it reaches its next place.
        # The others affect the whole process, and work even if the main thread is stuck.
        if kind in ("hang", "error"):
            self._planned.append({"kind": kind, "rank": None, "step": 0, "at": ANYWHERE})
        else:
            inject_fault(kind, disconnect=self.disconnect)

    def corrupt_indices(self, indices: Any, *, rank: int, step: int) -> Any:
        """Return a share's samples with one lost or duplicated, which the audit must detect."""
        # A share must keep at least one sample. If it has only one, the fault is deferred to the
        # next share.
        if not self._planned or len(indices) < 2:
            return indices
        for fault in list(self._planned):
            if fault["kind"] == "lose_sample" and self._fires(fault, rank, step):
                indices = indices[1:]
            elif fault["kind"] == "repeat_sample" and self._fires(fault, rank, step):
                indices = np.concatenate([indices[1:2], indices[1:]])
        return indices

    def corrupt_weights(self, model: Any, *, rank: int, step: int) -> None:
        """Change one weight on this rank only, as a faulty exchange would (``diverge``)."""
        if not self._planned:
            return
        for fault in list(self._planned):
            if fault["kind"] == "diverge" and self._fires(fault, rank, step):
                next(model.parameters()).data.view(-1)[0] += DIVERGENCE

    def corrupts_loss(self, *, rank: int, step: int) -> bool:
        """Return True if this rank's share of the loss should become NaN (``check_loss``)."""
        if not self._planned:
            return False
        due = [f for f in self._planned if f["kind"] == "nan_loss"]
        # Use a list and not a generator, because all due faults must fire, not only the first one.
        return any([self._fires(fault, rank, step) for fault in due])

    def _fires(self, fault: Fault, rank: int, step: int) -> bool:
        # A later step counts, too, because the rank may not have taken part in the planned step.
        is_due = fault["rank"] in (None, rank) and fault["step"] <= step
        if is_due:
            self._planned.remove(fault)
            # Report the fault before it happens, because the process may not survive it. Without
            # the report, the fault would fire again in the replacement trainer.
            if "id" in fault:
                self._send(FaultFired(fault_id=fault["id"]))
        return is_due


def inject_fault(kind: str, *, disconnect: Callable[[], None] | None = None) -> None:
    """Inject a fault of this kind into this process, in the calling thread.

    Raises:
        InjectedError: For the kind ``error``.
    """
    if kind == "disconnect":
        (disconnect or _nothing)()
    else:
        _INJECT[kind]()


def _nothing() -> None:
    pass  # no generation has formed, so there are no connections to break


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    _hang()  # the signal may be delivered to another thread a moment later


def _segfault() -> None:
    ctypes.string_at(0)


def _exit() -> None:
    os._exit(EXIT_CODE)


def _error() -> None:
    raise InjectedError("an injected error in the framework")


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_gil() -> None:
    # A call through PyDLL keeps the GIL, as a faulty extension would: no thread of this process
    # runs, and the pulse on the progress page stops. The loop is needed because a signal ends a
    # sleep early.
    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(ctypes.c_uint(1_000_000))


def _hang() -> None:
    while True:
        time.sleep(3600)


_INJECT: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "segfault": _segfault,
    "exit": _exit,
    "error": _error,
    "stop": _stop,
    "hold_gil": _hold_gil,
    "hang": _hang,
}
_AT_A_PLACE = frozenset({*_INJECT, "disconnect"})
_CORRUPTIONS = frozenset({"lose_sample", "repeat_sample", "diverge", "nan_loss"})
NO_FAULTS = FaultInjector([], lambda _: None)
"""No planned faults."""


class Places:
    """Report where the main thread is."""

    def __init__(self, faults: FaultInjector = NO_FAULTS, page: ProgressPage | None = None) -> None:
        self.faults = faults
        self.page = page

    def reach(self, place: str, *, rank: int, step: int, phase: str = "computing") -> None:
        """Report that ``rank`` has reached a place, and inject the faults planned for it.

        Args:
            place: One of the places that ``FaultInjector.at`` lists.
            rank: This rank.
            step: The step in progress; between steps, the last committed one.
            phase: One of ``progress_page.PHASES``.
        """
        if self.page is not None:
            self.page.beat(step=step, phase=phase)
        self.faults.at(place, rank=rank, step=step)

    def beat(self) -> None:
        """Send a heartbeat from the same place."""
        if self.page is not None:
            self.page.beat()
