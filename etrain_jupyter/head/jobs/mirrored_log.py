"""Log of a job whose run store is a bucket: written locally, and uploaded seconds later."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.errors import FencedError
from etrain_jupyter.head.jobs.job_log import JobLog
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log import events
from etrain_jupyter.storage.bucket_log.chain import Chain
from etrain_jupyter.storage.bucket_log.local_copy import LogCopy, take_lock
from etrain_jupyter.storage.bucket_log.mirror import Mirror
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.storage.bucket_log.uploads import Uploads, claim, new_writer

logger = logging.getLogger("etrain.coordinator")

LAST_UPLOAD_S = 15.0
"""Maximum delay of a job's end, in seconds, while its upload to the bucket is pending."""
LOOK_S = 0.05
LOCK_S = 20.0
"""Timeout in seconds for locking the local copy, which a reader may be filling."""
UPLOAD_PATIENCE_S = 5.0


@dataclass(kw_only=True)
class OpenedRun:
    """A job in a bucket. This process is its only writer."""

    lock: int
    """Descriptor of the lock file, held while this machine's copy is written or uploaded."""
    uploads: Uploads


def open_run(spec: JobSpec) -> OpenedRun:
    """Become the writer of a job's log.

    Blocks on requests to the bucket, so do not call it on an event loop.

    Raises:
        FencedError: If another process is its writer.
        RunStoreError: If the bucket cannot be read and written from this machine.
    """
    lock = take_lock(spec.run_dir, patience_s=LOCK_S)
    if lock is None:
        raise FencedError(
            f"the log of job {spec.job_id} is still being written or uploaded by another "
            "process on this machine. Nothing was done. Find it with %etrain ls, and retry "
            "when it has ended"
        )
    path = spec.log_path
    try:
        chain = Chain(RunObjects(spec.place, patience_s=UPLOAD_PATIENCE_S))
        if spec.resumes:
            copy = LogCopy(chain, path)
            uploads = claim(copy, chain, job_id=spec.job_id, end=spec.log_end)
        else:
            uploads = Uploads(chain, path, writer=new_writer(), seq=0)
        uploads.beat()  # the bucket now names this writer; a write failure is raised here
    except BaseException:
        os.close(lock)
        raise
    return OpenedRun(lock=lock, uploads=uploads)


def _reopen_run(spec: JobSpec) -> OpenedRun:
    # Continue under the previous writer's name, which is in this folder. The lock was released when
    # that process died, so a reader may now hold it to fill the copy from the bucket.
    lock = take_lock(spec.run_dir, patience_s=LOCK_S)
    if lock is None:
        raise FencedError(f"another process on this machine is writing the log of {spec.job_id}")
    chain = Chain(RunObjects(spec.place, patience_s=UPLOAD_PATIENCE_S))
    return OpenedRun(lock=lock, uploads=Uploads(chain, spec.log_path))


class MirroredLog(JobLog):
    """Job log that is also uploaded to a bucket.

    Listeners do not receive the end of the job until the bucket has it or ``LAST_UPLOAD_S`` have
    passed. The file stays open until then, because a failed upload is logged after the end::

        append(end) -> uploaded, or LAST_UPLOAD_S passed -> listeners get the end -> close

    Args:
        spec: Specification of the job.
        opened: Result of ``open_run``; None if this machine was already the writer.
        on_fenced: Called on the event loop when another coordinator takes over the job.
    """

    def __init__(
        self, spec: JobSpec, opened: OpenedRun | None, on_fenced: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._on_fenced = on_fenced
        self._loop = asyncio.get_running_loop()
        self._withheld = 0  # ``seq`` of the job's end while it is held back; otherwise 0
        self._is_closing = False
        self._ending: asyncio.Task[None] | None = None
        self._troubled_at = 0.0
        run = opened or _reopen_run(spec)
        try:
            super().__init__(spec.log_path)
        except BaseException:
            os.close(run.lock)
            raise
        self._is_open = True
        self._mirror = Mirror(
            run.uploads,
            lock=run.lock,
            name=spec.job_id,
            on_trouble=lambda why: self._call(self._log_trouble, why),
            on_fenced=lambda why: self._call(self._fence, why),
        )

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event that listeners may receive."""
        newest = super().last_seq
        return min(newest, self._withheld - 1) if self._withheld else newest

    @property
    def is_uploading(self) -> bool:
        """True if events are missing from the bucket and may still be uploaded."""
        return self.is_behind or not self._mirror.is_done.is_set()

    @property
    def is_reported(self) -> bool:
        """True if listeners may receive everything appended so far."""
        return not self._withheld and super().is_reported

    def append(self, new: list[events.Event]) -> None:
        """Append events locally. Hold back the job's end, and upload it immediately."""
        ends = [
            seq
            for seq, event in enumerate(new, start=self.next_seq)
            if isinstance(event, events.JobStatusChanged)
            and event.status in events.TERMINAL_STATUSES
        ]
        # Otherwise, a job could appear to be running in the bucket after a kernel here reported its
        # end. Set ``_withheld`` before the base class wakes the listeners.
        if ends and not self._withheld and self.is_uploading:
            self._withheld = ends[0]
            self._ending = self._loop.create_task(self._release_end(ends[0]))
        super().append(new)
        if ends:
            self._mirror.hurry()

    def since(self, seq: int, limit: int) -> list[dict[str, Any]]:
        """Return at most ``limit`` events after ``seq`` that listeners may receive, in order."""
        found = super().since(seq, limit)
        return [one for one in found if one["seq"] < self._withheld] if self._withheld else found

    def close(self) -> None:
        """Upload the rest. The file is closed once listeners have received the job's end."""
        # _release_end may still log a warning; it then closes the file itself.
        self._is_closing = True
        if self._ending is None or self._ending.done():
            self._finish()

    async def _release_end(self, seq: int) -> None:
        deadline = time.monotonic() + LAST_UPLOAD_S
        while self._mirror.seq < seq and self.is_uploading and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
        self._withheld = 0
        self._announce()
        if self._mirror.seq < seq:
            logger.warning("job %s: its end is not in %s", self._spec.job_id, self._mirror.where)
            why = self._mirror.trouble or f"not uploaded within {LAST_UPLOAD_S:.0f} s"
            self._log_line(
                "warning",
                f"The job has ended, but {self._mirror.where} does not have its end yet ({why}). "
                f"It is in {self._spec.run_dir}; the upload is retried",
            )
        if self._is_closing:
            self._finish()

    def _finish(self) -> None:
        self._is_open = False
        super().close()

    def _shut(self) -> None:
        super()._shut()
        self._mirror.finish()

    # --- callbacks of the mirror ---

    def _call(self, handler: Callable[[str], None], why: str) -> None:
        # In the mirror's thread.
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(handler, why)

    def _log_trouble(self, why: str) -> None:
        if why:
            self._troubled_at = time.monotonic()
            self._log_line(
                "warning", f"{why}. Training and the log continue here; the upload is retried"
            )
        else:
            out_s = time.monotonic() - self._troubled_at
            self._log_line("info", f"The run store has the whole log again, after {out_s:.0f} s")

    def _fence(self, why: str) -> None:
        self._log_line(
            "error", f"Another coordinator has taken over the job, so it stops here: {why}"
        )
        self._on_fenced()

    def _log_line(self, level: str, text: str) -> None:
        if self._is_open:
            job_id, now = self._spec.job_id, time.time()
            line = events.LogLine(job_id=job_id, time=now, level=level, worker="", text=text)
            super().append([line])
