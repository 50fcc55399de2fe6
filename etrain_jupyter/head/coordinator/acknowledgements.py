"""Track which reports of the supervisors were handled, and which may be acknowledged.

A report is acknowledged once its facts are in the log of its job. Its number is written down before
that, so that the next scheduler does not handle it again. See ``worker.outbox`` for a timeline.
"""

from __future__ import annotations

from collections.abc import Iterable

from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_records import JobRecords


class Acknowledgements:
    """Track the numbers of each supervisor's reports.

    Args:
        records: Where the numbers are written down.
    """

    def __init__(self, records: JobRecords) -> None:
        self._records = records
        self._taken: dict[str, int] = {}
        self._blocked_by: dict[str, list[HostedJob]] = {}
        """Jobs whose logs lack facts of a supervisor's reports."""
        self._due: dict[str, int] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to acknowledge, now or later."""
        return not self._due and not self._blocked_by

    def is_new(self, worker: str, number: int) -> bool:
        """Return whether a report was not handled before; if it was, acknowledge it again."""
        heard = self._records.heard(worker)
        if number > max(heard, self._taken.get(worker, 0)):
            return True
        if worker not in self._blocked_by:
            self._due[worker] = heard
        return False

    def take(self, worker: str, number: int, jobs: Iterable[HostedJob]) -> None:
        """Note that a report was handled, whose facts belong to these jobs."""
        self._taken[worker] = number
        behind = [job for job in jobs if job.is_log_behind]
        if behind or worker in self._blocked_by:
            known = self._blocked_by.setdefault(worker, [])
            known += [job for job in behind if job not in known]
        else:
            self._note(worker)

    def forget(self, worker: str) -> None:
        """Forget a supervisor that will not reconnect."""
        for known in (self._taken, self._blocked_by, self._due):
            known.pop(worker, None)

    def collect(self) -> dict[str, int]:
        """Return the numbers up to which supervisors need not keep their reports any more."""
        for worker, jobs in list(self._blocked_by.items()):
            if not any(job.is_log_behind for job in jobs):
                del self._blocked_by[worker]
                self._note(worker)
        due, self._due = self._due, {}
        return due

    def _note(self, worker: str) -> None:
        number = self._taken[worker]
        self._records.note_heard(worker, number)
        self._due[worker] = number
