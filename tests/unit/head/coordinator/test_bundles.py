"""A bundle reaches the head as a file, in pieces where it must, and leaves it in pieces (R6)."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from etrain_jupyter.bundle.restore import CHUNK_BYTES
from etrain_jupyter.errors import JobLostError, PoolError
from etrain_jupyter.head.coordinator import bundles
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.log.events import LogLine
from etrain_jupyter.notebook.job import handover
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q
from tests.unit.head.coordinator.rig import BUNDLE, Rig

DIGEST = hashlib.sha256(BUNDLE).hexdigest()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(bundles, "CHUNK_BYTES", 7)
    return Rig(tmp_path, monkeypatch)


def order_in(folder: Path, **values: Any) -> dict[str, Any]:
    facts = {"bundle_digest": DIGEST, "bundle_size": len(BUNDLE), "bundle_file": "bundle"}
    return {"job_id": "j", "name": "j", "run_dir": str(folder), "config": {}, **facts, **values}


async def test_head_without_access_to_the_file_requests_it_in_pieces(
    rig: Rig, tmp_path: Path
) -> None:
    coordinator, order = rig.coordinator, order_in(tmp_path / "j")
    requests = coordinator._kernel_requests
    assert await requests.submit(q.SubmitJob(job=order)) == q.Submitted(wants_bundle=True)
    assert coordinator._jobs == {}
    assert not (tmp_path / "j").exists(), "nothing is left if nobody comes back"
    for first in range(0, len(BUNDLE), 5):
        piece = q.PutBundle(job=order, offset=first, data=BUNDLE[first : first + 5])
        await requests.put_bundle(piece)
    assert await requests.submit(q.SubmitJob(job=order)) == q.Submitted(job_id="j")
    path = tmp_path / "j" / "bundle"
    assert path.read_bytes() == BUNDLE
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(path.parent.glob(".bundle*"))


async def test_invalid_or_incomplete_pieces_leave_no_file(rig: Rig, tmp_path: Path) -> None:
    order, put = order_in(tmp_path / "j"), rig.coordinator._kernel_requests.put_bundle
    with pytest.raises(RequestError, match="the received bytes do not match its digest"):
        await put(q.PutBundle(job=order, offset=0, data=bytes(len(BUNDLE))))
    assert list((tmp_path / "j").iterdir()) == []
    await put(q.PutBundle(job=order, offset=0, data=BUNDLE[:5]))
    await rig.coordinator.close()
    assert list((tmp_path / "j").iterdir()) == [], "a kernel that died in the midst of it"


async def test_file_name_that_is_not_a_bundle_is_refused(rig: Rig, tmp_path: Path) -> None:
    for name in ("../x", "job.json", "bundle/../x"):
        piece = q.PutBundle(job=order_in(tmp_path, bundle_file=name), offset=0, data=b"x")
        with pytest.raises(RequestError, match="is not the name of a bundle file"):
            await rig.coordinator._kernel_requests.put_bundle(piece)
    assert not (tmp_path / "x").exists()


async def fetch(rig: Rig, digest: str, offset: int) -> q.BundlePiece:
    return await rig.coordinator._kernel_requests.read_bundle(
        q.FetchBundle(digest=digest, offset=offset)
    )


async def test_workers_get_pieces_of_an_active_jobs_bundle(rig: Rig) -> None:
    await rig.start("w1")
    found, offset = b"", 0
    while data := (await fetch(rig, DIGEST, offset)).data:
        assert len(data) <= 7
        found, offset = found + data, offset + len(data)
    assert found == BUNDLE
    with pytest.raises(RequestError, match=r"^no active job has the bundle ab$"):
        await fetch(rig, "ab", 0)


async def test_launch_order_names_the_bundle_and_the_end_of_the_job_removes_it(rig: Rig) -> None:
    await rig.start("w1", "w2")
    [start] = rig.orders("w1", m.LaunchTrainer)
    path = str(rig.folder / "j" / "bundle")
    assert start.bundle == m.BundleRef(digest=DIGEST, size=len(BUNDLE), path=path)
    assert rig.orders("w1", m.RemoveBundle) == []
    await rig.control("stop", {"now": True})
    for worker in ("w1", "w2"):
        assert [o.digest for o in rig.orders(worker, m.RemoveBundle)] == [DIGEST]


async def test_end_of_one_job_keeps_an_equal_bundle_of_another_job(rig: Rig) -> None:
    await rig.start("w1")
    await rig.submit(job_id="k", run_dir=str(rig.folder / "k"))
    await rig.control("stop", {"now": True})
    assert rig.orders("w1", m.RemoveBundle) == []


async def test_crash_is_handled_although_the_bundle_is_missing(rig: Rig) -> None:
    await rig.start("w1", "w2")
    (rig.folder / "j" / "bundle").unlink()
    rig.tell("w1", m.TrainerExited, cause="trainer 7 was killed by SIGSEGV")
    assert not any("Traceback" in event.text for event in rig.events(LogLine))
    assert "w1" not in [m.worker for m in rig.job.state.in_phase("ranked")]


# --- the kernel's side ---


class Scheduler:
    """Answers as a coordinator that does not see the kernel's disk."""

    def __init__(self, *, takes: bool = True) -> None:
        self.received = b""
        self.largest = 0
        self._takes = takes

    def call(self, request: q.Request[q.R], *, timeout: float = 10.0) -> q.R:
        reply: q.Done | q.Submitted = q.Done()
        match request:
            case q.PutBundle():
                assert request.offset == len(self.received)
                self.received += request.data
                self.largest = max(self.largest, len(request.data))
            case q.SubmitJob():
                is_here = self._takes and len(self.received) == request.job["bundle_size"]
                reply = q.Submitted(job_id="j") if is_here else q.Submitted(wants_bundle=True)
            case _:
                raise AssertionError(request)
        return cast("q.R", reply)

    def send(self, request: q.Request[q.R], *, timeout: float = 10.0) -> Future[q.R]:
        raise NotImplementedError

    def release(self) -> None: ...


def test_kernel_sends_the_file_in_bounded_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "CHUNK_BYTES", 10)
    assert CHUNK_BYTES <= 4 << 20
    (tmp_path / "bundle").write_bytes(BUNDLE)
    scheduler = Scheduler()
    handover.hand_over(scheduler, order_in(tmp_path), tmp_path / "bundle")
    assert (scheduler.received, scheduler.largest) == (BUNDLE, 10)


def test_scheduler_that_still_requests_the_sent_bundle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(BUNDLE)
    with pytest.raises(PoolError, match="but cannot read them") as caught:
        handover.hand_over(Scheduler(takes=False), order_in(tmp_path), tmp_path / "bundle")
    assert not isinstance(caught.value, JobLostError)
