"""The head's source of SLURM jobs, with an in-memory queue instead of SLURM's commands."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.head.interfaces import HeadFacts
from etrain_jupyter.plugins.slurm import commands
from etrain_jupyter.plugins.slurm.commands import QueuedJob, SlurmError
from etrain_jupyter.plugins.slurm.head.nodes import SlurmNodes
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.tls import write_certificates
from tests.capabilities import needs_module

pytestmark = needs_module("dask_jobqueue")


class Queue:
    """SLURM's queue; jobs run as soon as they are submitted."""

    def __init__(self) -> None:
        self.jobs: dict[str, QueuedJob] = {}
        self.scripts: list[str] = []
        self.cancelled: list[tuple[str, str]] = []
        self.refusal: SlurmError | None = None

    def list_jobs(self, prefix: str) -> list[QueuedJob]:
        return [job for job in self.jobs.values() if job.name.startswith(prefix)]

    def submit(self, script: str, *, folder: Path) -> str:
        if self.refusal:
            raise self.refusal
        self.scripts.append(script)
        found = re.search(r"^#SBATCH -J (.*)", script, flags=re.MULTILINE)
        assert found is not None
        id = str(len(self.scripts))
        self.jobs[found[1].rpartition(".")[2]] = QueuedJob(
            job_id=id,
            name=found[1],
            is_running=True,
            left_s=3600.0,
            used_s=1800.0,
            node=f"node{id}",
            reason="None",
        )
        return id

    def cancel(self, job_ids: Iterable[str], *, signal: str = "") -> None:
        for id in list(job_ids):
            self.cancelled.append((id, signal))
            self.jobs = {name: job for name, job in self.jobs.items() if job.job_id != id}

    def cancel_all(self, prefix: str, *, timeout_s: float) -> list[QueuedJob]:
        self.cancel(job.job_id for job in self.list_jobs(prefix))
        return []


class Head:
    """The callbacks of a head, and what they were called with."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        spec = {"cores": 1, "memory": "1 GiB", "folder": str(folder / "shared"), "tick": "0.01 s"}
        self.connected: set[str] = set()
        self.busy: set[str] = set()
        self.gone: list[str] = []
        self.warnings: list[str] = []
        self.notices: list[str] = []
        self.halts: list[str] = []
        cluster = ClusterDir(folder / "slurm-a-1")
        settings = ClusterSettings(prefix="slurm-a", spec=spec | keys)
        if not cluster.path.exists():
            ClusterDir.make(cluster.path, settings)
            names = ("ca.pem", "worker.pem", "worker.key", "scheduler.key", "client.key")
            write_certificates(cluster.tls, dict.fromkeys(names, "secret"))
        self.facts = HeadFacts(
            cluster=cluster,
            settings=settings,
            parent_pipe=-1,
            incarnation=1,
            is_connected=self.connected.__contains__,
            is_busy=self.busy.__contains__,
            on_gone=lambda worker, why: self.gone.append(worker),
            on_warning=self.warnings.append,
            on_note=self.warnings.append,
            on_notice=lambda worker, at: self.notices.append(worker),
            progress=tuple,
            on_halt=self.halts.append,
        )
        self.nodes = SlurmNodes(self.facts)

    def is_listed(self, worker: str) -> bool:
        """Return whether the queue was listed since the worker's job was submitted."""
        return any(node["worker"] == worker and node["zone"] for node in self.nodes.nodes())

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.nodes.reap()
                await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Queue:
    monkeypatch.setenv("HOME", str(tmp_path))
    queue = Queue()
    for name in ("list_jobs", "submit", "cancel", "cancel_all"):
        monkeypatch.setattr(commands, name, getattr(queue, name))
    return queue


async def started(folder: Path, **keys: Any) -> Head:
    head = Head(folder, **keys)
    await head.nodes.start("tls://10.0.0.1:1")
    return head


async def test_wanted_workers_are_submitted_and_listed(queue: Queue, tmp_path: Path) -> None:
    head = await started(tmp_path, price=3.0)
    head.nodes.want(2, reason="test")
    await head.until(lambda: len(queue.jobs) == 2)
    head.connected.add("w1")

    await head.until(lambda: head.nodes.nodes()[0]["zone"])
    first, second = head.nodes.nodes()
    assert (first["worker"], first["state"], second["state"]) == ("w1", "running", "starting")
    assert (first["zone"], first["price_usd_per_h"]) == ("node1", 3.0)
    # Half an hour each, as SLURM's own clock says.
    await head.until(lambda: len(head.nodes.costs()) == 2)
    assert [cost.spent_usd for cost in head.nodes.costs()] == [1.5, 1.5]
    await head.nodes.close(grace_s=1.0)
    assert queue.jobs == {}


async def test_only_the_workers_certificate_is_on_the_shared_disk(tmp_path: Path) -> None:
    head = await started(tmp_path)

    site = tmp_path / "shared" / "slurm-a-1"
    found = {path.name: path.stat().st_mode & 0o777 for path in (site / "tls").iterdir()}
    assert found == dict.fromkeys(("ca.pem", "worker.pem", "worker.key"), 0o600)
    assert (site.stat().st_mode & 0o777, (site / "tls").stat().st_mode & 0o777) == (0o700, 0o700)
    await head.nodes.close(grace_s=1.0)
    assert not site.exists()


async def test_certificates_are_neither_in_a_script_nor_on_a_command_line(
    queue: Queue, tmp_path: Path
) -> None:
    head = await started(tmp_path)
    head.nodes.want(1, reason="test")
    await head.until(lambda: queue.scripts)

    assert "secret" not in queue.scripts[0]
    assert "tls" not in queue.scripts[0].replace("tls://10.0.0.1:1", "")
    await head.nodes.close(grace_s=1.0)


async def test_without_a_price_there_are_no_costs(queue: Queue, tmp_path: Path) -> None:
    head = await started(tmp_path)
    head.nodes.want(1, reason="test")
    await head.until(lambda: head.nodes.nodes() and head.nodes.nodes()[0]["zone"])

    assert list(head.nodes.costs()) == []
    await head.nodes.close(grace_s=1.0)


async def test_ended_job_is_replaced_under_a_new_name(queue: Queue, tmp_path: Path) -> None:
    head = await started(tmp_path)
    head.nodes.want(1, reason="test")
    await head.until(lambda: "w1" in queue.jobs)
    head.connected.add("w1")
    await head.until(lambda: head.nodes.nodes()[0]["zone"])

    del queue.jobs["w1"]
    await head.until(lambda: "w2" in queue.jobs)

    assert head.gone == ["w1"]
    await head.nodes.close(grace_s=1.0)


async def test_next_scheduler_adopts_the_jobs_and_does_not_reuse_names(
    queue: Queue, tmp_path: Path
) -> None:
    first = await started(tmp_path)
    first.nodes.hold(2, reason="test")
    await first.until(lambda: len(queue.jobs) == 2)
    assert first.nodes._task is not None
    first.nodes._task.cancel()  # the scheduler dies

    second = await started(tmp_path)
    assert [node["worker"] for node in second.nodes.nodes()] == ["w1", "w2"]
    second.nodes.want(3, reason="test")
    await second.until(lambda: len(queue.jobs) == 3)

    assert list(queue.jobs) == ["w1", "w2", "w3"]
    await second.nodes.close(grace_s=1.0)


async def test_job_that_is_not_listed_yet_is_not_submitted_again(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = await started(tmp_path)
    num_lists = 0

    def cached(prefix: str) -> list[QueuedJob]:
        nonlocal num_lists
        num_lists += 1
        return []

    monkeypatch.setattr(commands, "list_jobs", cached)
    head.nodes.want(1, reason="test")
    await head.until(lambda: queue.jobs)
    before = num_lists
    await head.until(lambda: num_lists > before + 3)

    assert [node["worker"] for node in head.nodes.nodes()] == ["w1"]
    assert len(queue.scripts) == 1
    assert head.gone == []
    await head.nodes.close(grace_s=1.0)


async def test_released_worker_is_cancelled_once_it_is_idle(queue: Queue, tmp_path: Path) -> None:
    head = await started(tmp_path)
    head.nodes.want(1, reason="test")
    await head.until(lambda: queue.jobs)
    head.connected.add("w1")
    head.busy.add("w1")
    head.nodes.release("w1", drain_s=1000.0)
    # Its replacement does not wait.
    await head.until(lambda: "w2" in queue.jobs)
    assert queue.cancelled == []

    head.busy.clear()
    await head.until(lambda: queue.cancelled)

    assert queue.cancelled == [("1", "")]
    await head.nodes.close(grace_s=1.0)


async def test_killed_worker_gets_no_time(queue: Queue, tmp_path: Path) -> None:
    head = await started(tmp_path)
    head.nodes.want(1, reason="test")
    await head.until(lambda: queue.jobs)

    head.nodes.kill("w1")
    await head.until(lambda: queue.cancelled)

    assert queue.cancelled == [("1", "KILL")]
    await head.nodes.close(grace_s=1.0)


async def test_worker_near_its_time_limit_is_notified_when_its_replacement_is_ready(
    queue: Queue, tmp_path: Path
) -> None:
    head = await started(tmp_path)
    head.nodes.want(1, reason="test")
    await head.until(lambda: queue.jobs)
    head.connected.add("w1")
    queue.jobs["w1"] = dataclasses.replace(queue.jobs["w1"], left_s=500.0)
    await head.until(lambda: "w2" in queue.jobs)
    assert head.notices == []

    head.connected.add("w2")
    await head.until(lambda: head.notices)

    assert set(head.notices) == {"w1"}
    await head.nodes.close(grace_s=1.0)


async def test_worker_of_an_ending_job_is_replaced_and_keeps_its_time_until_sigkill(
    queue: Queue, tmp_path: Path
) -> None:
    head = await started(tmp_path)
    head.nodes.want(1, reason="test")
    await head.until(lambda: queue.jobs)
    head.connected.add("w1")
    # SIGTERM by SLURM: the worker trains to the end of its step.
    queue.jobs["w1"] = dataclasses.replace(queue.jobs["w1"], is_running=False, is_ending=True)

    await head.until(lambda: "w2" in queue.jobs)

    assert head.gone == []
    assert head.nodes.nodes()[0]["state"] == "draining"
    del queue.jobs["w1"]
    await head.until(lambda: head.gone)
    assert head.gone == ["w1"]
    await head.nodes.close(grace_s=1.0)


async def test_failed_command_is_repeated_and_reported(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = await started(tmp_path)
    head.nodes.want(1, reason="test")
    await head.until(lambda: queue.jobs)

    def fail(*_: Any, **__: Any) -> None:
        raise SlurmError("scancel: Unable to contact slurm controller", is_transient=True)

    monkeypatch.setattr(commands, "cancel", fail)
    head.nodes.release("w1", drain_s=0.0)
    await head.until(lambda: head.warnings)
    monkeypatch.setattr(commands, "cancel", queue.cancel)
    await head.until(lambda: queue.cancelled)

    assert "SLURM does not respond: scancel: Unable to contact" in head.warnings[0]
    assert queue.cancelled == [("1", "")]
    await head.nodes.close(grace_s=1.0)


async def test_settings_that_dask_jobqueue_refuses_fail_the_start(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="cores: 8 and memory: 32 GiB"):
        await started(tmp_path, cores=None, memory=None)


async def test_later_scheduler_waits_for_slurm(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[SlurmError] = [SlurmError("squeue: timed out", is_transient=True)] * 2

    def list_jobs(prefix: str) -> list[QueuedJob]:
        if answers:
            raise answers.pop()
        return queue.list_jobs(prefix)

    monkeypatch.setattr(commands, "list_jobs", list_jobs)
    with pytest.raises(SlurmError, match="timed out"):
        await started(tmp_path)
    head = Head(tmp_path)
    head.nodes._facts = dataclasses.replace(head.facts, incarnation=2)
    await head.nodes.start("tls://10.0.0.1:1")

    assert answers == []
    await head.nodes.close(grace_s=1.0)


async def test_jobs_that_never_connect_end_the_submissions(queue: Queue, tmp_path: Path) -> None:
    head = await started(tmp_path)
    head.nodes.want(1, reason="test")
    for number in (1, 2, 3):
        await head.until(lambda name=f"w{number}": head.is_listed(name))
        logs = tmp_path / "shared" / "slurm-a-1" / "logs"
        (logs / f"slurm-a-1.w{number}-{number}.err").write_text("python: not found\n")
        del queue.jobs[f"w{number}"]

    await head.until(lambda: head.halts)

    [why] = head.halts
    assert "SLURM job 3 of worker w3 ended before its worker connected, as 3 in a row" in why
    assert "python: not found" in why
    await head.nodes.close(grace_s=1.0)
    assert len(queue.scripts) == 3


async def test_job_that_slurm_ended_is_no_failed_start(queue: Queue, tmp_path: Path) -> None:
    head = await started(tmp_path, lifetime={"max_start_failures": 1})
    head.nodes.want(1, reason="test")
    await head.until(lambda: head.is_listed("w1"))
    logs = tmp_path / "shared" / "slurm-a-1" / "logs"
    text = (
        "slurmstepd: error: *** JOB 1 ON node1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION"
    )
    (logs / "slurm-a-1.w1-1.err").write_text(f"{text} ***\n")

    del queue.jobs["w1"]
    await head.until(lambda: "w2" in queue.jobs)

    assert head.halts == []
    await head.nodes.close(grace_s=1.0)


@pytest.mark.parametrize("is_transient", [True, False])
def test_refused_job_is_retried_if_that_can_help(
    queue: Queue, tmp_path: Path, is_transient: bool
) -> None:
    async def run() -> None:
        queue.refusal = SlurmError("sbatch: no", is_transient=is_transient)
        head = await started(tmp_path)
        head.nodes.want(1, reason="test")
        await head.until(lambda: head.warnings or head.halts)
        queue.refusal = None
        if is_transient:
            await head.until(lambda: queue.jobs)
            assert "sbatch: no. No job was submitted; retrying" in head.warnings[0]
        else:
            assert "SLURM refuses this pool's jobs: sbatch: no" in head.halts[0]
        await head.nodes.close(grace_s=1.0)

    asyncio.run(run())
