"""The studies of one scheduler next to those of another one, and the lease of a study."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import FencedError
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.plugins.search import folder as study_folder
from etrain_jupyter.plugins.search.folder import LEASE_FILE, StudyLease
from etrain_jupyter.plugins.search.optuna_study import OptunaStudy
from etrain_jupyter.plugins.search.service import Studies
from etrain_jupyter.plugins.search.spec import StudySpec, SubmitStudy
from etrain_jupyter.wire import requests as q
from tests.unit.plugins.search.test_driver import Host, private_state, spec_of
from tests.unit.pools.address.test_guest import rig, told

__all__ = ["private_state", "rig"]

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


# --- in a scheduler that others started ---


async def submit(at: Any, spec: StudySpec) -> q.Submitted:
    return await at.coordinator._handlers()[SubmitStudy](SubmitStudy(study=spec.to_message()))


async def test_study_keeps_the_scheduler_busy_until_etrain_is_removed(rig, tmp_path, monkeypatch):
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    rig.hello("w1")
    spec = spec_of(tmp_path)
    reply = await submit(rig, spec)
    assert reply == q.Submitted(job_id=spec.study_id)
    assert told(rig, "w1") == ["wake"]

    rig.scheduler.idle_since = 1.0
    rig.coordinator.tick()
    assert rig.scheduler.idle_since is None
    assert not StudyLease.is_free(spec.folder)

    await rig.coordinator._down(q.ShutDownCluster(drain_s=30.0))
    assert StudyLease.is_free(spec.folder)
    attributes = OptunaStudy(spec)._study.user_attrs
    assert attributes["ended_at"] > 0


async def test_study_whose_folder_is_missing_on_a_worker_is_refused(rig, tmp_path):
    rig.hello("w1")
    rig.scheduler.blind.add("tls://w1")
    spec = spec_of(tmp_path)

    with pytest.raises(RequestError, match=r"does not exist on w1.*Nothing was submitted"):
        await submit(rig, spec)

    assert StudyLease.is_free(spec.folder)


# --- the lease ---

HOLD = """
import sys
from pathlib import Path
from etrain_jupyter.plugins.search.folder import StudyLease
lease = StudyLease(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_second_scheduler_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "digits-1a2b3c4d"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as first:  # fmt: skip
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"

        with pytest.raises(FencedError) as caught:
            StudyLease(folder)

        first.kill()
        first.wait()
        StudyLease(folder).release()

    message = str(caught.value)
    assert message.startswith("study digits-1a2b3c4d is being run by another cluster (scheduler ")
    assert f"process {first.pid} on " in message
    assert "Nothing was started." in message


def test_released_lease_can_be_taken_again_and_its_holder_is_forgotten(tmp_path: Path) -> None:
    lease = StudyLease(tmp_path)
    lease.release()
    lease.release()

    assert (tmp_path / "study.lease").read_bytes() == b""
    again = StudyLease(tmp_path)
    with pytest.raises(FencedError):
        StudyLease(tmp_path)
    again.release()


def test_text_in_the_lease_is_read_until_it_is_cleared_and_keeps_the_size_of_the_file(
    tmp_path: Path,
) -> None:
    lease = StudyLease(tmp_path)
    assert StudyLease.read_trouble(tmp_path) == ""
    size = (tmp_path / "study.lease").stat().st_size

    lease.show("optuna.journal cannot be written: No space left on device")
    assert StudyLease.read_trouble(tmp_path) == (
        "optuna.journal cannot be written: No space left on device"
    )
    assert (tmp_path / "study.lease").stat().st_size == size, "a full disk has no room for more"
    with pytest.raises(FencedError, match=r"another cluster \(scheduler process \d+ on [^\n]+\)"):
        StudyLease(tmp_path)

    lease.show("")
    assert StudyLease.read_trouble(tmp_path) == ""
    lease.release()
