"""Track which supervisor reports have been handled, and which may be acknowledged.

Once a report's events are in its job's log, its number is recorded, so that the next scheduler does
not handle the report again; only then is it acknowledged. See ``worker.outbox`` for a timeline.
"""

from __future__ import annotations

from collections.abc import Iterable

from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_records import JobRecords


class Acknowledgements:
    """Track the sequence numbers of each supervisor's reports.

    Args:
        records: Stores the sequence numbers for the next scheduler.
    """

    def __init__(self, records: JobRecords) -> None:
        self._records = records
        # Keyed by worker: the number of the newest handled report; the jobs whose logs still lack
        # events from the worker's reports, because disk writes fail; and the number to acknowledge
        # next.
        self._taken: dict[str, int] = {}
        self._blocked_by: dict[str, list[HostedJob]] = {}
        self._due: dict[str, int] = {}

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to acknowledge, now or later."""
        return not self._due and not self._blocked_by

    def is_new(self, worker: str, number: int) -> bool:
        """Return True if a report has not been handled yet; otherwise acknowledge it again."""
        # A repeated report was resent over a new connection, perhaps to a new scheduler:
        #
        #     its events are in the logs    acknowledge again; the first message may be lost
        #     a log is behind (blocked)     no reply now: ``collect`` acknowledges it later
        heard = self._records.heard(worker)
        if number > max(heard, self._taken.get(worker, 0)):
            return True
        if worker not in self._blocked_by:
            self._due[worker] = heard
        return False

    def take(self, worker: str, number: int, jobs: Iterable[HostedJob]) -> None:
        """Note that a report with events for these jobs was handled."""
        self._taken[worker] = number
        # Acknowledgements are cumulative. While one report is blocked, the worker's later reports
        # are blocked as well, even if they are about a job whose log is up to date.
        behind = [job for job in jobs if job.job_log.is_behind]
        if behind or worker in self._blocked_by:
            known = self._blocked_by.setdefault(worker, [])
            known += [job for job in behind if job not in known]
        else:
            self._note(worker)

    def forget(self, worker: str) -> None:
        """Forget a supervisor that will not reconnect."""
        for known in (self._taken, self._blocked_by, self._due):
            known.pop(worker, None)
        self._records.forget_worker(worker)

    def collect(self) -> dict[str, int]:
        """Return, for each worker, the number of the last report that its supervisor may drop."""
        for worker, jobs in list(self._blocked_by.items()):
            if not any(job.job_log.is_behind for job in jobs):
                del self._blocked_by[worker]
                self._note(worker)
        due, self._due = self._due, {}
        return due

    def _note(self, worker: str) -> None:
        # Until the report is acknowledged, the supervisor resends it to each new scheduler, which
        # must recognize it as handled.
        number = self._taken[worker]
        self._records.note_received(worker, number)
        self._due[worker] = number
