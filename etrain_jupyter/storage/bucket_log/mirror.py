"""Upload a job's log to the bucket in a background thread, while this machine writes it.

The thread ``etrain-mirror-<job>`` ends after ``finish``, when everything is uploaded or the bucket
has been unreachable for ``ABANDON_S``. Training never waits for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from etrain_jupyter.errors import FencedError, RunStoreError
from etrain_jupyter.storage.bucket_log.uploads import Uploads

logger = logging.getLogger("etrain.mirror")

FLUSH_S = 1.5
"""Interval of uploads, in seconds, after which other machines see new events."""
BEAT_S = 5.0
"""Interval of the coordinator's heartbeat in the bucket, in seconds."""
SILENT_S = 45.0
"""A coordinator without a heartbeat for this long counts as gone, if it cannot be queried."""
# Pauses after consecutive failures: 1, 2, 4, 8, then 15 seconds.
RETRY_S = 1.0
MAX_RETRY_S = 15.0
ABANDON_S = 600.0
"""Timeout for uploading the rest after the job's end, in seconds."""


class Mirror:
    """Uploads a log in the background.

    Args:
        uploads: The uploader; from now on used only by the background thread.
        lock: An open file that holds the lock of the copy; closed when this process neither writes
            nor reads the copy any more.
        name: The job, for the thread's name.
        on_trouble: Called from the thread with the reason when the bucket fails, and with an empty
            string when all events are uploaded again.
        on_fenced: Called from the thread with an explanation when another writer has taken over.
    """

    def __init__(
        self,
        uploads: Uploads,
        *,
        lock: int,
        name: str,
        on_trouble: Callable[[str], None],
        on_fenced: Callable[[str], None],
    ) -> None:
        self._uploads = uploads
        self._lock = lock
        self._ending = threading.Lock()
        """Held while deciding which thread closes the lock."""
        self._has_ended = False
        self._on_trouble, self._on_fenced = on_trouble, on_fenced
        self._wake = threading.Event()
        self._is_finishing = threading.Event()
        self.is_done = threading.Event()
        """Set when no more uploads follow."""
        self.trouble = ""
        """Why the bucket cannot be written at present; empty if it can."""
        self._beat_at = 0.0
        self._finished_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"etrain-mirror-{name}", daemon=True)
        self._thread.start()

    @property
    def seq(self) -> int:
        """The newest event in the bucket."""
        return self._uploads.seq

    @property
    def where(self) -> str:
        """The job's URL in the bucket."""
        return str(self._uploads.chain.objects)

    def hurry(self) -> None:
        """Upload now instead of at the end of the interval."""
        self._wake.set()

    def finish(self) -> None:
        """Upload the remaining events and end the thread. No more events may follow."""
        self._finished_at = time.monotonic()
        with self._ending:
            self._is_finishing.set()
            self._unlock_at_end()
        self._wake.set()

    def _run(self) -> None:
        try:
            self._work()
        except FencedError as exc:
            logger.error("%s", exc)
            self._on_fenced(str(exc))
        except Exception as exc:
            # A bug must not end the job, because the log is complete on this machine.
            logger.exception("uploading the log has stopped")
            self._on_trouble(f"{type(exc).__name__}: {exc}")
        finally:
            with self._ending:
                self._has_ended = True
                self._unlock_at_end()
            self.is_done.set()

    def _unlock_at_end(self) -> None:
        # The job and the upload thread end in either order, on two threads:
        #
        #   finish() first    the job has ended, and the thread uploads the rest
        #   thread first      it was fenced or failed, while the job still appends to the copy
        #
        # The second of the two releases the lock. Until then, no reader may change the copy.
        if self._has_ended and self._is_finishing.is_set() and self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _work(self) -> None:
        num_failures = 0
        while True:
            try:
                # Read the flag before uploading: if `finish` is called in between, events
                # appended just before that call are uploaded in one more round.
                is_finishing = self._is_finishing.is_set()
                self._upload_all(is_last=is_finishing)
                if self.trouble:
                    self.trouble = ""
                    self._on_trouble("")
                if is_finishing:
                    return
                num_failures, pause_s = 0, FLUSH_S
            except FencedError:
                raise
            except (RunStoreError, OSError) as exc:  # OSError: this machine's disk
                num_failures += 1
                pause_s = min(MAX_RETRY_S, RETRY_S * 2 ** min(num_failures - 1, 8))
                if not self.trouble:
                    self.trouble = str(exc)
                    logger.warning("%s; events are kept on this machine and uploaded later", exc)
                    self._on_trouble(self.trouble)
                if self._has_given_up():
                    logger.error(
                        "%s; gave up after %.0f s: the events after %d are on this machine only",
                        exc,
                        ABANDON_S,
                        self._uploads.seq,
                    )
                    return
            self._wake.wait(pause_s)
            self._wake.clear()

    def _upload_all(self, *, is_last: bool) -> None:
        # Events come first, because other machines wait for them. The heartbeat is next: it names
        # the newest uploaded event. Then the files that the events name. Packs are only copies.
        while self._uploads.upload():
            pass
        if is_last or time.monotonic() - self._beat_at >= BEAT_S:
            self._uploads.beat(has_ended=is_last)
            self._beat_at = time.monotonic()
        self._uploads.upload_exhibits()
        try:
            self._uploads.pack()
        except RunStoreError as exc:
            # Do not retry the last pack for GIVE_UP_S: packs are only copies.
            if not is_last:
                raise
            logger.warning("%s; all events are in the bucket nevertheless", exc)

    def _has_given_up(self) -> bool:
        is_finishing = self._is_finishing.is_set()
        return is_finishing and time.monotonic() - self._finished_at > ABANDON_S
