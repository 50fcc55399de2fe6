"""Log exceptions in the coordinator's own code to the affected job, and keep everything running.

A defect that repeats is logged again after 10, 20, 40 ... 600 s, with a count.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log import events
from etrain_jupyter.rules.membership.membership import JobState

logger = logging.getLogger("etrain.coordinator")

FIRST_WAIT_S = 10.0
MOST_WAIT_S = 600.0

MOST_KINDS = 100
"""Maximum number of defect kinds whose logging is rate-limited."""

Kind = tuple[str, str, str]
"""The job, the action that failed, and the exception's class and location."""


class WatchedJob(Protocol):
    """The part of ``HostedJob`` that is needed to log a defect."""

    spec: JobSpec
    state: JobState

    def log(self, kind: type[events.Event], **values: Any) -> None:
        """Append one event."""
        ...


@dataclass
class _Seen:
    wait_s: float
    next_at: float
    num_unsaid: int = 0


class Defects:
    """Log exceptions to the job they belong to, at a bounded rate."""

    def __init__(self) -> None:
        self.num_seen = 0
        """Number of exceptions so far."""
        self.newest = ""
        """The last exception, as it was logged."""
        self._seen: dict[Kind, _Seen] = {}

    @contextlib.contextmanager
    def watch(self, job: WatchedJob | None, doing: str) -> Iterator[None]:
        """Log and suppress any exception raised in the block.

        Args:
            job: The affected job; None if the block concerns no job, or all jobs.
            doing: What the block does, for the message; for example ``writing the log``.
        """
        try:
            yield
        except Exception as exc:
            self.take(job, doing, exc)

    def take(self, job: WatchedJob | None, doing: str, exc: Exception) -> None:
        """Log an exception: the traceback in the scheduler's log, a sentence in the job's."""
        self.num_seen += 1
        self.newest = f"{doing} failed: {type(exc).__name__}: {exc}"
        num_before = self._num_unsaid((job.spec.job_id if job else "", doing, _place_of(exc)))
        if num_before is None:
            return
        again = f" ({num_before:,} more times since it was last logged)" if num_before else ""
        name = job.spec.job_id if job else "the cluster"
        logger.error("%s: %s%s", name, self.newest, again, exc_info=exc)
        if job is None or job.state.is_ended:
            return
        text = (
            f"{self.newest}{again}. This is a defect in etrain-jupyter; the job continues if "
            "possible. The traceback is in the scheduler's log"
        )
        # The log may be the cause. An exception here would escape the block that ``watch``
        # protects.
        try:
            job.log(events.LogLine, level="error", worker="", text=text)
        except Exception:
            logger.exception("%s: this could not be logged for the job", name)

    def _num_unsaid(self, kind: Kind) -> int | None:
        # The number of exceptions of this kind since the last one that was logged; None if the
        # current exception must not be logged either. The interval doubles each time: 10, 20, 40
        # ... 600 s.
        now = clock.now()
        seen = self._seen.get(kind)
        if seen is None:
            if len(self._seen) >= MOST_KINDS:
                del self._seen[next(iter(self._seen))]
            self._seen[kind] = _Seen(FIRST_WAIT_S, now + FIRST_WAIT_S)
            return 0
        if now < seen.next_at:
            seen.num_unsaid += 1
            return None
        seen.wait_s = min(MOST_WAIT_S, 2 * seen.wait_s)
        seen.next_at = now + seen.wait_s
        num, seen.num_unsaid = seen.num_unsaid, 0
        return num


def _place_of(exc: Exception) -> str:
    # Use the class and the line that raised it, because the message may differ each time.
    frame = exc.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else ""
    return f"{type(exc).__name__} {place}"
