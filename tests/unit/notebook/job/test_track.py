"""The log of a running or ended job is written to a logger from the notebook."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import ConfigError, LoggerError
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import Event, JobRestored, JobSubmitted, StepCompleted
from etrain_jupyter.log.loggers.feed import writer_lock
from etrain_jupyter.notebook.job import track
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from tests.acme_package import install_acme, losses_of
from tests.unit.log.spent import made
from tests.unit.notebook.job.fakes import FakeLink, status

BOARDS = Path("boards")
OWN = {"to": {"acme": {"folder": "boards"}}}


@pytest.fixture(autouse=True)
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_acme(tmp_path / "site", monkeypatch)
    monkeypatch.chdir(tmp_path)


def step(number: int, loss: float) -> StepCompleted:
    values: dict[str, Any] = {"lr": 0.25, "world_size": 2, "samples_per_s": 10.0}
    return made(StepCompleted, job_id="digits-1", step=number, loss=loss, **values)


def make_job(
    *events: Event,
    log: dict[str, Any] | None = None,
    is_running: bool = False,
    is_own: bool = True,
) -> TrainingJob:
    """Return a job with these events and this ``log`` in its cell."""
    values = {"name": "digits", "created": 1.0, "config": {"model": "Net()", "log": log or {}}}
    record = RunStore(Path("runs")).create(values, job_id="digits-1")
    if not is_own:
        record = dataclasses.replace(record, signature="")
    written = EventLog(record.log_path, fsync_every_s=None)
    submitted = JobSubmitted(
        job_id="digits-1", time=1.0, name="digits", min_workers=1, max_workers=2
    )
    written.append([submitted, *events])
    written.close()
    return TrainingJob(record, FakeLink() if is_running else None)


def test_ended_job_is_written_once(tmp_path: Path) -> None:
    undone = JobRestored(job_id="digits-1", time=1.0, generation=2, step=1, num_undone=1)
    job = make_job(step(1, 0.5), step(2, 0.75), undone, step(2, 0.25), status("finished"))

    first = job.track("acme", folder="boards")
    again = job.track("acme", folder="boards")

    assert first == again == "digits-1 (finished) is in acme (folder: boards)"
    assert losses_of(BOARDS) == [(1, 0.5), (2, 0.25)]
    assert (BOARDS / "status").read_text() == "finished"


def test_loggers_of_the_job_are_the_default() -> None:
    job = make_job(step(1, 0.5), status("finished"), log=OWN)

    assert job.track() == "digits-1 (finished) is in acme (folder: boards)"
    assert job.track("acme") == job.track()
    assert losses_of(BOARDS) == [(1, 0.5)]


def test_running_job_is_written_up_to_now_and_later_continued() -> None:
    job = make_job(step(1, 0.5), status("running"), is_running=True)

    assert job.track("acme", folder="boards").startswith("digits-1 (running)")

    assert losses_of(BOARDS) == [(1, 0.5)]
    assert (BOARDS / "status").read_text() == "None"
    log = EventLog(job.record.log_path, fsync_every_s=None)
    log.append([step(2, 0.25)])
    log.close()
    job.track("acme", folder="boards")
    assert losses_of(BOARDS) == [(1, 0.5), (2, 0.25)]


def test_logger_that_the_scheduler_already_writes_to_is_refused() -> None:
    job = make_job(step(1, 0.5), status("running"), is_running=True, log=OWN)

    with pytest.raises(ConfigError, match="is running, and its scheduler writes to acme") as caught:
        job.track()

    assert caught.value.hint == "wait for its end: %etrain wait"
    assert not BOARDS.exists()


def test_record_of_another_user_does_not_choose_the_destination() -> None:
    job = make_job(step(1, 0.5), status("finished"), is_own=False, log=OWN)

    with pytest.raises(ConfigError, match="has no loggers of its own"):
        job.track()
    with pytest.raises(ConfigError, match="acme needs a folder"):
        job.track("acme")

    assert not BOARDS.exists()
    assert job.track("acme", folder="mine") == "digits-1 (finished) is in acme (folder: mine)"


def test_bad_requests_are_errors() -> None:
    job = make_job(step(1, 0.5), status("finished"))

    with pytest.raises(ConfigError, match="no loggers of its own") as caught:
        job.track()
    assert caught.value.hint == "name one: %etrain track --to tensorboard"
    with pytest.raises(ConfigError, match="unknown logger 'acmee'") as caught:
        job.track("acmee")
    assert caught.value.hint == "did you mean 'acme'?"


def test_options_without_a_logger_are_an_error() -> None:
    job = make_job(step(1, 0.5), status("finished"), log=OWN)

    with pytest.raises(ConfigError, match="options belong to one logger"):
        job.track(folder="other")


def test_failed_destination_says_that_the_log_is_complete() -> None:
    job = make_job(step(1, 0.5), status("finished"))
    BOARDS.mkdir()
    (BOARDS / "down").touch()

    with pytest.raises(LoggerError, match=r"acme failed: acme is down\. The log of job digits-1"):
        job.track("acme", folder="boards")

    job.track("acme", folder="boards")
    assert losses_of(BOARDS) == [(1, 0.5)]


def test_another_process_that_still_writes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "LOCK_TIMEOUT_S", 0.0)
    job = make_job(step(1, 0.5), status("finished"))

    with (
        writer_lock(job.record.log_path, "acme", lambda: False),
        pytest.raises(LoggerError, match="Another process still writes job digits-1 to acme"),
    ):
        job.track("acme", folder="boards")

    assert not BOARDS.exists()


@pytest.mark.parametrize("word", ["experiment", "=digits", "a b=c", "x=1"])
def test_option_that_is_not_a_new_pair_is_an_error(word: str) -> None:
    with pytest.raises(ConfigError, match="this is not a new KEY=VALUE"):
        track.parse_options(["x=0", word])
