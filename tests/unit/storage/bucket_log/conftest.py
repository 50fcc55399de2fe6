"""A job's place in a bucket, and machines with a copy of its log each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import Event, JobStatusChanged, StepCompleted
from etrain_jupyter.storage.bucket_log.chain import Chain
from etrain_jupyter.storage.bucket_log.local_copy import LogCopy
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.storage.bucket_log.uploads import Uploads
from etrain_jupyter.testing.s3_server import S3Server
from tests.s3_folder import S3Folder
from tests.unit.log.spent import PLAIN_STEP

JOB = "digits-0a1b2c3d"


def step(number: int, *, time: float = 1.0) -> Event:
    return StepCompleted(
        job_id=JOB,
        time=time,
        generation=1,
        step=number,
        epoch=0,
        first=0,
        samples=4,
        sample_checksum=number,
        loss=1 / number,
        lr=0.1,
        world_size=2,
        samples_per_s=9.0,
        **PLAIN_STEP,
    )


def status(word: str) -> Event:
    return JobStatusChanged(job_id=JOB, time=1.0, status=word)


def upload_all(uploads: Uploads) -> None:
    while uploads.upload():
        pass
    uploads.pack()


class Machine:
    """Something that has a copy of the log."""

    def __init__(self, folder: Path, url: str) -> None:
        self.chain = Chain(RunObjects(url, patience_s=2.0))
        self.path = folder / JOB / "events.jsonl"
        self.copy = LogCopy(self.chain, self.path)

    def write(self, *events: Event) -> None:
        log = EventLog(self.path)
        log.append(events)
        log.close()

    @functools.cached_property
    def uploads(self) -> Uploads:
        return Uploads(self.chain, self.path, writer=self.path.parent.parent.name, seq=0)

    def publish(self, *events: Event) -> None:
        """Write events and upload everything, as a coordinator does."""
        self.write(*events)
        upload_all(self.uploads)

    @property
    def lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines() if self.path.exists() else []


@pytest.fixture
def url(s3_bucket: str) -> str:
    return f"s3://{s3_bucket}/runs/{JOB}"


@pytest.fixture
def stored(s3_server: S3Server, url: str) -> S3Folder:
    return S3Folder(s3_server, url)


@pytest.fixture
def machine(tmp_path: Path, url: str) -> Callable[[str], Machine]:
    return lambda name: Machine(tmp_path / name, url)
