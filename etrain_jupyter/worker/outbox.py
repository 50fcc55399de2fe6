"""Keep a supervisor's reports until they are acknowledged, and resend them to a new coordinator.

A coordinator may die between logging a report and acknowledging it. It therefore records the number
of each logged report, so that its successor neither loses nor duplicates a report::

    supervisor   report 7 ──▶        report 8 ──▶                    hello, 8 again ──▶
    coordinator     logs, records 7     logs, records 8, dies   │ successor: 8 <= 8, dropped
                    acknowledges 7                              │ acknowledges 8
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import assert_never

from etrain_jupyter.wire.codec import Encoded
from etrain_jupyter.wire.messages import (
    STATUS_REPORT,
    GenerationLeft,
    Progress,
    TrainerHello,
    TrainerSummary,
    UserCodeFailed,
)

MAX_UNACKNOWLEDGED = 20_000
"""Number of unacknowledged reports at which the supervisor stops reading, so that its trainers
wait."""

MOST_RECORDS = 100_000
"""The same limit for the step records in these reports, because a fast job's reports contain
many."""

MOST_BYTES = 64_000_000
"""The same limit for the exhibits in these reports, in bytes."""


class Outbox:
    """Number encoded reports and keep them until they are acknowledged."""

    def __init__(
        self,
        most: int = MAX_UNACKNOWLEDGED,
        most_records: int = MOST_RECORDS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._most = most
        self._most_records = most_records
        self._most_bytes = most_bytes
        self._num_records = self._num_bytes = 0  # in ``_unacknowledged``
        self._newest = 0
        self._unacknowledged: deque[Encoded] = deque()  # not acknowledged, oldest first

    @property
    def newest(self) -> int:
        """Number of the newest report; 0 before the first."""
        return self._newest

    @property
    def is_full(self) -> bool:
        """True if the supervisor should stop reading; further reports are still kept."""
        return (
            len(self._unacknowledged) >= self._most
            or self._num_records >= self._most_records
            or self._num_bytes >= self._most_bytes
        )

    def put(self, report: Encoded, *, trainer: str) -> Encoded:
        """Set the trainer's name and a number in a report; keep and return it."""
        self._newest += 1
        # Replace the sender's own values, so that a trainer cannot send reports in another
        # trainer's name.
        numbered = {**report, "trainer": trainer, "number": self._newest}
        self._unacknowledged.append(numbered)
        self._num_records += _num_records(report)
        self._num_bytes += _num_bytes(report)
        return numbered

    def acknowledge(self, number: int) -> None:
        """Drop all reports up to this one."""
        while self._unacknowledged and self._unacknowledged[0]["number"] <= number:
            report = self._unacknowledged.popleft()
            self._num_records -= _num_records(report)
            self._num_bytes -= _num_bytes(report)

    def unacknowledged(self) -> list[Encoded]:
        """Return the reports not yet acknowledged by any coordinator, in order."""
        return list(self._unacknowledged)


def _num_records(report: Encoded) -> int:
    records = report.get("records")  # of StepsTrained; not checked, so perhaps not a list
    return len(records) if isinstance(records, (list, tuple)) else 0


def _num_bytes(report: Encoded) -> int:
    data = report.get("data")  # of ExhibitFound; not checked, so perhaps not bytes
    return len(data) if isinstance(data, bytes) else 0


@dataclass
class TrainerStatus:
    """State of a trainer for a restarted coordinator, derived from messages in both directions."""

    started_at: float
    """In seconds since the epoch, because another process reads it."""
    pid: int = 0
    generation: int = 0
    """The newest generation that it was instructed to join; 0 if none."""
    hello: TrainerHello | None = None
    left: GenerationLeft | UserCodeFailed | None = None
    """Report that it left that generation, or that the notebook's code failed in it."""
    progress: Progress = (-1, 0)
    """Progress in that report."""
    ended_with: int = 0
    """Number of the report of its exit; 0 while it is running."""

    def enter(self, generation: int) -> None:
        """Note that the trainer is joining a generation."""
        self.generation, self.left = generation, None

    def note_report(self, data: Encoded) -> None:
        """Update the status from a report by the trainer.

        Raises:
            MalformedMessageError: If it is a report that changes the status, with invalid fields.
        """
        if not STATUS_REPORT.includes(data):
            return
        match report := STATUS_REPORT.decode(data):
            case TrainerHello():
                self.hello = report
            case GenerationLeft():
                self.left, self.progress = report, report.progress
            case UserCodeFailed():
                self.left = report
                if report.generation:  # 0 during warm-up, which has no progress
                    self.progress = report.progress
            case _:
                assert_never(report)

    def summary(self) -> TrainerSummary:
        """Return its status in the form used in a supervisor's hello."""
        return TrainerSummary(**vars(self))
