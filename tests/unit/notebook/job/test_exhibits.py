"""Exhibits in a run folder or bucket that other users may write to."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import RunStoreError
from etrain_jupyter.log.events import Event, ExhibitsRemoved, ExhibitStored
from etrain_jupyter.log.exhibits import Table, encode_table, exhibit_key, write_exhibit
from etrain_jupyter.notebook.job.stored_exhibits import exhibits_of
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from tests.unit.log.pictures import png
from tests.unit.notebook.job.fakes import new_job, status

TABLE = encode_table(Table(("name", "loss"), (("a", 0.5), ("b", None))))


def stored(step: int, name: str, format: Any, data: bytes) -> ExhibitStored:
    return ExhibitStored(
        job_id="digits-1",
        time=2.0,
        step=step,
        name=name,
        format=format,
        size_bytes=len(data),
        digest=hashlib.sha256(data).hexdigest(),
    )


def job_with(tmp_path: Path, *exhibits: tuple[int, str, Any, bytes], **more: Event) -> TrainingJob:
    """Return an ended job with these exhibits and their files."""
    logged = [stored(*exhibit) for exhibit in exhibits]
    job = new_job(tmp_path, None, *logged, *more.values(), status("finished"))
    for event, (*_, data) in zip(logged, exhibits, strict=True):
        key = exhibit_key(step=event.step, name=event.name, format=event.format)
        write_exhibit(job.record.folder, key, data)
    return job


def test_exhibits_are_listed_and_loaded(tmp_path: Path) -> None:
    job = job_with(
        tmp_path,
        (20, "report", "text", b"good"),
        (10, "report", "text", b"bad"),
        (20, "curve", "png", png()),
        (20, "worst", "table", TABLE),
    )

    found = job.exhibits()

    assert [(one.step, one.name) for one in found] == [
        (10, "report"),
        (20, "curve"),
        (20, "report"),
        (20, "worst"),
    ]
    assert [one.load() for one in found] == [
        "bad",
        png(),
        "good",
        [{"name": "a", "loss": 0.5}, {"name": "b", "loss": None}],
    ]
    assert [one.step for one in job.exhibits("report")] == [10, 20]
    assert [one._repr_png_() for one in found] == [None, png(), None, None]
    assert repr(found[0]) == (
        "Exhibit(step=10, name='report', format='text', size_bytes=3, time=2.0)"
    )


def test_removed_exhibits_are_not_listed(tmp_path: Path) -> None:
    removed = ExhibitsRemoved(job_id="digits-1", time=3.0, step=10, files=[], reason="old")
    job = job_with(
        tmp_path, (10, "report", "text", b"bad"), (20, "report", "text", b"good"), removed=removed
    )

    assert [one.step for one in job.exhibits()] == [20]


@pytest.mark.parametrize("name", ["../../job", "a/b", ""])
def test_event_with_an_invalid_name_is_skipped(tmp_path: Path, name: str) -> None:
    job = new_job(tmp_path, None, stored(10, name, "text", b"x"), status("finished"))

    assert job.exhibits() == []


def test_event_with_an_unknown_format_is_skipped(tmp_path: Path) -> None:
    job = new_job(tmp_path, None, stored(10, "page", "html", b"x"), status("finished"))

    assert job.exhibits() == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"evil", r"report.txt of job digits-1 differs from the log: it has 4 bytes"),
        (b"longer", r"differs from the log: it has 6 bytes, and 4 bytes with another SHA-256"),
        (None, r"exhibits/step_00000010/report.txt of job digits-1 does not exist in /.*\.$"),
    ],
)
def test_changed_or_missing_file_is_not_displayed(
    tmp_path: Path, data: bytes | None, message: str
) -> None:
    job = job_with(tmp_path, (10, "report", "text", b"good"))
    path = job.record.folder / "exhibits" / "step_00000010" / "report.txt"
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    [exhibit] = job.exhibits()

    with pytest.raises(RunStoreError, match=message):
        exhibit.load()


def test_file_that_is_not_of_its_format_is_not_displayed(tmp_path: Path) -> None:
    [exhibit] = job_with(tmp_path, (10, "curve", "png", b"<svg onload='alert(1)'/>")).exhibits()

    with pytest.raises(RunStoreError, match=r"curve.png of job digits-1 is not a PNG. It is not"):
        exhibit.load()


def test_link_to_another_file_is_not_followed(tmp_path: Path) -> None:
    job = job_with(tmp_path, (10, "report", "text", b"good"))
    path = job.record.folder / "exhibits" / "step_00000010" / "report.txt"
    (tmp_path / "secret").write_bytes(b"good")
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    [exhibit] = job.exhibits()

    with pytest.raises(RunStoreError, match="it is a symbolic link, which is not followed"):
        exhibit.load()


def test_exhibit_in_a_bucket_is_read_unless_this_machine_has_it(
    tmp_path: Path, s3_bucket: str
) -> None:
    url = f"s3://{s3_bucket}/runs/digits-1"
    job = job_with(tmp_path, (10, "report", "text", b"good"), (20, "report", "text", b"done"))
    record = dataclasses.replace(job.record, place=url)
    local, remote = exhibits_of(record, [stored(n, "report", "text", d) for n, d in PAIRS])
    path = job.record.folder / "exhibits" / "step_00000020" / "report.txt"
    path.write_bytes(b"old")  # from an earlier attempt on this machine

    assert local.load() == "good"
    with pytest.raises(RunStoreError, match="It may not be uploaded yet: try again"):
        remote.load()
    RunObjects(url).put("exhibits/step_00000020/report.txt", b"done")
    assert remote.load() == "done"


PAIRS = [(10, b"good"), (20, b"done")]
