"""What a notebook or a terminal sees of jobs that lie in a bucket."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter import launch
from etrain_jupyter.bundle.capture import Bundle
from etrain_jupyter.cli import main
from etrain_jupyter.config import TrainConfig
from etrain_jupyter.errors import ConfigError, EtrainError, JobLostError, RunStoreError
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import (
    Event,
    JobPlanned,
    JobResumed,
    JobStatusChanged,
    JobSubmitted,
    LogLine,
)
from etrain_jupyter.notebook.commands.doctor import examine
from etrain_jupyter.notebook.commands.log_lines import follow_lines
from etrain_jupyter.notebook.job import open_jobs, store_link
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.link import UnreachableError
from etrain_jupyter.notebook.job.plan import Plan
from etrain_jupyter.notebook.job.resume import ResumeRequest, resume_job
from etrain_jupyter.notebook.job.run_store import RunStore, absolute_paths
from etrain_jupyter.notebook.job.runs import S3RunStore, open_runs
from etrain_jupyter.notebook.job.store_link import StoreLink
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools.local import LocalPool
from etrain_jupyter.storage.bucket_log.chain import Chain
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.storage.bucket_log.uploads import Uploads
from etrain_jupyter.testing.run_store_contract import create, story
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server

COMMON: dict[str, Any] = {"job_id": "digits-1", "time": 1.0}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_pauses: None) -> None:
    monkeypatch.setattr(open_jobs, "_held", {})
    monkeypatch.setattr(open_jobs, "_used", {})
    monkeypatch.setattr(store_link, "POLL_S", 0.05)
    monkeypatch.setattr(store_link, "HEARTBEAT_CHECK_S", 0.0)
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "here"))


@pytest.fixture
def runs(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"s3://{s3_bucket}/runs"
    monkeypatch.setenv("ETRAIN_RUNS", url)
    return url


@pytest.fixture
def coordinator(runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    return Coordinator(runs, tmp_path, monkeypatch)


class Coordinator:
    """The machine that trains: it writes the log of ``digits-1``."""

    def __init__(self, runs: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        with patch.context() as there:
            there.setenv("ETRAIN_STATE", str(folder / "there"))
            self.record = create(S3RunStore(runs))
        chain = Chain(RunObjects(self.record.place))
        self.uploads = Uploads(chain, self.record.log_path, writer="there", seq=0)

    def log(self, *events: Event, has_ended: bool = False) -> None:
        log = EventLog(self.record.log_path)
        log.append(events)
        log.close()
        while self.uploads.upload():
            pass
        self.uploads.beat(has_ended=has_ended)


@pytest.fixture
def here(coordinator: Coordinator) -> Iterator[TrainingJob]:
    """The job as another machine sees it."""
    record = open_runs().find("digits-1")
    job = TrainingJob(record, StoreLink(record))
    yield job
    job._feed.close()


def status(word: str) -> Event:
    return JobStatusChanged(**COMMON, status=word)


def await_running(job: TrainingJob) -> None:
    """Wait until the job is followed; on a busy machine, the first reads take seconds."""
    while job.status != "running" or not job.is_reachable:
        time.sleep(0.02)


# --- which store ---


def test_variable_and_flag_choose_the_store(runs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(open_runs()) == runs
    assert isinstance(open_runs("s3://other/x/"), S3RunStore)
    assert str(open_runs("s3://other/x/")) == "s3://other/x"
    assert type(open_runs("folder")) is RunStore
    assert main(["ls"]) == 0
    assert capsys.readouterr().out == f"No jobs in {runs}.\n"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "names no bucket"),
        ("s3://key:secret@bucket/x", "contains credentials"),
        ("s3://bucket/../x", "has an empty name, '.' or '..'"),
        ("gs://bucket", "'gs://bucket' is neither a folder nor a bucket"),
    ],
)
def test_invalid_store_url_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_runs(url)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "s3://bucket/prefix" in caught.value.hint


def test_checkpoints_in_a_bucket_keep_their_url() -> None:
    config = {"checkpoint": {"to": "s3://bucket/mine"}}
    assert absolute_paths(config) == config


# --- submitting ---


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no_bucket", "there is no such bucket. Create it, or correct ETRAIN_RUNS"),
        ("deny", "access denied"),
        ("expire", "the credentials have expired"),
        ("ignore_conditions", "ignores the condition If-None-Match and overwrites"),
    ],
)
def test_unwritable_store_is_reported_before_anything_is_started(
    runs: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, fault: Any, words: str
) -> None:
    monkeypatch.setattr(LocalPool, "up", lambda self: pytest.fail("the pool was started"))
    config = TrainConfig.model_validate({"model": "f", "data": {"train": "d"}, "loss": "f"})
    bundle = Bundle(digest="d", parts=(), sizes={})
    plan = Plan(config=config, bundle=bundle, pool=LocalPool(), runs=open_runs())
    s3_server.set_faults(S3Fault(kind=fault))
    with pytest.raises(RunStoreError) as caught:
        launch.submit(plan)
    assert words in str(caught.value)
    assert "next checkpoint" not in str(caught.value)
    assert "worker" not in str(caught.value)


def test_doctor_reports_the_store_and_whether_it_is_writable(
    runs: str, s3_server: S3Server, tmp_path: Path
) -> None:
    found = [str(finding) for finding in examine(open_runs())]
    assert any(f"ok  run store {runs}, its copies in {tmp_path}/here/runs/" in one for one in found)
    s3_server.set_faults(S3Fault(kind="deny"))
    [wrong] = [one for one in map(str, examine(open_runs())) if "the run store: " in one]
    assert "WRONG" in wrong
    assert runs in wrong
    assert "access denied" in wrong
    assert "ETRAIN_RUNS" in wrong


def test_job_that_cannot_be_written_leaves_nothing(runs: str, s3_server: S3Server) -> None:
    store = S3RunStore(runs)
    s3_server.set_faults(S3Fault(kind="deny", match="job.json"))
    with pytest.raises(RunStoreError, match="access denied"):
        create(store)
    assert not list(store.root.glob("*"))
    s3_server.set_faults()
    assert store.records() == []


# --- seeing ---


def test_job_is_followed_live_to_its_end(coordinator: Coordinator, here: TrainingJob) -> None:
    coordinator.log(*story()[:2], status("running"))
    await_running(here)
    coordinator.log(LogLine(**COMMON, level="info", worker="w1", text="hello"), status("finished"))
    assert here.wait() == "finished"
    assert [event.seq for event in here.events()] == [1, 2, 3, 4, 5]


def test_silent_coordinator_is_reported(
    coordinator: Coordinator, here: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.log(*story()[:2], status("running"))
    monkeypatch.setattr(store_link, "SILENT_S", -1.0)
    with pytest.raises(JobLostError, match=r"its coordinator on .* has sent no heartbeat for"):
        here.wait()
    assert here.status == "failed"
    assert "its coordinator on" in here.reason
    assert "has sent no heartbeat for" in here.reason
    monkeypatch.setattr("etrain_jupyter.notebook.job.runs.SILENT_S", -1.0)
    assert open_runs().summarize(here.record).is_gone


def test_commands_for_the_cluster_are_refused(coordinator: Coordinator, here: TrainingJob) -> None:
    coordinator.log(*story()[:2], status("running"))
    with pytest.raises(UnreachableError, match="takes no commands from here"):
        here.pause()


def test_reading_an_untrusted_job_in_a_bucket_opens_no_connection(runs: str) -> None:
    """Review S2: every node of a pool could write such a record."""
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.setblocking(False)
        address = f"tcp://127.0.0.1:{trap.getsockname()[1]}"
        store = S3RunStore(runs)
        record = create(store)
        cluster = {"cluster_id": "Scheduler-1", "address": address}
        store.rewrite(dataclasses.replace(record, cluster=cluster), is_signed=False)

        job = open_jobs.attach("digits-1")
        assert job.status in ("submitted", "failed")
        assert "is unknown to you" in job.note
        with pytest.raises((UnreachableError, JobLostError)):
            job.stop()
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_invalid_record_in_a_bucket_is_named_with_the_reason(runs: str) -> None:
    """Review S4."""
    good = create(S3RunStore(runs))
    objects = RunObjects(runs)
    objects.put("digits-2/job.json", b'{"job_id": "../../x", "name": "x", "created": 1}')
    objects.put("digits-3/job.json", b"[" * 100_000)
    objects.put("digits-4/job.json", b" " * 16_000_001)
    objects.put("..evil/job.json", b"{}")

    listing = open_runs().scan()

    assert listing.jobs == [good]
    assert list(listing.problems) == ["digits-2", "digits-3", "digits-4"]
    assert "the limit is 16,000,000" in listing.problems["digits-4"]


def test_job_without_a_coordinator_is_reported(here: TrainingJob) -> None:
    with pytest.raises(JobLostError, match="no coordinator has started it"):
        here.wait()


def test_outage_while_following_is_reported_until_it_ends(
    coordinator: Coordinator, here: TrainingJob, s3_server: S3Server
) -> None:
    coordinator.log(*story()[:2], status("running"))
    await_running(here)
    s3_server.set_faults(S3Fault(kind="deny"))
    while here.is_reachable:
        time.sleep(0.02)
    assert "the run store: " in here.reason
    assert here.status == "running"
    s3_server.set_faults()
    coordinator.log(status("stopped"))
    assert here.wait() == "stopped"


def test_list_shows_the_status_of_jobs_or_unknown(
    coordinator: Coordinator, s3_server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator.log(*story())
    assert main(["ls"]) == 0
    assert "digits-1  finished  0/6" in capsys.readouterr().out
    s3_server.set_faults(S3Fault(kind="deny", match="alive.json"))
    assert main(["ls"]) == 0
    assert "digits-1  unknown" in capsys.readouterr().out


def test_audit_reads_the_bucket_and_reports_when_it_cannot(
    coordinator: Coordinator, here: TrainingJob, s3_server: S3Server
) -> None:
    coordinator.log(*story())
    assert here.audit().problems == ("the job finished at step 0 of 6",)
    s3_server.set_faults(S3Fault(kind="deny"))
    with pytest.raises(RunStoreError, match="access denied"):
        here.audit()


# --- going on ---


def test_job_resumed_elsewhere_is_not_resumed(coordinator: Coordinator, here: TrainingJob) -> None:
    coordinator.log(*story()[:2], status("stopped"))
    assert here.wait() == "stopped"
    asked = {"min_workers": 1, "max_workers": 1}
    coordinator.log(JobResumed(**COMMON, from_status="stopped", step=0, **asked))
    with pytest.raises(
        EtrainError, match="was resumed elsewhere after this notebook had read its log"
    ):
        resume_job(here, ResumeRequest(is_trusted=True))  # it was submitted on another machine


def test_lines_are_followed_through_a_resume(
    coordinator: Coordinator, here: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.log(JobSubmitted(**COMMON, name="d", min_workers=1, max_workers=1))
    coordinator.log(LogLine(**COMMON, level="info", worker="w1", text="one"))
    lines = follow_lines(here, open_runs(), number=5)
    assert next(lines).endswith("w1: one")
    monkeypatch.setattr(store_link, "SILENT_S", -1.0)
    assert "Waiting for %etrain resume digits-1" in next(lines)
    monkeypatch.setattr(store_link, "SILENT_S", 45.0)
    monkeypatch.setattr("etrain_jupyter.notebook.commands.log_lines.LOOK_S", 0.0)
    monkeypatch.setattr(open_jobs.platform, "node", lambda: "here")
    asked = {"min_workers": 1, "max_workers": 1}
    coordinator.log(JobResumed(**COMMON, from_status="running", step=7, **asked))
    assert next(lines).endswith("job: resumed after step 7")
    coordinator.log(LogLine(**COMMON, level="info", worker="w1", text="two"), status("finished"))
    assert [line[17:] for line in lines] == ["w1: two", "job: finished"]


def test_record_of_a_plan_is_complete(coordinator: Coordinator) -> None:
    record: RunRecord = open_runs().find("digits-1")
    assert record.checkpoints == record.place == record.where == f"{open_runs()}/digits-1"
    assert isinstance(story()[1], JobPlanned)
