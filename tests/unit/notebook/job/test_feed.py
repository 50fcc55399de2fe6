from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import JobLostError, PoolError
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import Event, JobStatusChanged, LogLine
from etrain_jupyter.notebook.job import contact
from etrain_jupyter.notebook.job import feed as feed_module
from etrain_jupyter.notebook.job.feed import EventFeed
from etrain_jupyter.notebook.job.link import ClusterEndedError, NoAnswerError, UnreachableError
from etrain_jupyter.wire import requests as q


def batch(*events: Event, trouble: str = "") -> q.EventBatch:
    return q.EventBatch(events=tuple(event.to_json_dict() for event in events), trouble=trouble)


class FakeLink:
    """A coordinator without a network: a script answers, or the test itself."""

    def __init__(self, *answers: list[Event] | Exception) -> None:
        self.questions: queue.Queue[tuple[q.FetchEvents, Future[q.EventBatch]]] = queue.Queue()
        self.asked_since: list[int] = []
        self.num_releases = 0
        self._script = list(answers)

    def send(self, request: q.Request[Any], *, timeout: float = 10.0) -> Future[Any]:
        assert isinstance(request, q.FetchEvents)
        self.asked_since.append(request.since)
        future: Future[q.EventBatch] = Future()
        if not self._script:
            self.questions.put((request, future))
            return future
        answer = self._script.pop(0)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(batch(*answer))
        return future

    def call(self, request: q.Request[Any], *, timeout: float = 10.0) -> Any:
        return self.send(request, timeout=timeout).result(timeout)

    def release(self) -> None:
        self.num_releases += 1


def line(seq: int) -> Event:
    return LogLine(
        job_id="j", time=float(seq), seq=seq, level="info", worker="", text=f"line {seq}"
    )


def end(seq: int) -> Event:
    return JobStatusChanged(job_id="j", time=float(seq), seq=seq, status="finished")


class Recorder:
    """A listener that keeps what it got and lets a test wait for a sequence number."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()
        self._came = threading.Condition()

    def __call__(self, events: list[Event]) -> None:
        with self._came:
            self.batches.append([event.seq for event in events])
            self.threads.add(threading.current_thread().name)
            self._came.notify_all()

    @property
    def seqs(self) -> list[int]:
        return [seq for batch in self.batches for seq in batch]

    def wait_for(self, seq: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: seq in self.seqs, timeout=5), self.batches


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "RETRY_S", 0.01)
    monkeypatch.setattr(contact, "RETRY_MAX_S", 0.02)
    monkeypatch.setattr(feed_module, "AFTERWARDS_S", 0.01)
    monkeypatch.setattr(feed_module, "LINGER_S", 0.1)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog(tmp_path / "events.jsonl", fsync_every_s=None)
    yield log
    log.close()


def follow(link: FakeLink | None, path: Path) -> tuple[EventFeed, Recorder]:
    recorder = Recorder()
    feed = EventFeed("j", path, link, recorder)
    feed.start()
    return feed, recorder


def assert_no_thread_is_left() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("etrain-feed"):
            thread.join(5)
            assert not thread.is_alive()


def test_history_comes_from_the_log_and_the_rest_from_the_coordinator(log: EventLog) -> None:
    log.append([line(0), line(0), line(0)])
    link = FakeLink([line(4)], [line(5), end(6)], [])

    feed, recorder = follow(link, log.path)

    assert feed.ended.wait(5)
    assert_no_thread_is_left()
    assert recorder.seqs == [1, 2, 3, 4, 5, 6]
    assert link.asked_since == [3, 4, 6]
    assert link.num_releases == 1


def test_without_a_readable_log_everything_comes_from_the_coordinator(tmp_path: Path) -> None:
    link = FakeLink([line(1), line(2)], [end(3)], [])

    feed, recorder = follow(link, tmp_path / "none")

    assert feed.ended.wait(5)
    assert recorder.seqs == [1, 2, 3]
    assert link.asked_since[0] == 0


def test_copy_of_a_log_is_complete_only_after_the_response_of_the_coordinator(
    log: EventLog,
) -> None:
    log.append([line(0)])
    link, recorder = FakeLink(), Recorder()
    feed = EventFeed("j", log.path, link, recorder, is_copy=True)
    feed.start()
    _, response = link.questions.get(timeout=5)

    assert recorder.seqs == [1]
    assert not feed.caught_up.is_set()
    response.set_result(batch(line(2)))

    assert feed.wait_until_caught_up(5)
    assert recorder.seqs == [1, 2]
    feed.close()


def test_duplicates_are_dropped_and_a_gap_is_requested_again(tmp_path: Path) -> None:
    link = FakeLink([line(1), line(2)], [line(2), line(3), line(5)], [line(4), line(5), end(6)], [])

    feed, recorder = follow(link, tmp_path / "none")

    assert feed.ended.wait(5)
    assert recorder.seqs == [1, 2, 3, 4, 5, 6]
    assert link.asked_since[:3] == [0, 2, 3]


def test_log_that_has_ended_needs_no_coordinator(log: EventLog) -> None:
    log.append([line(0), end(0)])
    link = FakeLink()

    feed, recorder = follow(link, log.path)

    assert feed.ended.wait(5)
    assert recorder.seqs == [1, 2]
    assert link.asked_since == []
    assert feed.lost == ""


def test_log_lines_after_the_end_are_delivered(tmp_path: Path) -> None:
    link = FakeLink([end(1)], [line(2)], [])

    _, recorder = follow(link, tmp_path / "none")
    recorder.wait_for(2)

    assert_no_thread_is_left()
    assert recorder.seqs == [1, 2]


def test_feed_survives_single_broken_connections(tmp_path: Path) -> None:
    link = FakeLink(
        [line(1)], UnreachableError("reset"), [line(2)], UnreachableError("reset"), [end(3)], []
    )

    feed, recorder = follow(link, tmp_path / "none")

    assert feed.ended.wait(5)
    assert (recorder.seqs, feed.lost) == ([1, 2, 3], "")


def test_unresponsive_scheduler_is_retried(tmp_path: Path) -> None:
    link = FakeLink(*[PoolError("no answer")] * 10, [end(1)], [])

    feed, recorder = follow(link, tmp_path / "none")

    assert feed.ended.wait(5)
    assert (recorder.seqs, feed.lost) == ([1], "")


def test_unreachable_scheduler_is_reported_once_and_retried(log: EventLog) -> None:
    log.append([line(0), JobStatusChanged(job_id="j", time=1.0, status="running")])
    silence = [NoAnswerError("no answer"), *[UnreachableError("cannot be reached")] * 30]
    link = FakeLink(*silence)
    feed, recorder = follow(link, log.path)
    said: queue.Queue[Event] = queue.Queue()
    feed.subscribe(lambda events: [said.put(event) for event in events] and None)
    request, question = link.questions.get(timeout=5)
    told = [said.get(timeout=5) for _ in range(3)]

    assert not feed.ended.is_set()
    assert (feed.lost, feed.trouble) == ("", told[-1].reason)
    assert [(event.seq, event.kind) for event in told[1:]] == [(2, told[1].kind), (0, told[1].kind)]
    assert told[-1].status == "running"
    assert re.fullmatch(
        r"its scheduler cannot be reached, last seen \d\d:\d\d:\d\d, retrying", feed.trouble
    )
    assert request.wait_s == 0.0, "its return must be seen at once"

    question.set_result(batch(line(3)))
    recorder.wait_for(3)
    _, question = link.questions.get(timeout=5)

    assert (said.get(timeout=5).seq, feed.trouble) == (3, "")
    back = said.get(timeout=5)
    assert (back.status, back.reason) == ("running", "")
    question.set_result(batch(end(4)))
    assert feed.ended.wait(5)
    assert recorder.seqs == [1, 2, 3, 4]
    feed.close()


def test_log_that_ends_during_an_outage_clears_the_trouble(log: EventLog) -> None:
    log.append([line(0)])
    link = FakeLink(*[UnreachableError("cannot be reached")] * 3)
    feed, recorder = follow(link, log.path)
    _, question = link.questions.get(timeout=5)
    assert feed.trouble
    log.append([end(0)])
    question.set_exception(UnreachableError("cannot be reached"))
    assert feed.ended.wait(5)
    assert_no_thread_is_left()
    late = Recorder()

    feed.subscribe(late)
    late.wait_for(2)

    assert (late.batches, feed.trouble, feed.lost) == ([[1, 2]], "", "")
    assert recorder.seqs == [1, 2]


def test_feed_closed_during_an_outage_does_not_restart(tmp_path: Path) -> None:
    link = FakeLink(*[UnreachableError("cannot be reached")] * 3)
    feed, _ = follow(link, tmp_path / "none")
    _, question = link.questions.get(timeout=5)
    is_held, is_free = threading.Event(), threading.Event()

    def hold(_: list[Event]) -> None:
        is_held.set()
        is_free.wait(5)

    feed.subscribe(hold)
    assert is_held.wait(5)
    feed.close()
    question.set_exception(UnreachableError("cannot be reached"))
    is_free.set()

    assert_no_thread_is_left()
    assert link.questions.empty()


def test_listener_added_during_an_outage_is_notified(tmp_path: Path) -> None:
    link = FakeLink(*[UnreachableError("cannot be reached")] * 3)
    feed, _ = follow(link, tmp_path / "none")
    link.questions.get(timeout=5)
    late = Recorder()

    feed.subscribe(late)
    late.wait_for(0)

    assert late.batches == [[0]]
    assert feed.caught_up.is_set(), "whoever asks must not wait for a scheduler that is silent"
    feed.close()


def test_job_unknown_to_the_scheduler_is_lost_after_the_log_is_read(
    log: EventLog,
) -> None:
    log.append([line(0)])
    link = FakeLink()
    feed, recorder = follow(link, log.path)
    _, first = link.questions.get(timeout=5)
    log.append([line(0), line(0)])

    first.set_exception(JobLostError("no job j here"))
    _, second = link.questions.get(timeout=5)
    second.set_exception(JobLostError("no job j here"))

    assert feed.ended.wait(5)
    assert feed.lost == "no job j here"
    # The 0 is the farewell to the listeners, which no log has.
    assert recorder.seqs == [1, 2, 3]
    assert [event.seq for event in feed.events()] == [1, 2, 3]


def test_cluster_that_is_known_to_have_ended_is_not_asked_again(log: EventLog) -> None:
    log.append([line(0)])
    link = FakeLink(ClusterEndedError("its cluster has ended. Run the cell again."))

    feed, recorder = follow(link, log.path)

    assert feed.ended.wait(5)
    assert feed.lost == "its cluster has ended"
    assert recorder.seqs == [1]
    assert len(link.asked_since) == 1


def test_listeners_are_notified_that_the_cluster_has_ended(log: EventLog) -> None:
    log.append([line(0)])
    came: queue.Queue[Event] = queue.Queue()
    feed, _ = follow(None, log.path)
    feed.subscribe(lambda events: [came.put(event) for event in events] and None)

    assert came.get(timeout=5).seq == 1
    farewell = came.get(timeout=5)

    assert isinstance(farewell, JobStatusChanged)
    assert (farewell.status, farewell.seq) == ("failed", 0)
    assert farewell.reason == "its cluster has ended"


def test_log_that_ends_while_the_cluster_disappears_is_read_completely(log: EventLog) -> None:
    link = FakeLink()
    feed, recorder = follow(link, log.path)
    _, first = link.questions.get(timeout=5)
    log.append([line(0), end(0)])

    first.set_exception(UnreachableError("gone"))
    _, second = link.questions.get(timeout=5)
    second.set_exception(UnreachableError("gone"))

    assert feed.ended.wait(5)
    assert (recorder.seqs, feed.lost) == ([1, 2], "")


def test_job_without_a_cluster_is_lost_at_once(log: EventLog) -> None:
    log.append([line(0)])

    feed, recorder = follow(None, log.path)

    assert feed.ended.wait(5)
    assert recorder.seqs == [1]
    assert feed.lost == "its cluster has ended"


def test_listener_gets_the_whole_history_then_each_batch_once(tmp_path: Path) -> None:
    link = FakeLink([line(1), line(2)])
    feed, first = follow(link, tmp_path / "none")
    _, waiting = link.questions.get(timeout=5)
    late = Recorder()

    feed.subscribe(late)
    late.wait_for(2)
    waiting.set_result(batch(line(3)))
    late.wait_for(3)

    assert late.batches == [[1, 2], [3]]
    assert late.threads == {"etrain-feed-j"}
    assert first.seqs == [1, 2, 3]
    feed.close()
    assert_no_thread_is_left()


def test_listener_after_the_end_gets_the_history_and_leaves_no_thread(log: EventLog) -> None:
    log.append([line(0), end(0)])
    feed, _ = follow(None, log.path)
    assert_no_thread_is_left()
    late = Recorder()

    feed.subscribe(late)
    late.wait_for(2)

    assert late.batches == [[1, 2]]
    assert_no_thread_is_left()


def test_exception_in_a_listener_is_counted_and_does_not_affect_others(tmp_path: Path) -> None:
    def bad(events: list[Event]) -> None:
        raise ValueError("no screen")

    link = FakeLink()
    feed, _ = follow(link, tmp_path / "none")
    _, waiting = link.questions.get(timeout=5)
    good = Recorder()
    feed.subscribe(bad)
    feed.subscribe(good)
    waiting.set_result(batch(line(1), end(2)))

    good.wait_for(2)
    assert feed.ended.wait(5)

    assert feed._known.num_errors == 2
    assert isinstance(feed._known.last_error, ValueError)


def test_unknown_events_of_a_newer_version_leave_no_gap(tmp_path: Path) -> None:
    link = FakeLink()
    feed, recorder = follow(link, tmp_path / "none")
    _, waiting = link.questions.get(timeout=5)

    unknown = {"event": "MoonRose", "job_id": "j", "time": 1.0, "seq": 1}
    waiting.set_result(q.EventBatch(events=(unknown, end(2).to_json_dict())))

    assert feed.ended.wait(5)
    assert recorder.seqs == [1, 2]


def test_listeners_are_notified_that_following_failed(log: EventLog) -> None:
    log.append([line(0)])

    def fail(_: object) -> None:
        raise LookupError("no such column")

    heard: list[Event] = []
    feed = EventFeed("j", log.path, FakeLink(), fail)
    has_history = feed.subscribe(heard.extend)

    assert has_history.wait(5)
    assert "LookupError: no such column" in feed.lost
    assert isinstance(heard[-1], JobStatusChanged)
    assert (heard[-1].status, heard[-1].reason) == ("failed", feed.lost)
    assert feed.ended.is_set()


# --- a coordinator that cannot write the log (review R1) ---


def running() -> Event:
    return JobStatusChanged(job_id="j", time=1.0, status="running")


def test_log_trouble_is_reported_to_listeners_until_it_is_over(
    log: EventLog,
) -> None:
    log.append([running()])
    link, reasons = FakeLink(), []
    feed = EventFeed("j", log.path, link, fold=lambda events: None)
    feed.subscribe(lambda batch: reasons.append([getattr(e, "reason", "") for e in batch]))

    for trouble in ("", "the disk is full", "it is still full", ""):
        _, question = link.questions.get(timeout=10)
        question.set_result(batch(trouble=trouble))
    _, last = link.questions.get(timeout=10)

    assert reasons == [[""], ["the disk is full"], [""]]
    assert feed.log_trouble == ""
    last.set_result(batch(end(2)))
    assert feed.ended.wait(10)
    feed.close()


def test_first_read_of_a_job_includes_log_trouble(log: EventLog) -> None:
    log.append([running()])
    link = FakeLink()
    feed = EventFeed("j", log.path, link, fold=lambda events: None)
    feed.start()
    assert feed.wait_until_caught_up(10)
    asked, question = link.questions.get(timeout=10)
    assert asked.wait_s == 0.0  # it does not wait for an event, which will not come
    question.set_result(batch(trouble="the disk is full"))
    feed.wait_until_responded(10)
    assert feed.log_trouble == "the disk is full"
    feed.close()


def test_failed_write_of_a_local_log_copy_is_retried(tmp_path: Path) -> None:
    """Review R2: a full disk of the watching machine ended the feed, and the job looked lost."""
    full = OSError(28, "No space left on device")
    link = FakeLink(full, full, full, [line(1), end(2)], [])
    feed, recorder = follow(link, tmp_path / "none")
    assert feed.ended.wait(10)
    assert feed.lost == ""
    assert [seq for seq in recorder.seqs if seq] == [1, 2]
