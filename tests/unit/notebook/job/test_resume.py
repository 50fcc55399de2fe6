"""Resuming from the kernel's side: who may, what is compared, what is written, what is said."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.bundle.capture import Bundle, capture_bundle
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import BundleError, ConfigError, EtrainError, PoolError
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import EarlyStopped, Event, JobPlanned, JobStatusChanged
from etrain_jupyter.notebook.job import open_jobs, resume
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.resume import ResumeRequest, resume_job
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools import SchedulerAddress
from etrain_jupyter.storage.checkpoints import LocalStore, Manifest
from etrain_jupyter.wire.requests import Request, SubmitJob, Submitted
from tests.unit.log.spent import made

ADDRESS = SchedulerAddress(address="tls://127.0.0.1:9", cluster_id="local-2", state_dir="/s2")
COMMON: dict[str, Any] = {"job_id": "j", "time": 1.0}
PLANNED = made(
    JobPlanned,
    **{"job_id": "j", "num_train_samples": 64, "global_batch_size": 32},
    **{"steps_per_epoch": 2, "total_steps": 6, "total_samples": 192},
)
KEYS: dict[str, Any] = {"model": "model", "data": {"train": "d"}, "loss": "f", "epochs": 3.0}


def f(x: int) -> int:
    return x + 1


def g(x: int) -> int:
    return x + 2


def config(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({**KEYS, **changes})


def bundle(**names: Any) -> Bundle:
    # Sent by value, as what a notebook defines is.
    made = {name: _of_notebook(value) for name, value in {"f": f, **names}.items()}
    return capture_bundle({"loss": "f"}, made)


def _of_notebook(function: Any) -> Any:
    scope: dict[str, Any] = {"__name__": "__main__"}
    text = f"def f(x):\n    return x + {function(0)}\n"
    exec(compile(text, "/tmp/ipykernel_1/1.py", "exec"), scope)
    return scope["f"]


class Coordinator:
    """Takes orders; or refuses them, with the exception in ``refusal``."""

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []
        self.refusal: Exception | None = None

    def open_link(self, address: SchedulerAddress) -> Coordinator:
        assert address == ADDRESS
        return self

    def call(self, request: SubmitJob, *, timeout: float) -> Submitted:
        if self.refusal is not None:
            raise self.refusal
        self.orders.append(request.job)
        return Submitted(job_id=request.job["job_id"])

    def send(self, request: Request[Any], *, timeout: float) -> Future[Any]:
        return Future()

    def release(self) -> None:
        pass


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    made = Coordinator()
    monkeypatch.setattr(resume, "open_link", made.open_link)
    return made


@pytest.fixture
def make(tmp_path: Path) -> Any:
    jobs: list[TrainingJob] = []

    def make_job(*events: Event, status: str = "stopped", **record: Any) -> TrainingJob:
        captured = bundle()
        store = RunStore(tmp_path / "runs")
        values = {
            "name": "digits",
            "created": 1.0,
            "cluster": {"cluster_id": "local-1", "address": "", "state_dir": "/s1"},
            "config": config().model_dump(mode="json"),
            "bundle_digest": captured.digest,
            "cwd": str(tmp_path),
            **record,
        }
        made = store.create(values, bundle=captured.data, job_id="j")
        with_end = [*events, JobStatusChanged(**COMMON, status=status)]
        log = EventLog(made.log_path)
        log.append(with_end)
        log.close()
        jobs.append(TrainingJob(made, None))
        return jobs[-1]

    yield make_job
    for job in jobs:
        job._feed.close()


Make = Callable[..., TrainingJob]


def go_on(job: TrainingJob, **changes: Any) -> str:
    return resume_job(job, ResumeRequest(**changes), address=ADDRESS)


def record_of(job: TrainingJob) -> RunRecord:
    return RunStore(job.record.folder.parent).find(job.id)


def save(folder: Path, step: int) -> None:
    store = LocalStore(folder)
    part = store.put_part(store.begin(step), "state.json", b"{}")
    store.commit(
        Manifest(
            step=step, job_id="j", generation=1, config_digest="", created=1.0, parts={"s": part}
        )
    )


def test_resume_order_has_the_job_and_its_changes(make: Make, coordinator: Coordinator) -> None:
    job = make()
    save(job.record.folder, 4)

    said = go_on(job, values={"max": 3})

    assert said == "resuming job j on cluster local-2, from the checkpoint at step 4"
    [order] = coordinator.orders
    assert (order["resumes"], order["job_id"], order["max_workers"]) == (True, "j", 3)
    assert (order["bundle_digest"], order["bundle_file"]) == (bundle().digest, "bundle")
    assert order["differs"] == ["workers.max: none -> 3"]
    assert order["cwd"] == job.record.cwd
    known = record_of(job)
    assert known.cluster == ADDRESS.to_dict()
    assert known.config["workers"]["max"] == 3
    assert known.bundle_path.read_bytes() == bundle().data
    assert job.record == known, "the variable of the notebook follows it"


def test_resume_without_a_checkpoint_reports_a_start_from_the_beginning(
    make: Make, coordinator: Coordinator
) -> None:
    said = go_on(make())

    assert "from the beginning: " in said
    assert "has no checkpoint yet" in said


def test_changed_code_is_named_and_requires_force(make: Make, coordinator: Coordinator) -> None:
    job = make()
    cell = {"config": config(), "bundle": bundle(f=g), "cell": "the cell"}

    with pytest.raises(ConfigError) as refused:
        go_on(job, **cell)

    assert "code of f" in str(refused.value)
    assert "--force" in refused.value.hint
    assert coordinator.orders == []
    go_on(job, **cell, is_forced=True)
    known = record_of(job)
    assert coordinator.orders[0]["is_forced"]
    assert known.bundle_path.read_bytes() == bundle(f=g).data
    assert hashlib.sha256(known.bundle_path.read_bytes()).hexdigest() == known.bundle_digest
    assert known.cell == "the cell"
    assert not job.record.folder.joinpath("bundle").exists(), "the old one is gone"


def test_changed_values_are_listed_with_the_reason(make: Make, coordinator: Coordinator) -> None:
    cell = {"config": config(seed=3, batch={"global": 8}), "bundle": bundle()}

    with pytest.raises(ConfigError) as refused:
        go_on(make(), **cell)

    for line in ("batch.global: 32 -> 8", "seed: 0 -> 3", "the sample order changes"):
        assert line in str(refused.value)


def test_refused_resume_leaves_the_job_unchanged(make: Make, coordinator: Coordinator) -> None:
    job = make()
    before = {path.name: path.read_bytes() for path in job.record.folder.iterdir()}
    coordinator.refusal = PoolError("the job's coordinator still runs")

    with pytest.raises(PoolError):
        go_on(job, config=config(), bundle=bundle(f=g), is_forced=True)

    assert {path.name: path.read_bytes() for path in job.record.folder.iterdir()} == before
    assert job.status == "stopped"


@pytest.mark.plugins
def test_job_is_not_resumed_on_a_pool_that_cannot_read_its_checkpoints(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make()
    entry = "spot: {kind: aws-spot, region: us-east-1, bucket: mine}\n"
    (tmp_path / "pools.yaml").write_text(entry)
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))

    with pytest.raises(ConfigError, match="that the machines of pool spot cannot read") as caught:
        resume_job(job, ResumeRequest(values={"pool": "spot"}))
    assert "checkpoint: {to: s3://mine/etrain/runs}" in caught.value.hint


def test_finished_job_requires_more_epochs(make: Make, coordinator: Coordinator) -> None:
    job = make(PLANNED, status="finished")

    with pytest.raises(ConfigError, match="has finished all of its 3 epochs") as refused:
        go_on(job)

    assert refused.value.hint == "%etrain resume j --epochs 6"
    go_on(job, values={"epochs": 4.0})
    assert coordinator.orders[0]["config"]["epochs"] == 4.0


def test_job_that_stopped_early_is_refused(make: Make, coordinator: Coordinator) -> None:
    stopped = EarlyStopped(
        **COMMON,
        **{"step": 4, "metric": "loss", "best": 0.1, "best_step": 1, "num_evals": 3},
        reason="loss did not improve",
    )
    job = make(PLANNED, stopped, status="finished")

    with pytest.raises(ConfigError, match="has finished early: loss did not improve"):
        go_on(job)


def test_running_job_is_refused(make: Make, coordinator: Coordinator) -> None:
    job = make(status="running")
    job._link = job._feed._link = coordinator  # type: ignore[assignment]

    with pytest.raises(EtrainError, match="is running at step 0: there is nothing to resume"):
        go_on(job)


def test_job_of_a_dead_cluster_is_resumed(make: Make, coordinator: Coordinator) -> None:
    job = make(status="running")
    assert job.status == "failed"
    assert job.lost == "its cluster has ended"

    go_on(job)

    assert job.lost == ""
    assert job.status == "running", "what the log says until the coordinator writes more"


def test_unreachable_cluster_requires_force(make: Make, coordinator: Coordinator) -> None:
    job = make(status="running")
    job._link = job._feed._link = coordinator  # type: ignore[assignment]
    assert job.status == "running"
    job._feed._contact.trouble = "no connection"

    with pytest.raises(EtrainError, match="does not respond"):
        go_on(job)

    go_on(job, is_forced=True)
    assert len(coordinator.orders) == 1


def test_folder_that_cannot_be_written_to_is_refused(
    make: Make, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make()
    # Root may write everywhere, whatever the mode of a folder says.
    monkeypatch.setattr(resume.os, "access", lambda path, mode: path != job.record.folder)

    with pytest.raises(EtrainError, match="is not writable"):
        go_on(job)

    assert coordinator.orders == []


def test_missing_or_changed_bundle_is_refused(make: Make, coordinator: Coordinator) -> None:
    job = make()
    job.record.bundle_path.write_bytes(b"something else")
    with pytest.raises(BundleError, match="has changed since job j was submitted"):
        go_on(job)

    job.record.bundle_path.unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        go_on(job)


def test_two_notebooks_cannot_resume_at_the_same_time(make: Make, coordinator: Coordinator) -> None:
    job = make()

    with resume._resume_lock(job.record), pytest.raises(EtrainError, match="by another notebook"):
        go_on(job)


def test_job_that_another_kernel_resumed_is_followed_again(
    make: Make, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make()
    assert job.wait(timeout=5) == "stopped"
    monkeypatch.setattr(open_jobs, "_held", {job.record.folder: job})
    monkeypatch.setattr(open_jobs, "link_of", lambda record: coordinator)
    assert open_jobs.hold(job.record) is job
    assert job.status == "stopped"
    log = EventLog(job.record.log_path)
    log.append([JobStatusChanged(**COMMON, status="running")])

    held = open_jobs.hold(dataclasses.replace(job.record, cluster=ADDRESS.to_dict()))

    assert held is job
    assert job.status == "running"
    log.close()
