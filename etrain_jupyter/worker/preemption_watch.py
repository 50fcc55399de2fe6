"""Watch for preemption of this machine: a signal from the batch system, and plug-ins' notices."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from etrain_jupyter import plugin
from etrain_jupyter.wire.messages import INTERRUPTION, MachineNotice

logger = logging.getLogger("etrain.supervisor")

SIGNALLED_S = 120.0
"""Seconds from SIGUSR1 until the machine is reclaimed, unless ``ETRAIN_NOTICE_S`` is set. Batch
systems can send the signal before they end a job."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Notice that this machine will or may be reclaimed."""

    kind: str
    """``interruption`` (it is reclaimed at ``deadline``) or ``rebalance`` (likely to happen)."""
    deadline: float = 0.0
    """In seconds since the epoch, on this machine's clock; 0.0 if unknown."""

    def left_s(self) -> float:
        """Return the seconds until the deadline; 0.0 if it has passed."""
        return max(0.0, self.deadline - time.time())


class Watch(Protocol):
    """A plug-in's running watch for notices, on its own thread."""

    def stop(self) -> None:
        """Stop watching; may block for seconds."""


class PreemptionWatch:
    """Receive notices, report them, and keep them for the next coordinator.

    Runs on an event loop.

    Args:
        send: Sends a message to the coordinator, if one is connected.
    """

    def __init__(self, send: Callable[[MachineNotice], None]) -> None:
        self._send = send
        self._known: dict[str, Notice] = {}  # the newest notice of each kind
        self._watches: list[Watch] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # None unless started
        self._has_signal = False

    def start(self) -> None:
        """Start watching; a second call has no effect."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        # Python handles signals only in the main thread, so event loops in other threads cannot add
        # handlers.
        try:
            self._loop.add_signal_handler(signal.SIGUSR1, self._on_signal)
            self._has_signal = True
        except (ValueError, RuntimeError, NotImplementedError):
            logger.info("SIGUSR1 is not handled: the event loop is not in the main thread")
        for one in plugin.installed().values():
            watch: Watch | None = plugin.load(one.notices)(self._on_watch) if one.notices else None
            if watch is not None:
                self._watches.append(watch)

    async def stop(self) -> None:
        """Stop watching."""
        loop, self._loop = self._loop, None
        if self._has_signal and loop is not None:
            loop.remove_signal_handler(signal.SIGUSR1)
            self._has_signal = False
        watches, self._watches = self._watches, []
        for watch in watches:
            await asyncio.to_thread(watch.stop)

    def send_again(self) -> None:
        """Report all known notices to a newly connected coordinator."""
        for notice in self._known.values():
            self._report(notice)

    def take(self, left_s: float) -> None:
        """Report that this machine will be reclaimed in ``left_s`` seconds."""
        self._take(Notice(kind=INTERRUPTION, deadline=time.time() + left_s))

    def _on_signal(self) -> None:
        notice_s = seconds_from_environment("ETRAIN_NOTICE_S", SIGNALLED_S)
        logger.warning("SIGUSR1: this machine will be reclaimed in %g s", notice_s)
        self.take(notice_s)

    def _on_watch(self, notice: Notice) -> None:
        # The watch's thread may still be waiting for a response after stop().
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._take, notice)

    def _take(self, notice: Notice) -> None:
        self._known[notice.kind] = notice
        self._report(notice)

    def _report(self, notice: Notice) -> None:
        # Machines' clocks differ, so send the remaining seconds rather than an instant.
        self._send(MachineNotice(notice=notice.kind, left_s=notice.left_s()))


def seconds_from_environment(name: str, default: float) -> float:
    """Return a positive number of seconds from an environment variable, or the default."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value > 0:
        return value
    logger.warning(
        "%s=%r is not a positive number of seconds; using %g instead", name, text, default
    )
    return default
