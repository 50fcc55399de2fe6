"""Decide which jobs to submit and to cancel, and which workers to notify. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A pending or running SLURM job, as the rules see it."""

    worker: str
    left_s: float
    """Seconds until its time limit; infinite while it is pending."""
    is_running: bool = False
    is_connected: bool = False
    is_busy: bool = False
    """A training job uses its worker."""
    is_noticed: bool = False
    """Its worker has an interruption notice."""
    is_leaving: bool = False
    """It has been released or cancelled."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits in the spec."""

    max_workers: int
    notice_s: float
    ahead_s: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Actions to take now."""

    num_submits: int = 0
    cancels: tuple[str, ...] = ()
    """Workers whose jobs are surplus."""
    notices: tuple[str, ...] = ()
    """Workers to notify of the end of their jobs."""
    has_surplus: bool = False
    """There are more workers than wanted; they are cancelled if that lasts."""


def decide(slots: Sequence[Slot], *, wanted: int, held: int, limits: Limits, shrinks: bool) -> Plan:
    """Return the actions that keep the pool at its desired size.

    A job whose time limit is near does not count, so its replacement is submitted ahead::

        time left         the job's replacement          its worker
        > ahead_s         none                           trains
        <= ahead_s        submitted, maybe pending       trains
        ... connected     trains                         notified: leaves at a step boundary
        <= notice_s       submitted, maybe pending       notified

    Args:
        slots: The pool's jobs, oldest first.
        wanted: Workers that the coordinator requests. It counts each noticed worker that is not
            yet released twice: as itself and as its replacement.
        held: Workers to keep at least.
        limits: The limits in the spec.
        shrinks: True if there has been a surplus for long enough.
    """
    staying = [slot for slot in slots if not slot.is_leaving and not slot.is_noticed]
    num_noticed = sum(s.is_noticed and s.is_connected and not s.is_leaving for s in slots)
    target = min(max(wanted - num_noticed, held), limits.max_workers)
    expiring = sorted(
        (slot for slot in staying if slot.is_running and slot.left_s <= limits.ahead_s),
        key=lambda slot: slot.left_s,
    )
    lasting = [slot for slot in staying if slot not in expiring]
    surplus = len(lasting) - target
    return Plan(
        num_submits=max(0, -surplus),
        cancels=_surplus(lasting, surplus) if shrinks else (),
        notices=_to_notify(lasting, expiring, target, limits.notice_s),
        has_surplus=surplus > 0,
    )


def _surplus(lasting: Sequence[Slot], count: int) -> tuple[str, ...]:
    # Pending jobs first, then idle workers; the newest of each, because the others are warm.
    free = [slot for slot in reversed(lasting) if not slot.is_busy]
    free.sort(key=lambda slot: (slot.is_running, slot.is_connected))
    return tuple(slot.worker for slot in free[: max(0, count)])


def _to_notify(
    lasting: Sequence[Slot], expiring: Sequence[Slot], target: int, notice_s: float
) -> tuple[str, ...]:
    connected = [slot for slot in expiring if slot.is_connected]
    num_ready = sum(slot.is_connected for slot in lasting)
    # Notify as many workers as the others can replace, and those whose time is up, because SLURM
    # may be configured not to send its own signal.
    num_spare = num_ready + len(connected) - target
    return tuple(
        slot.worker
        for index, slot in enumerate(connected)
        if index < num_spare or slot.left_s <= notice_s
    )
