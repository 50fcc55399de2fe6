"""The studies of one scheduler next to those of another one."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.head.studies.studies import Studies
from etrain_jupyter.storage import study_folder
from etrain_jupyter.storage.study_folder import LEASE_FILE, StudyLease
from tests.unit.head.studies.test_driver import Host, private_state, spec_of

__all__ = ["private_state"]

pytestmark = pytest.mark.usefixtures("private_state")


class EndingHost(Host):
    """Starts no job: the study is stopped before that."""

    def __init__(self) -> None:
        super().__init__(None)
        self.is_ready = False


def test_study_of_another_cluster_is_refused_until_that_one_has_ended(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)

    async def submit_twice() -> str:
        first, second = Studies(EndingHost()), Studies(EndingHost())
        first.replay(tmp_path / "a")
        second.replay(tmp_path / "b")
        first.submit(spec)
        with pytest.raises(RequestError) as caught:
            second.submit(spec)
        assert not second.is_active
        assert not list((tmp_path / "b").glob("studies/*"))
        assert first.is_active
        first.stop(spec.study_id)
        driver = first._drivers[spec.study_id]
        driver._host.is_ready = True  # type: ignore[misc]
        await driver.task
        second.submit(spec)
        second._drivers[spec.study_id].task.cancel()
        await asyncio.gather(*(d.task for d in second._drivers.values()), return_exceptions=True)
        return str(caught.value)

    assert "is being run by another cluster" in asyncio.run(submit_twice())


def test_lease_is_free_only_while_no_scheduler_runs_the_study(tmp_path: Path) -> None:
    assert StudyLease.is_free(tmp_path), "no scheduler has run it yet"

    lease = StudyLease(tmp_path)
    assert not StudyLease.is_free(tmp_path)
    assert not StudyLease.is_free(tmp_path), "looking does not release it"

    lease.release()
    assert StudyLease.is_free(tmp_path)
    StudyLease(tmp_path).release()
    assert not StudyLease.is_free(tmp_path / LEASE_FILE), "unknown: this is not a folder"


def test_lease_is_taken_although_a_reader_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StudyLease(tmp_path).release()
    reader = os.open(tmp_path / LEASE_FILE, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    # The reader closes the file while the scheduler waits.
    monkeypatch.setattr(study_folder.time, "sleep", lambda _: os.close(reader))

    StudyLease(tmp_path).release()


def test_restarted_scheduler_leaves_a_study_that_another_cluster_has_resumed(
    tmp_path: Path,
) -> None:
    spec = spec_of(tmp_path)

    async def restart() -> Studies:
        dead = Studies(EndingHost())
        dead.replay(tmp_path / "a")
        dead._record(spec)
        successor = Studies(EndingHost())
        successor.replay(tmp_path / "a")
        assert successor.is_active
        successor.start()
        return successor

    lease = StudyLease(spec.folder)  # held by the other cluster
    successor = asyncio.run(restart())
    lease.release()

    assert not successor.is_active
    assert list((tmp_path / "a" / "studies").glob("*")) == []
