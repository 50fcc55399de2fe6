"""A logger of another package runs in a process of its own, next to the coordinator."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from etrain_jupyter.errors import LoggerError
from etrain_jupyter.log.loggers.feed import LogFeed, writer_lock
from etrain_jupyter.log.loggers.process import follow_alone, follow_elsewhere
from etrain_jupyter.testing.logger_contract import JOB_ID, Job, MemoryLogger, MemoryRuns, losses
from tests.acme_package import install_acme, losses_of, rows_of

pytestmark = pytest.mark.usefixtures("acme")


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_acme(tmp_path / "site", monkeypatch)


@pytest.fixture
def ended(tmp_path: Path) -> Job:
    job = Job(tmp_path / JOB_ID)
    job.steps(range(1, 4))
    job.status("finished")
    return job


def test_logger_of_an_entry_point_runs_in_a_process_and_recovers(
    tmp_path: Path, ended: Job
) -> None:
    folder = tmp_path / "boards"
    folder.mkdir()
    (folder / "down").touch()
    warnings: list[str] = []

    thread = follow_elsewhere(
        "acme", {"folder": str(folder)}, ended.path, warnings.append, retry_s=0.1
    )
    thread.join(60)

    assert not thread.is_alive()
    assert warnings == ["OSError: acme is down"]
    assert losses_of(folder) == losses(1, 3)
    assert [row["number"] for row in rows_of(folder)] == [0, 1, 2]
    assert (folder / "status").read_text() == "finished"
    assert ended.path.with_name(".logger-acme.lock").exists()


def test_nothing_is_written_while_another_process_writes_the_job(
    tmp_path: Path, ended: Job
) -> None:
    runs = MemoryRuns()
    follow = functools.partial(follow_alone, "acme", ended.path)

    with writer_lock(ended.path, "acme", lambda: False):
        follow(LogFeed(ended.path, MemoryLogger(runs)), lambda: False)
        assert runs.opened == []
    follow(LogFeed(ended.path, MemoryLogger(runs)), lambda: False)

    assert [record.step for record in runs.records] == [1, 2, 3]


def test_lock_is_free_after_a_failure(ended: Job) -> None:
    runs = MemoryRuns(failures=[LoggerError("the server is down")])

    with pytest.raises(LoggerError, match="the server is down"):
        follow_alone("acme", ended.path, LogFeed(ended.path, MemoryLogger(runs)), lambda: False)

    with writer_lock(ended.path, "acme", lambda: False) as is_locked:
        assert is_locked


def test_process_that_cannot_start_its_logger_reports_why(ended: Job) -> None:
    warnings: list[str] = []

    follow_elsewhere("broken", {}, ended.path, warnings.append).join(60)

    [text] = warnings
    assert "the logger 'broken' (acme_etrain:Missing) cannot be imported: AttributeError" in text
