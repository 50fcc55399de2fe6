"""Every run store passes the shipped contract."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import Event
from etrain_jupyter.notebook.job import followed_job
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.runs import S3RunStore
from etrain_jupyter.storage.bucket_log.chain import Chain
from etrain_jupyter.storage.bucket_log.local_copy import LogCopy
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.storage.bucket_log.uploads import Uploads, claim
from etrain_jupyter.testing.run_store_contract import RunStoreContract
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from tests.s3_folder import S3Folder


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeout of a job for its log: a faulty bucket is slow on a busy machine."""
    monkeypatch.setattr(followed_job, "CATCH_UP_S", 120.0)
    monkeypatch.setattr(followed_job, "GLANCE_S", 120.0)


def append(record: RunRecord, events: Sequence[Event]) -> None:
    log = EventLog(record.log_path)
    log.append(events)
    log.close()


class FolderPlace:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.held: list[EventLog] = []

    def open(self, machine: str = "here") -> RunStore:
        return RunStore(self.root)

    def list_keys(self) -> set[str]:
        paths = (path for path in self.root.rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix() for path in paths}

    def write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def take(self, record: RunRecord, end: int) -> None:
        self.held.append(EventLog(record.log_path))

    def log(self, record: RunRecord, events: Sequence[Event]) -> None:
        append(record, events)


class TestFolder(RunStoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> FolderPlace:
        return FolderPlace(tmp_path / "runs")


class BucketPlace(S3Folder):
    def __init__(
        self, server: S3Server, bucket: str, folder: Path, patch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(server, f"s3://{bucket}/mine/runs")
        self.folder, self.patch = folder, patch
        self._numbers = itertools.count(1)
        self._uploads: dict[str, Uploads] = {}

    def open(self, machine: str = "here") -> S3RunStore:
        self.patch.setenv("ETRAIN_STATE", str(self.folder / machine))
        return S3RunStore(f"s3://{self.bucket}/{self.prefix}")

    def take(self, record: RunRecord, end: int) -> None:
        # Each claim comes from another machine that has read the log up to the same end.
        number = next(self._numbers)
        chain = Chain(RunObjects(record.place))
        path = self.folder / f"taker{number}" / record.job_id / "events.jsonl"
        claim(LogCopy(chain, path), chain, job_id=record.job_id, end=end)

    def log(self, record: RunRecord, events: Sequence[Event]) -> None:
        append(record, events)
        uploads = self._uploads.get(record.place)
        if uploads is None:
            chain = Chain(RunObjects(record.place))
            uploads = Uploads(chain, record.log_path, writer="one", seq=0)
            self._uploads[record.place] = uploads
        while uploads.upload():
            pass
        uploads.beat()


class TestBucket(RunStoreContract):
    @pytest.fixture
    def place(
        self, s3_server: S3Server, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> BucketPlace:
        return BucketPlace(s3_server, s3_bucket, tmp_path, monkeypatch)


class TestBucketWithFaults(RunStoreContract):
    """The same contract with faults that retries must handle."""

    @pytest.fixture
    def place(
        self,
        s3_server: S3Server,
        s3_bucket: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        no_pauses: None,
    ) -> BucketPlace:
        s3_server.set_faults(
            S3Fault(kind="slow_down", every=13),
            S3Fault(kind="slow", every=17, seconds=0.02),
            S3Fault(kind="reset", every=19),
            S3Fault(kind="lose_answer", every=11),
            S3Fault(kind="truncate", every=23),
        )
        return BucketPlace(s3_server, s3_bucket, tmp_path, monkeypatch)
