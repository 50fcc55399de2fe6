"""Notices: this machine will be taken, or may be.

Polled from the metadata service by a thread of its own, so that nothing that the process does can
delay it, and so that a service which hangs delays nothing but the notice.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from etrain_jupyter.wire.notices import INTERRUPTION, REBALANCE
from etrain_jupyter.worker.imds import Imds, ImdsError, ImdsResponse, instant_of_iso

logger = logging.getLogger("etrain.notices")

POLL_S = 2.0
"""AWS asks for a poll every 5 s at least; of 120 s, each counts."""

INTERRUPTION_PATH = "meta-data/spot/instance-action"
REBALANCE_PATH = "meta-data/events/recommendations/rebalance"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What will become of this machine."""

    kind: str
    """``interruption`` (it will be taken at ``deadline``) or ``rebalance`` (it is likely to be)."""
    deadline: float = 0.0
    """In seconds since the epoch, by this machine's clock; 0.0 if nobody knows."""

    def left_s(self) -> float:
        """Return how long the machine will live, 0.0 if it should be gone."""
        return max(0.0, self.deadline - time.time())


class NoticeWatch:
    """Watches for notices, and tells of each once; never raises, whatever the service does.

    Args:
        imds: The metadata service.
        on_notice: Called on the watch's thread.
        poll_s: How often to look.
    """

    def __init__(
        self, imds: Imds, on_notice: Callable[[Notice], None], *, poll_s: float = POLL_S
    ) -> None:
        self._imds = imds
        self._on_notice = on_notice
        self._poll_s = poll_s
        self._told: dict[str, str] = {}
        """What the service said of each kind when it was told."""
        self._failing: dict[str, str] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etrain-notices", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def look_now(self) -> None:
        """Look for an interruption on the caller's thread, which also tells of it."""
        self._look(INTERRUPTION, INTERRUPTION_PATH)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Look no more; returns at once while the service hangs for longer than ``timeout_s``."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._end.is_set():
            # Each by itself: what goes wrong with one path must not hide the other.
            self._look(INTERRUPTION, INTERRUPTION_PATH)
            self._look(REBALANCE, REBALANCE_PATH)
            self._end.wait(self._poll_s)

    def _look(self, kind: str, path: str) -> None:
        try:
            answer = self._imds.ask(path)
            if answer is None or self._told.get(kind) == answer.text:
                self._note(kind, "")
                return
            notice = _read(kind, answer)
            self._note(kind, "")
            self._told[kind] = answer.text
            logger.warning("notice of this machine: %s %s", kind, answer.text)
            self._on_notice(notice)
        except (ImdsError, ValueError, KeyError, TypeError) as exc:
            self._note(kind, f"{type(exc).__name__}: {exc}")
        except Exception:
            logger.exception("a notice could not be told")

    def _note(self, kind: str, trouble: str) -> None:
        """Log trouble with the service when it begins and when it is over."""
        before, self._failing[kind] = self._failing.get(kind, ""), trouble
        if trouble and not before:
            logger.warning("no news of this machine's %s for now: %s", kind, trouble)
        elif before and not trouble:
            logger.info("the metadata service tells of this machine's %s again", kind)


def _read(kind: str, answer: ImdsResponse) -> Notice:
    """Return the notice in an answer; its deadline by this machine's clock, which may be wrong."""
    told = json.loads(answer.text)
    if kind == REBALANCE:
        return Notice(kind=kind)
    return Notice(kind=kind, deadline=time.time() + instant_of_iso(told["time"]) - answer.at)
