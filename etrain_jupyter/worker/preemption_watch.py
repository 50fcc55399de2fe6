"""What a worker hears of its own machine's end: from EC2, or by a signal of the batch system."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

from etrain_jupyter.wire.channel import Message
from etrain_jupyter.wire.notices import INTERRUPTION
from etrain_jupyter.worker.imds import Imds, is_ec2
from etrain_jupyter.worker.notices import POLL_S, Notice, NoticeWatch

logger = logging.getLogger("etrain.supervisor")

SIGNALLED_S = 120.0
"""How long the machine lives after SIGUSR1, unless ``ETRAIN_NOTICE_S`` says else; SLURM sends it
with ``--signal=B:USR1@120``."""


class OwnNotices:
    """Listens for notices, tells of them, and remembers them for the next coordinator.

    Lives on an event loop.

    Args:
        tell: Sends a message to the coordinator, if there is one.
    """

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self._tell = tell
        self._known: dict[str, Notice] = {}
        self._watch: NoticeWatch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_signal = False

    def start(self) -> None:
        """Begin to listen; asking again changes nothing."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        # Only the main thread is sent signals; where the loop runs in another one there are none.
        try:
            self._loop.add_signal_handler(signal.SIGUSR1, self._on_signal)
            self._has_signal = True
        except (ValueError, RuntimeError, NotImplementedError):
            logger.info("SIGUSR1 is no notice here: the event loop is not in the main thread")
        if is_ec2():
            poll_s = seconds_from_environment("ETRAIN_NOTICE_POLL_S", POLL_S)
            self._watch = NoticeWatch(Imds(), self._on_watch, poll_s=poll_s)
            self._watch.start()

    async def stop(self) -> None:
        """Listen no more."""
        loop, self._loop = self._loop, None
        if self._has_signal and loop is not None:
            loop.remove_signal_handler(signal.SIGUSR1)
            self._has_signal = False
        watch, self._watch = self._watch, None
        if watch is not None:
            await asyncio.to_thread(watch.stop)

    def tell_again(self) -> None:
        """Tell a coordinator that has just been greeted what is known."""
        for notice in self._known.values():
            self._say(notice)

    def _on_signal(self) -> None:
        notice_s = seconds_from_environment("ETRAIN_NOTICE_S", SIGNALLED_S)
        logger.warning("SIGUSR1: this machine will be taken in %g s", notice_s)
        self._take(Notice(kind=INTERRUPTION, deadline=time.time() + notice_s))

    def _on_watch(self, notice: Notice) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._take, notice)

    def _take(self, notice: Notice) -> None:
        self._known[notice.kind] = notice
        self._say(notice)

    def _say(self, notice: Notice) -> None:
        # Clocks of machines differ: what counts is how long it is from now.
        told = {"kind": notice.kind, "deadline": notice.deadline, "left_s": notice.left_s()}
        self._tell({"op": "notice", **told})


def seconds_from_environment(name: str, default: float) -> float:
    """Return a number of seconds above 0 from a variable, else the default."""
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
        "%s=%r is no number of seconds above 0: %g are taken instead", name, text, default
    )
    return default
