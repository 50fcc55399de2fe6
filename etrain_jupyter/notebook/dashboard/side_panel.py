"""What JupyterLab's side panel, status bar and palette are told of this kernel.

They ask with ``watch``, again every now and then, and for as long as they do they are told, at most
twice a second: ``rows``, one for each job that is followed here and has changed (all of them when
``whole``), ``gone``, the ids of those that are not any more, and now and then ``others`` (jobs that
run and could be followed) and ``pools`` (clusters that are up). Any other question has a name of
its own in ``view`` and gets one ``answer`` addressed ``to`` it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

ROWS_EVERY_S = 0.5
LOOK_EVERY_S = 20.0
"""How often it is looked for other jobs and for pools."""
WATCHED_S = 120.0
"""How long a ``watch`` holds; a page that is in the background asks once a minute."""


@dataclass(frozen=True, kw_only=True)
class OtherJobs:
    """What there is besides the jobs that this kernel follows."""

    others: tuple[Mapping[str, Any], ...] | None = ()
    """Jobs that run, each with job_id, name, status, step, total_steps and world_size; None if it
    was not looked for them: what was known of them holds."""
    pools: tuple[Mapping[str, Any], ...] = ()
    """Clusters that are up, each with pool, cluster_id, workers, idle_s, ends_in_s and time."""


class Listed(Protocol):
    """A job that is followed here: the dashboard, shown or not."""

    def version(self) -> int:
        """Return a number that grows with each change."""

    def row(self) -> dict[str, Any]:
        """Return its row, see ``row.row_of``."""


Look = Callable[[Collection[str], bool], OtherJobs]
"""Called with the ids of the followed jobs, and whether a person asked for it just now."""


class SidePanel:
    """Tells whoever watches, from one background thread that ends when nobody does.

    Args:
        post: Sends a message to the browsers.

    Attributes:
        num_errors: How often looking or telling failed; it is counted, never raised.
    """

    def __init__(self, post: Callable[[dict[str, Any]], None]) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._is_due = threading.Event()
        self._jobs: dict[str, Listed] = {}
        self._look: Look | None = None
        self._questions: dict[str, Callable[[Mapping[str, Any]], str]] = {}
        self._surroundings, self._told_surroundings = OtherJobs(), OtherJobs()
        self._told: dict[str, tuple[int, int]] = {}
        self._is_whole_due = self._is_asked = False
        self._watched_until = self._looked_at = float("-inf")
        self._threads: dict[str, threading.Thread] = {}
        self.num_errors = 0

    def serve(
        self,
        *,
        look: Look,
        attach: Callable[[str], str],
        template: Callable[[], str],
    ) -> None:
        """Say how to look around, how to follow another job by its id, and what a cell begins as.

        ``attach`` and ``template`` return what the browser is answered.
        """
        with self._lock:
            self._look = look
            self._questions = {
                "attach": lambda content: attach(str(content.get("job_id", ""))),
                "template": lambda content: template(),
            }
        self._is_due.set()

    def add(self, job_id: str, job: Listed) -> None:
        """List a job; one that is listed already is replaced."""
        with self._lock:
            self._jobs.pop(job_id, None)
            self._jobs[job_id] = job
        self._is_due.set()

    def keep_only(self, job_ids: Collection[str]) -> None:
        """List no job but these any more."""
        with self._lock:
            self._jobs = {k: job for k, job in self._jobs.items() if k in job_ids}
        self._is_due.set()

    def remove(self, job_id: str, job: Listed) -> None:
        """List a job no more, unless it is another one's by now."""
        with self._lock:
            if self._jobs.get(job_id) is job:
                del self._jobs[job_id]
        self._is_due.set()

    def wake(self) -> None:
        """Say that a row has changed; never blocks."""
        self._is_due.set()

    def receive(self, content: Mapping[str, Any]) -> None:
        """Take a message of a browser's; runs on a thread of the kernel's."""
        ask = content.get("ask")
        if ask in ("watch", "look"):
            self._watch(is_asked=ask == "look")
        else:
            self._answer(str(ask), content)

    def _answer(self, ask: str, content: Mapping[str, Any]) -> None:
        question = self._questions.get(ask)
        try:
            if question is None:
                raise LookupError(
                    f"this kernel cannot be asked for {ask!r}. Nothing was done. "
                    "Run %load_ext etrain_jupyter in it, and try again."
                )
            text, level = question(content), "info"
        except Exception as error:
            text, level = str(error), "error"
        to = str(content.get("view", ""))
        self._post({"tell": "answer", "to": to, "level": level, "text": text})

    def _watch(self, *, is_asked: bool) -> None:
        with self._lock:
            self._watched_until = time.monotonic() + WATCHED_S
            self._is_whole_due = True
            self._is_asked |= is_asked
            self._start("etrain-side-panel", self._run)
        self._is_due.set()

    def _start(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread of that name, if there is none; under the lock."""
        if name not in self._threads:
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads[name] = thread
            thread.start()

    # The thread that tells.

    def _run(self) -> None:
        while self._is_watched():
            self._is_due.clear()
            with self._lock:
                if self._is_time_to_look():
                    self._looked_at = time.monotonic()
                    self._start("etrain-look-around", self._look_around)
            try:
                self._tell()
            except Exception:
                self.num_errors += 1
            time.sleep(ROWS_EVERY_S)
            self._is_due.wait(self._patience_s())

    def _is_watched(self) -> bool:
        with self._lock:
            is_watched = time.monotonic() < self._watched_until
            if not is_watched:
                del self._threads["etrain-side-panel"]  # the next watch starts another one
            return is_watched

    def _patience_s(self) -> float:
        with self._lock:
            until = min(self._watched_until, self._looked_at + LOOK_EVERY_S)
        return max(0.0, until - time.monotonic())

    def _tell(self) -> None:
        with self._lock:
            jobs, told = dict(self._jobs), self._told
            is_whole, self._is_whole_due = self._is_whole_due, False
            surroundings = self._surroundings
        gone = sorted(told.keys() - jobs.keys())
        versions = {job_id: (id(job), job.version()) for job_id, job in jobs.items()}
        changed = [k for k in jobs if is_whole or versions[k] != told.get(k)]
        is_news = surroundings != self._told_surroundings
        if is_whole or changed or gone or is_news:
            content = {"tell": "jobs", "whole": is_whole, "gone": gone}
            content["rows"] = [jobs[job_id].row() for job_id in changed]
            if is_whole or is_news:
                content |= {"others": surroundings.others, "pools": surroundings.pools}
            self._post(content)
        with self._lock:
            self._told, self._told_surroundings = versions, surroundings

    # The thread that looks around.

    def _is_time_to_look(self) -> bool:
        is_late = time.monotonic() - self._looked_at >= LOOK_EVERY_S
        return self._look is not None and (is_late or self._is_asked)

    def _look_around(self) -> None:
        """Look once; it may take as long as a disk or a bucket that does not answer."""
        with self._lock:
            look, job_ids = self._look, tuple(self._jobs)
            is_asked, self._is_asked = self._is_asked, False
        try:
            if look is not None:
                found = look(job_ids, is_asked)
                if found.others is None:
                    found = replace(found, others=self._surroundings.others)
                self._surroundings = found
        except Exception:
            self.num_errors += 1
        finally:
            with self._lock:
                del self._threads["etrain-look-around"]
            self._is_due.set()
