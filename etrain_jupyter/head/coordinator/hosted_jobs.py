"""Jobs of one scheduler: open them, keep their records, and free the resources of ended jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from etrain_jupyter.head.coordinator.defects import Defects
from etrain_jupyter.head.coordinator.requests import UnknownJobError
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_records import JobRecords
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.head.jobs.mirrored_log import open_run
from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s

logger = logging.getLogger("etrain.coordinator")

LAST_UPLOADS_S = 3.0
"""Timeout in seconds for uploading logs to a bucket when the cluster shuts down."""

UPLOAD_POLL_S = 0.05


class HostedJobs(dict[str, HostedJob]):
    """The jobs of one scheduler by id, including those that have ended.

    Args:
        host: Creates a job from its specification.
        records: Keeps what the next scheduler needs.
        defects: Logs exceptions in our own code.
    """

    def __init__(
        self, host: Callable[..., HostedJob], records: JobRecords, defects: Defects
    ) -> None:
        super().__init__()
        self._host = host
        self._records = records
        self._defects = defects
        self._idle_since = time.monotonic()

    def active(self) -> list[HostedJob]:
        """Return the jobs that have not ended."""
        return [job for job in self.values() if not job.state.is_ended]

    def find(self, job_id: str) -> HostedJob:
        """Return a job.

        Raises:
            UnknownJobError: If this cluster does not have it.
        """
        if job_id not in self:
            raise UnknownJobError(f"job {job_id} is not on this cluster")
        return self[job_id]

    def idle_s(self) -> float:
        """Return the seconds since the last job ended; 0.0 while a job or its upload is active."""
        if any(not job.state.is_ended or job.is_uploading for job in self.values()):
            return 0.0
        return time.monotonic() - self._idle_since

    async def open(self, spec: JobSpec) -> None:
        """Start or resume a job."""
        # Write the record first. If the scheduler dies now, the next one starts the job (see
        # HostedJob).
        spec.run_dir.mkdir(parents=True, exist_ok=True)
        opened = await asyncio.to_thread(open_run, spec) if spec.place else None
        try:
            self._records.add(spec)
            self[spec.job_id] = self._host(spec, opened=opened)
        except BaseException as exc:
            self._records.remove(spec.job_id)
            if isinstance(exc, OSError) and not spec.resumes:
                spec.log_path.unlink(missing_ok=True)  # it is empty: the job never existed
            raise

    def replay(self, folder: Path) -> list[HostedJob]:
        """Keep records in a folder, and take over the jobs of the previous scheduler.

        Returns:
            The jobs whose trainers may be alive.
        """
        self._records.folder = folder
        for spec, pending in self._records.load():
            try:
                self[spec.job_id] = self._host(spec, replays=pending)
            except Exception:
                # A job that cannot continue must not stop the others or the scheduler.
                logger.exception("job %s could not be taken over", spec.job_id)
        return [job for job in self.active() if job.replayed is not None]

    def log_all(self, level: Literal["info", "warning"], text: str) -> None:
        """Log a line for each active job."""
        for job in self.active():
            job.log(events.LogLine, level=level, worker="", text=text)

    def stop_all(self, reason: str = "", *, now: bool = False) -> None:
        """Stop all active jobs."""
        for job in self.active():
            job.handle(s.StopRequested(now=now, reason=reason))

    def write_logs(self) -> None:
        """Retry event writes that failed."""
        for job in self.values():
            with self._defects.watch(job, "writing the log"):
                job.job_log.retry()

    def settle(self) -> list[HostedJob]:
        """Free the resources of jobs that have ended since the last call; return these jobs."""
        #     the job's end is logged ──── free its resources,   ──── the end is durable, in a
        #                                  reassign its workers       bucket up to 15 s later:
        #                                                             remove its record
        ended = [job for job in self.values() if job.state.is_ended and not job.is_disposed]
        for job in ended:
            job.dispose()
            self._idle_since = time.monotonic()
        for job in self.values():
            if job.has_reported_end and job.is_recorded:
                # Do not remove the record earlier. If this scheduler died in between, the next one
                # would not know the job and would reject a kernel that still waits for its end.
                job.is_recorded = False
                self._records.remove(job.spec.job_id)
        for job in self.active():
            self._records.note(job.spec.job_id, job.pending_requests)
        return ended

    async def close(self) -> None:
        """Upload the logs of ended jobs, for a limited time."""
        # Each log has an upload thread. If it does not finish in time, the next process on this
        # machine that claims the log uploads the rest.
        deadline = time.monotonic() + LAST_UPLOADS_S
        while any(job.is_uploading for job in self.values()) and time.monotonic() < deadline:
            self.write_logs()
            await asyncio.sleep(UPLOAD_POLL_S)
        for job in self.values():
            if job.job_log.is_behind:
                job.job_log.abandon()
