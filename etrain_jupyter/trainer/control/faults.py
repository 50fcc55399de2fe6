"""Commit injected faults inside a trainer, from a plan or at a user's request.

A planned fault is a plain dict on the wire: ``id``, ``kind``, ``rank``, ``step``, ``at``. The first
trainer that reaches its place with its rank, at its step or a later one, commits it. Imports torch
only for the kinds that touch a model.
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

Send = Callable[[FaultFired], None]

ANYWHERE = ""
"""The place of a fault that a user requested: the next place that the main thread reaches."""

EXIT_CODE = 7
DIVERGENCE = 1e-3
"""How much ``diverge`` adds to one weight."""


class InjectedError(RuntimeError):
    """An injected exception of the framework itself, not of the notebook's code."""


class Faults:
    """The faults that this trainer may commit, and their places.

    Without a plan, every method costs one test of an attribute.

    Args:
        planned: Faults that have not fired in this job yet.
        send: Sends a report at once: the coordinator knows of a fault before it happens.
    """

    def __init__(self, planned: Iterable[Fault], send: Send) -> None:
        self.disconnect: Callable[[], None] = _nothing
        """Breaks the connections to the other ranks; set when a generation forms."""
        self._send = send
        self._planned: list[Fault] = []
        self.renew(planned)

    def renew(self, planned: Iterable[Fault]) -> None:
        """Take over the plan of a new generation, without what other trainers have committed."""
        requested = [fault for fault in self._planned if fault["at"] == ANYWHERE]
        mine = [fault for fault in planned if fault["kind"] in _AT_A_PLACE | _CORRUPTIONS]
        self._planned = requested + mine

    def at(self, place: str, *, rank: int, step: int) -> None:
        """Commit what is planned for this place; may not return.

        Args:
            place: ``warm``, ``form``, ``sync``, ``forward``, ``all_reduce``, ``commit``, ``eval``,
                ``evaluated``.
            rank: This trainer's rank; at ``warm``, where it has none, its number among all that the
                job has started, from 0.
            step: The step that is being made; outside of steps the one that the state stands at.

        Raises:
            InjectedError: For the kind ``error``.
        """
        if not self._planned:
            return
        for fault in list(self._planned):
            if fault["kind"] in _AT_A_PLACE and fault["at"] in (place, ANYWHERE):
                self._inject_if_due(fault, rank, step)

    def inject(self, kind: str) -> None:
        """Commit a fault that a user requested. Called by the thread that reads the channel.

        A kind that must happen on the main thread waits until that reaches its next place.
        """
        if kind in ("hang", "error"):
            self._planned.append({"kind": kind, "rank": None, "step": 0, "at": ANYWHERE})
        else:
            inject_fault(kind, disconnect=self.disconnect)

    def corrupt_indices(self, indices: Any, *, rank: int, step: int) -> Any:
        """Return the samples of a share as a defective ledger would: the audit must see it.

        ``lose_sample`` drops one; ``repeat_sample`` puts another one in the place of one. A share
        of one sample is left alone, and a later one spoilt.
        """
        if not self._planned or len(indices) < 2:
            return indices
        for fault in list(self._planned):
            if fault["kind"] == "lose_sample" and self._fires(fault, rank, step):
                indices = indices[1:]
            elif fault["kind"] == "repeat_sample" and self._fires(fault, rank, step):
                indices = np.concatenate([indices[1:2], indices[1:]])
        return indices

    def corrupt_weights(self, model: Any, *, rank: int, step: int) -> None:
        """Nudge one weight of this rank alone, as a defective exchange would (``diverge``)."""
        if not self._planned:
            return
        for fault in list(self._planned):
            if fault["kind"] == "diverge" and self._fires(fault, rank, step):
                next(model.parameters()).data.view(-1)[0] += DIVERGENCE

    def corrupts_loss(self, *, rank: int, step: int) -> bool:
        """Whether this rank's share of the loss shall be NaN (``nan_loss``)."""
        if not self._planned:
            return False
        due = [f for f in self._planned if f["kind"] == "nan_loss"]
        return any([self._fires(fault, rank, step) for fault in due])

    def _inject_if_due(self, fault: Fault, rank: int, step: int) -> None:
        if self._fires(fault, rank, step):
            inject_fault(fault["kind"], disconnect=self.disconnect)

    def _fires(self, fault: Fault, rank: int, step: int) -> bool:
        """Return whether it is due here. If so, remove it and report it."""
        is_due = fault["rank"] in (None, rank) and fault["step"] <= step
        if is_due:
            self._planned.remove(fault)
            if "id" in fault:
                self._send(FaultFired(fault_id=fault["id"]))
        return is_due


def inject_fault(kind: str, *, disconnect: Callable[[], None] | None = None) -> None:
    """Do to this process what ``kind`` says, now and in this thread.

    Raises:
        InjectedError: For the kind ``error``.
    """
    if kind == "disconnect":
        (disconnect or _nothing)()
    else:
        _INJECT[kind]()


def _nothing() -> None:
    """Stand for connections that are not there."""


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
    # Through PyDLL a call keeps the lock; a signal ends a sleep early, hence the loop.
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
NO_FAULTS = Faults([], lambda _: None)
"""For a loop without a plan."""
