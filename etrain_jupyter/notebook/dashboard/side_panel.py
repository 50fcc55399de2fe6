"""Messages to JupyterLab's side panel, status bar and palette about the jobs of this kernel.

The front end sends ``watch`` and repeats it every 20 s. As long as it does, it receives at most two
messages per second: ``rows``, one for each attached job that has changed (for all jobs if
``whole``); ``gone``, the IDs of jobs that are no longer attached; and less often ``studies``,
searches that this kernel follows, ``others``, running jobs that this kernel can attach to, and
``pools``, the running clusters. Any other request contains the name of its view in ``view`` and
receives one ``answer``, with that name in ``to``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from etrain_jupyter.notebook.dashboard.curves import means
from etrain_jupyter.notebook.dashboard.job_view import JobView

ROWS_EVERY_S = 0.5
POLL_EVERY_S = 20.0
"""Interval of scans for other jobs and for pools."""
MAX_STUDIES = 16
"""Maximum number of studies; the ones that changed last are sent."""
WATCHED_S = 120.0
"""Lifetime of a ``watch`` in seconds; a page in the background repeats it once per minute."""
MAX_CURVE_POINTS = 48
"""Maximum points in the sparkline: at least one per pixel."""
LONG_FIELDS = ("workers", "events", "markers")


@dataclass(frozen=True, kw_only=True)
class OtherJobs:
    """Result of a scan: jobs that this kernel is not attached to, and clusters."""

    others: tuple[Mapping[str, Any], ...] | None = ()
    """Running jobs, each with job_id, name, status, step, total_steps and world_size; None if the
    scan omitted them, so the previous ones remain valid."""
    pools: tuple[Mapping[str, Any], ...] = ()
    """Running clusters, each with pool, cluster_id, workers, idle_s, ends_in_s and time."""


class Listed(Protocol):
    """A job that this kernel is attached to: its dashboard, displayed or not."""

    def version(self) -> int:
        """Return a number that grows with each change."""

    def row(self) -> dict[str, Any]:
        """Return its row; see ``row_of``."""


Look = Callable[[Collection[str], bool], OtherJobs]
"""Scans for other jobs. Receives the IDs of the attached jobs, and whether a user requested it."""


class SidePanel:
    """Send the messages, from one background thread that ends when no front end is watching.

    Attributes:
        num_errors: Number of failed scans and messages. Their exceptions are counted, not raised.
    """

    def __init__(self, post: Callable[[dict[str, Any]], None]) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._is_due = threading.Event()
        self._jobs: dict[str, Listed] = {}
        self._studies: dict[str, Mapping[str, Any]] = {}
        self._look: Look | None = None
        self._handlers: dict[str, Callable[[Mapping[str, Any]], str]] = {}
        self._others, self._sent_others = OtherJobs(), OtherJobs()
        # Version of the last row sent for each job. Two dashboards of the same job number their
        # versions independently, so the id of the object is part of the version.
        self._sent: dict[str, tuple[int, int]] = {}
        self._is_whole_due = self._is_scan_requested = self._has_new_studies = False
        self._watched_until = self._scanned_at = float("-inf")
        self._threads: dict[str, threading.Thread] = {}
        self.num_errors = 0

    def serve(
        self,
        *,
        look: Look,
        attach: Callable[[str], str],
        template: Callable[[], str],
        compare: Callable[[Sequence[str]], str],
    ) -> None:
        """Set the functions that handle the requests of the panel.

        Args:
            look: Scans for other jobs and for clusters.
            attach: Attaches to a job by its ID, and returns the text of the answer.
            template: Returns a template cell.
            compare: Compares jobs, given their IDs, and returns an HTML page.
        """

        def compare_named(content: Mapping[str, Any]) -> str:
            job_ids = content.get("job_ids")
            return compare(list(map(str, job_ids)) if isinstance(job_ids, list) else [])

        with self._lock:
            self._look = look
            self._handlers = {
                "attach": lambda content: attach(str(content.get("job_id", ""))),
                "template": lambda content: template(),
                "compare": compare_named,
            }
        self._is_due.set()

    def add(self, job_id: str, job: Listed) -> None:
        """List a job, replacing any previous one with the same ID."""
        with self._lock:
            self._jobs.pop(job_id, None)
            self._jobs[job_id] = job
        self._is_due.set()

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Remove all jobs but these."""
        with self._lock:
            self._jobs = {k: job for k, job in self._jobs.items() if k in job_ids}
        self._is_due.set()

    def remove(self, job_id: str, job: Listed) -> None:
        """Remove a job, unless another one has replaced it."""
        with self._lock:
            # A job that was attached again has a new dashboard, and its old one closes later.
            if self._jobs.get(job_id) is job:
                del self._jobs[job_id]
        self._is_due.set()

    def put_study(self, study_id: str, row: Mapping[str, Any]) -> None:
        """List a study, replacing its previous row; see ``study_row``. Never blocks."""
        with self._lock:
            self._studies.pop(study_id, None)
            self._studies[study_id] = row
            if len(self._studies) > MAX_STUDIES:
                del self._studies[next(iter(self._studies))]
            self._has_new_studies = True
        self._is_due.set()

    def wake(self) -> None:
        """Schedule changed rows to be sent shortly. Never blocks."""
        self._is_due.set()

    def receive(self, content: Mapping[str, Any]) -> None:
        """Handle a message from a front end, on a kernel thread."""
        ask = content.get("ask")
        if ask not in ("watch", "look"):
            self._answer(str(ask), content)
            return
        with self._lock:
            self._watched_until = time.monotonic() + WATCHED_S
            # If the front end was reloaded since the last `watch`, it has no rows.
            self._is_whole_due = True
            self._is_scan_requested |= ask == "look"
            self._start("etrain-side-panel", self._run)
        self._is_due.set()

    def _answer(self, ask: str, content: Mapping[str, Any]) -> None:
        handler = self._handlers.get(ask)
        try:
            if handler is None:
                raise LookupError(
                    f"This kernel does not support the request {ask!r}. Nothing was done. "
                    "Run %load_ext etrain_jupyter in it, then retry."
                )
            text, level = handler(content), "info"
        except Exception as error:
            text, level = str(error), "error"
        to = str(content.get("view", ""))
        # Always answer, because the front end shows a progress indicator until it receives a reply.
        self._post({"tell": "answer", "to": to, "level": level, "text": text})

    def _start(self, name: str, work: Callable[[], None]) -> None:
        # The caller holds the lock, and a thread removes its name under the lock before it ends. A
        # `watch` therefore either finds a thread that will handle it, or starts a new one.
        if name not in self._threads:
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads[name] = thread
            thread.start()

    # --- the thread that sends rows ---

    def _run(self) -> None:
        while self._is_watched():
            # Clear it before building the rows, so that a change in the meantime sets it again.
            self._is_due.clear()
            with self._lock:
                is_late = time.monotonic() - self._scanned_at >= POLL_EVERY_S
                if self._look is not None and (is_late or self._is_scan_requested):
                    self._scanned_at = time.monotonic()
                    self._start("etrain-look-around", self._scan)
            try:
                self._send_rows()
            except Exception:
                self.num_errors += 1
            # The sleep limits the rate; the wait ends early if there is a change.
            time.sleep(ROWS_EVERY_S)
            with self._lock:
                until = min(self._watched_until, self._scanned_at + POLL_EVERY_S)
            self._is_due.wait(max(0.0, until - time.monotonic()))

    def _is_watched(self) -> bool:
        with self._lock:
            is_watched = time.monotonic() < self._watched_until
            if not is_watched:
                del self._threads["etrain-side-panel"]  # the next watch starts a new one
            return is_watched

    def _send_rows(self) -> None:
        with self._lock:
            jobs, sent = dict(self._jobs), self._sent
            is_whole, self._is_whole_due = self._is_whole_due, False
            has_new_studies, self._has_new_studies = self._has_new_studies, False
            studies, others = list(self._studies.values()), self._others
        # Do this outside the lock, because building a row acquires its dashboard's lock.
        gone = sorted(sent.keys() - jobs.keys())
        # Read the version before the row. A row may then be newer than its version and be sent
        # twice, but no change is missed.
        versions = {job_id: (id(job), job.version()) for job_id, job in jobs.items()}
        changed = [k for k in jobs if is_whole or versions[k] != sent.get(k)]
        has_new_others = others != self._sent_others
        if is_whole or changed or gone or has_new_others or has_new_studies:
            content = {"tell": "jobs", "whole": is_whole, "gone": gone}
            content["rows"] = [jobs[job_id].row() for job_id in changed]
            if is_whole or has_new_others:
                content |= {"others": others.others, "pools": others.pools}
            if is_whole or has_new_studies:
                content["studies"] = studies
            self._post(content)
        with self._lock:
            self._sent, self._sent_others = versions, others

    # --- the thread that scans ---

    def _scan(self) -> None:
        # A disk or bucket that does not respond may block this thread; no second thread is started.
        with self._lock:
            look, job_ids = self._look, tuple(self._jobs)
            is_asked, self._is_scan_requested = self._is_scan_requested, False
        try:
            if look is not None:
                found = look(job_ids, is_asked)
                if found.others is None:
                    found = replace(found, others=self._others.others)
                self._others = found
        except Exception:
            self.num_errors += 1
        finally:
            with self._lock:
                del self._threads["etrain-look-around"]
            self._is_due.set()


def row_of(view: JobView) -> dict[str, Any]:
    """Return ``snapshot`` without its lists and traceback, and ``loss`` as ``{x, y}``."""
    # Each job's row is sent up to twice per second, so it omits all parts that can become large.
    snapshot = view.snapshot()
    if snapshot.error is not None:
        snapshot = replace(snapshot, error=replace(snapshot.error, traceback=""))
    curve = view.curves.to_dict().get("loss")
    x, y = means(*curve, MAX_CURVE_POINTS) if curve else ((), ())
    return {
        "snapshot": snapshot.to_json(without=LONG_FIELDS),
        "loss": {
            "x": [round(float(step), 1) for step in x],
            # JSON has no NaN: null is a gap in the sparkline.
            "y": [float(f"{v:.4g}") if abs(v) < float("inf") else None for v in map(float, y)],
        },
    }
