"""Watch for EC2 notices about this machine: interruptions and rebalance recommendations.

A separate thread polls the metadata service, so that an unresponsive service does not block the
process.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable

from etrain_jupyter.plugins.ec2.machine.imds import (
    Imds,
    ImdsError,
    ImdsResponse,
    instant_of_iso,
    is_ec2,
)
from etrain_jupyter.wire.messages import INTERRUPTION, REBALANCE
from etrain_jupyter.worker.preemption_watch import Notice, seconds_from_environment

logger = logging.getLogger("etrain.notices")

POLL_S = 2.0
"""Polling interval in seconds. AWS recommends 5 s or less; notices arrive 120 s ahead, so every
second counts."""

INTERRUPTION_PATH = "meta-data/spot/instance-action"
REBALANCE_PATH = "meta-data/events/recommendations/rebalance"


class NoticeWatch:
    """Watch for notices and report each one once. Never raises, whatever the service returns.

    Args:
        imds: The metadata service.
        on_notice: Called with each new notice, on the watch's thread.
        poll_s: Polling interval in seconds.
    """

    def __init__(
        self, imds: Imds, on_notice: Callable[[Notice], None], *, poll_s: float = POLL_S
    ) -> None:
        self._imds = imds
        self._on_notice = on_notice
        self._poll_s = poll_s
        self._told: dict[str, str] = {}  # by kind: the last reported response
        self._failing: dict[str, str] = {}  # by kind: the last request's error, or empty
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etrain-notices", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def poll_now(self) -> None:
        """Check for an interruption now, on the caller's thread, and report it."""
        self._look(INTERRUPTION, INTERRUPTION_PATH)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop polling; give up waiting for a hanging request after ``timeout_s``."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._end.is_set():
            # Check each path separately, so that an error in one does not hide the other.
            self._look(INTERRUPTION, INTERRUPTION_PATH)
            self._look(REBALANCE, REBALANCE_PATH)
            self._end.wait(self._poll_s)

    def _look(self, kind: str, path: str) -> None:
        try:
            answer = self._imds.ask(path)
            # A notice stays in the metadata; a new deadline changes its text, so it is reported
            # again.
            if answer is None or self._told.get(kind) == answer.text:
                self._note(kind, "")
                return
            notice = _read(kind, answer)
            self._note(kind, "")
            self._told[kind] = answer.text  # before the callback: not repeated if that raises
            logger.warning("notice for this machine: %s %s", kind, answer.text)
            self._on_notice(notice)
        except (ImdsError, ValueError, KeyError, TypeError) as exc:
            self._note(kind, f"{type(exc).__name__}: {exc}")
        except Exception:  # for example, from the callback: keep watching
            logger.exception("a notice could not be reported")

    def _note(self, kind: str, trouble: str) -> None:
        """Log when the service begins or stops returning errors."""
        before, self._failing[kind] = self._failing.get(kind, ""), trouble
        if trouble and not before:
            logger.warning("notices of the kind %s cannot be read; retrying: %s", kind, trouble)
        elif before and not trouble:
            logger.info("notices of the kind %s can be read again", kind)


def _read(kind: str, answer: ImdsResponse) -> Notice:
    told = json.loads(answer.text)
    if kind == REBALANCE:
        return Notice(kind=kind)
    # This machine's clock may be wrong, so compute the remaining time from AWS's clock alone.
    return Notice(kind=kind, deadline=time.time() + instant_of_iso(told["time"]) - answer.at)


def watch_if_on_ec2(on_notice: Callable[[Notice], None]) -> NoticeWatch | None:
    """Start to watch for notices about this machine; return None if it is not on EC2."""
    if not is_ec2():
        return None
    poll_s = seconds_from_environment("ETRAIN_NOTICE_POLL_S", POLL_S)
    watch = NoticeWatch(Imds(), on_notice, poll_s=poll_s)
    watch.start()
    return watch
