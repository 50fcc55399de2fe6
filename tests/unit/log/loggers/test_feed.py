"""A feed passes a log to a logger, continues after failures, and reports them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from etrain_jupyter.errors import ConfigError, LoggerError
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import JobStatusChanged, JobSubmitted
from etrain_jupyter.log.loggers.base import RunInfo, Values
from etrain_jupyter.log.loggers.feed import LogFeed, export_log, follow_log, writer_lock
from etrain_jupyter.log.loggers.process import follow_with_retries
from etrain_jupyter.testing.logger_contract import JOB_ID, Job, MemoryLogger, MemoryRuns, losses


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / JOB_ID)


def stored_losses(runs: MemoryRuns) -> list[tuple[int, float]]:
    return [(r.step, r.values["train/loss"]) for r in runs.records if isinstance(r, Values)]


def follow_quickly(feed: LogFeed, is_wanted: object) -> None:
    follow_log(feed, lambda: True, poll_s=0.01, linger_s=0.0)


def test_run_is_described_by_the_log(job: Job) -> None:
    runs = MemoryRuns()
    job.steps([1])

    export_log(job.path, MemoryLogger(runs))

    [run] = runs.opened
    assert (run.job_id, run.name, run.created) == (JOB_ID, "digits", 1_700_000_000.0)
    assert run.config["optimizer"] == {"name": "Adam", "lr": 0.25}
    assert runs.status is None  # the job has not ended


def test_log_without_events_opens_no_run(tmp_path: Path) -> None:
    runs = MemoryRuns()

    assert export_log(tmp_path / "events.jsonl", MemoryLogger(runs)) is None
    assert runs.opened == []


def test_revision_counts_the_returns_and_is_replayed_without_undone_steps(job: Job) -> None:
    runs = MemoryRuns()
    job.steps(range(1, 4))
    job.restored(1, num_undone=2)
    job.steps(range(2, 4), loss=0.25)
    job.restored(2, num_undone=1)

    export_log(job.path, MemoryLogger(runs))

    assert [run.revision for run in runs.opened] == [2]
    assert stored_losses(runs) == [*losses(1, 1), *losses(2, 2, loss=0.25)]


def test_feed_follows_a_job_through_a_resume_until_its_end(job: Job) -> None:
    runs = MemoryRuns()
    feed = LogFeed(job.path, MemoryLogger(runs))
    thread = threading.Thread(target=follow_quickly, args=(feed, None))
    job.steps(range(1, 10))
    thread.start()
    job.steps(range(10, 50))
    job.status("finished")
    thread.join(60)

    assert not thread.is_alive()
    assert stored_losses(runs) == losses(1, 49)
    assert runs.status == "finished"


def test_feed_ends_when_it_is_not_wanted_and_leaves_the_run_open(job: Job) -> None:
    runs = MemoryRuns()
    job.steps([1])

    follow_log(LogFeed(job.path, MemoryLogger(runs)), lambda: False)

    assert stored_losses(runs) == losses(1, 1)
    assert runs.status is None


def follow_to_the_end(
    job: Job, runs: MemoryRuns, *, tries_after_end: int
) -> tuple[bool, list[str]]:
    """Follow a job without pauses; return whether all was written, and the warnings."""
    warnings: list[str] = []
    is_done = follow_with_retries(
        lambda: LogFeed(job.path, MemoryLogger(runs)),
        lambda: True,
        warnings.append,
        retry_s=0.0,
        tries_after_end=tries_after_end,
        follow=follow_quickly,
    )
    return is_done, warnings


def test_failed_destination_is_retried_and_nothing_is_lost(job: Job) -> None:
    down = LoggerError("the server is down")
    runs = MemoryRuns(failures=[down, down, KeyError("odd")])
    job.steps(range(1, 6))
    job.status("finished")

    is_done, warnings = follow_to_the_end(job, runs, tries_after_end=4)

    assert is_done
    assert warnings == ["the server is down", "KeyError: 'odd'"]
    assert stored_losses(runs) == losses(1, 5)
    assert runs.status == "finished"


def test_destination_that_stays_down_is_given_up_after_the_end(job: Job) -> None:
    runs = MemoryRuns(failures=[LoggerError("the server is down")] * 9)
    job.steps(range(1, 6))
    job.status("finished")

    is_done, warnings = follow_to_the_end(job, runs, tries_after_end=3)

    assert not is_done
    assert len(runs.failures) == 9 - 3
    assert warnings == ["the server is down"]


def test_library_that_the_scheduler_lacks_is_reported_without_retries(job: Job) -> None:
    warnings: list[str] = []

    def make_feed() -> LogFeed:
        raise ConfigError("log.to: acme needs the package acme", hint="pip install acme")

    is_done = follow_with_retries(make_feed, lambda: True, warnings.append)

    assert not is_done
    assert warnings == ["log.to: acme needs the package acme"]


def test_destination_that_never_opens_is_given_up_after_the_end(job: Job) -> None:
    class Closed(MemoryLogger):
        def open(self, run: RunInfo) -> int:
            raise LoggerError("the server is down")

    job.status("finished")
    warnings: list[str] = []

    is_done = follow_with_retries(
        lambda: LogFeed(job.path, Closed(MemoryRuns())), lambda: True, warnings.append, retry_s=0.0
    )

    assert not is_done
    assert warnings == ["the server is down"]


def test_job_id_that_could_leave_the_folder_is_rejected(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", fsync_every_s=None)
    values = {"name": "digits", "min_workers": 1, "max_workers": 2}
    log.append([JobSubmitted(job_id="../../other", time=1.0, **values)])
    log.close()

    with pytest.raises(LoggerError, match="is not a valid job id"):
        export_log(tmp_path / "events.jsonl", MemoryLogger(MemoryRuns()))


def test_damaged_log_without_a_submission_opens_no_run(tmp_path: Path) -> None:
    runs = MemoryRuns()
    log = EventLog(tmp_path / "events.jsonl", fsync_every_s=None)
    log.append([JobStatusChanged(job_id="digits-1", time=1.0, status="stopped")])
    log.close()

    assert export_log(tmp_path / "events.jsonl", MemoryLogger(runs)) == "stopped"
    assert runs.opened == []


def test_second_writer_waits_for_the_first_one(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    is_waiting, results = threading.Event(), list[bool]()

    def is_wanted() -> bool:
        is_waiting.set()
        return True

    def write() -> None:
        with writer_lock(log, "mlflow", is_wanted) as is_locked:
            results.append(is_locked)

    with writer_lock(log, "mlflow", lambda: False) as is_locked:
        assert is_locked
        thread = threading.Thread(target=write)
        thread.start()
        assert is_waiting.wait(60)
        assert results == []
    thread.join(60)

    assert results == [True]


def test_writer_that_is_not_wanted_any_more_stops_waiting(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"

    with (
        writer_lock(log, "mlflow", lambda: False) as first,
        writer_lock(log, "mlflow", lambda: False) as second,
        writer_lock(log, "wandb", lambda: False) as other,
    ):
        assert (first, second, other) == (True, False, True)


def test_name_of_a_logger_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    with writer_lock(folder / "events.jsonl", "../../other", lambda: False) as is_locked:
        assert is_locked

    assert [path.name for path in folder.iterdir()] == [".logger-.._.._other.lock"]


def test_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / ".logger-mlflow.lock").symlink_to(target)

    with writer_lock(tmp_path / "events.jsonl", "mlflow", lambda: False) as is_locked:
        assert is_locked  # without a lock, as in a folder that cannot be written

    assert not target.exists()
