from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter import __version__
from etrain_jupyter.bundle.capture import Bundle
from etrain_jupyter.config import TrainConfig
from etrain_jupyter.errors import JobLostError, JobNotFoundError, PoolError, RunStoreError
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import JobStatusChanged
from etrain_jupyter.notebook.job import open_jobs
from etrain_jupyter.notebook.job.link import NoAnswerError
from etrain_jupyter.notebook.job.open_jobs import attach, name_of_model, submit_job
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools import SchedulerAddress
from etrain_jupyter.wire.requests import Request, SubmitJob, Submitted
from etrain_jupyter.wire.versions import read_fingerprint

DIGEST = hashlib.sha256(b"objects").hexdigest()
ADDRESS = SchedulerAddress(address="tls://127.0.0.1:1", cluster_id="local-1", state_dir="/s")


@pytest.fixture(autouse=True)
def _nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_jobs, "_held", {})
    monkeypatch.setattr(open_jobs, "_used", {})


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What coordinators were given; put an exception in to have them refuse."""
    orders: list[Any] = []

    class FakeLink:
        def __init__(self, address: SchedulerAddress) -> None:
            assert address == ADDRESS

        def call(self, request: SubmitJob, *, timeout: float) -> Submitted:
            if orders and isinstance(orders[-1], Exception):
                raise orders[-1]
            orders.append(request.job)
            return Submitted(job_id=request.job["job_id"])

        def send(self, request: Request[Any], *, timeout: float) -> Future[Any]:
            return Future()

        def release(self) -> None:
            pass

    monkeypatch.setattr(open_jobs, "open_link", FakeLink)
    return orders


def submit(store: RunStore, **keys: Any) -> TrainingJob:
    values = {"model": "nets.small:Net", "data": {"train": "d"}, "loss": "f"} | keys
    config = TrainConfig.model_validate(values)
    bundle = Bundle(digest=DIGEST, parts=(memoryview(b"objects"),), sizes={})
    return submit_job(config, bundle, address=ADDRESS, store=store, cell="model: x")


def test_submitted_job_is_in_the_store_and_at_the_coordinator(
    tmp_path: Path, orders: list[dict[str, Any]]
) -> None:
    job = submit(RunStore(tmp_path), workers={"min": 1, "max": 3})

    record = json.loads((tmp_path / job.id / "job.json").read_text())
    assert record["cluster"] == ADDRESS.to_dict()
    assert (record["cell"], record["bundle_digest"]) == ("model: x", DIGEST)
    assert record["version"] == __version__
    assert orders[0] == {
        "job_id": job.id,
        "name": "net",
        "run_dir": str(tmp_path / job.id),
        "config": record["config"],
        "bundle_digest": DIGEST,
        "bundle_size": 7,
        "bundle_file": "bundle",
        "pool": "local",
        "cwd": str(Path.cwd()),
        "min_workers": 1,
        "max_workers": 3,
        "fingerprint": read_fingerprint(),
        "pool_s": 0.0,
        "notes": [],
    }
    assert TrainConfig.model_validate(record["config"]).model == "nets.small:Net"


def test_relative_checkpoint_path_starts_in_the_notebooks_folder(
    tmp_path: Path, orders: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    submit(RunStore(tmp_path), checkpoint={"to": "kept"})

    assert orders[0]["config"]["checkpoint"]["to"] == str(tmp_path / "kept")


def test_refused_job_leaves_no_folder(tmp_path: Path, orders: list[Any]) -> None:
    orders.append(PoolError("no room"))

    with pytest.raises(PoolError, match="no room"):
        submit(RunStore(tmp_path))

    assert list(tmp_path.iterdir()) == []


def test_folder_is_kept_if_it_is_unknown_whether_the_job_started(
    tmp_path: Path, orders: list[Any]
) -> None:
    orders.append(JobLostError("connection reset"))

    with pytest.raises(JobLostError):
        submit(RunStore(tmp_path))

    assert len(RunStore(tmp_path).records()) == 1


def test_folder_stays_when_the_submit_times_out(tmp_path: Path, orders: list[Any]) -> None:
    orders.append(NoAnswerError("no answer to SubmitJob within 120 s"))

    with pytest.raises(JobLostError, match="may or may not have been submitted") as caught:
        submit(RunStore(tmp_path))

    [record] = RunStore(tmp_path).records()
    assert f"%etrain attach {record.job_id}" in str(caught.value)


def test_attach_returns_the_existing_object(tmp_path: Path, orders: list[dict[str, Any]]) -> None:
    store = RunStore(tmp_path)
    first, second = submit(store, name="a"), submit(store, name="b")

    assert attach(store=store) is second
    assert attach("a", store=store) is first
    assert attach(store=store) is first


def test_attach_without_a_name_finds_the_newest_of_the_store(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for name, created in (("old", 1.0), ("new", 2.0)):
        record = store.create({"name": name, "created": created})
        log = EventLog(record.log_path, fsync_every_s=None)
        log.append([JobStatusChanged(job_id=record.job_id, time=1.0, status="finished")])
        log.close()

    assert attach(store=store).name == "new"
    with pytest.raises(JobNotFoundError):
        attach("none", store=store)


def test_jobs_lists_the_newest_first_and_changes_nothing(
    tmp_path: Path, orders: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETRAIN_RUNS", str(tmp_path))
    first, second = submit(RunStore(), name="a"), submit(RunStore(), name="b")
    attach("a")

    assert open_jobs.jobs() == [second, first]
    assert attach() is first


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("Net(hidden=128)", "net"),
        ("nn.Sequential(nn.Linear(2, 2))", "sequential"),
        ("models.resnet:ResNet18", "resnet18"),
        ("[Net][0]", "job"),
    ],
)
def test_name_comes_from_the_models_expression(expression: str, name: str) -> None:
    assert name_of_model(expression) == name


def test_job_whose_folder_cannot_be_written_is_refused_with_a_reason(
    tmp_path: Path, orders: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review R1: a full disk was a bare OSError in the cell."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunStore, "create", fail)
    with pytest.raises(
        RunStoreError, match=r"No space left on device\. Nothing was submitted\. Free"
    ):
        submit(RunStore(tmp_path))
    assert orders == []
