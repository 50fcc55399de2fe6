"""Interruption notices during training, with real agents, supervisors and coordinator."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter import launch
from etrain_jupyter.config import parse_mapping
from etrain_jupyter.log import events
from etrain_jupyter.notebook.job.open_jobs import submit_job
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools import SchedulerAddress
from etrain_jupyter.process.tls import mint_certificates, write_certificates
from etrain_jupyter.testing.invariants import assert_invariants
from etrain_jupyter.testing.s3_server import S3Server
from tests.capabilities import long
from tests.integration.conftest import until
from tests.integration.node_machine import CLUSTER, ROOT, Machine

SLOW = Path(tempfile.mkdtemp()) / "slow"


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 8, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if SLOW.exists():
        time.sleep(0.03)
    return F.cross_entropy(output, target)


@pytest.fixture
def cluster(
    tmp_path: Path, s3_server: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SchedulerAddress, Callable[[str], Machine]]]:
    """Provide a coordinator and a function that launches machines of its cluster."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    certificates = mint_certificates(CLUSTER)
    write_certificates(tmp_path / "tls", certificates)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["scheduler", "--host", "127.0.0.1", "--port", str(port), "--tls", f"{tmp_path}/tls"]
    command = [sys.executable, "-m", "tests.chaos.processes", *words]
    with (tmp_path / "scheduler.log").open("ab") as log:
        head = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, process_group=0)
    address = f"tls://127.0.0.1:{port}"
    machines: list[Machine] = []

    def start(instance_id: str) -> Machine:
        machine = Machine(
            tmp_path / instance_id,
            s3_server,
            s3_bucket,
            instance_id=instance_id,
            certificates=certificates,
        )
        machines.append(machine)
        machine.renew_lease(address)
        machine.configure(supervisor="etrain_jupyter.worker.supervisor:Supervisor")
        machine.start()
        return machine

    until(lambda: _is_listening(port), "the scheduler's start")
    yield (
        SchedulerAddress(address=address, cluster_id=CLUSTER, tls_dir=str(tmp_path / "tls")),
        start,
    )
    os.killpg(head.pid, signal.SIGKILL)
    head.wait()
    for machine in machines:
        machine.close()


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def submit(address: SchedulerAddress, store: RunStore) -> TrainingJob:
    keys = {
        "model": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
        "data": {"train": make_data},
        "loss": slow_loss,
        "batch": {"global": 16},
        "epochs": 2000,
        "workers": {"min": 1, "max": 2},
    }
    plan = launch.plan_job(parse_mapping(keys, {}), {})
    return submit_job(plan.config, plan.bundle, address=address, store=store)


@long
def test_noticed_machine_is_replaced_without_losing_a_step(
    cluster: tuple[SchedulerAddress, Callable[[str], Machine]], tmp_path: Path
) -> None:
    address, start = cluster
    SLOW.touch()
    first, _ = start("i-1"), start("i-2")
    job = submit(address, RunStore(tmp_path / "runs"))

    def found(kind: type[events.Event]) -> list[Any]:
        job.raise_for_status()
        return [event for event in job.events() if isinstance(event, kind)]

    def members() -> set[str]:
        return set(found(events.GenerationFormed)[-1].ranks) if job.world_size else set()

    until(lambda: job.step > 3 and members() == {"i-1", "i-2"}, "training on both machines")

    first.imds.recommend_rebalance()
    until(lambda: found(events.RebalanceRecommended), "the recommendation")
    at = job.step
    until(
        lambda: any(e.step >= at - 1 for e in found(events.CheckpointCommitted)),
        "a checkpoint of the machine at risk",
    )
    start("i-3")  # as a pool that replaces machines early
    until(lambda: job.step > at + 3, "more steps on the machine at risk")
    assert members() == {"i-1", "i-2"}

    first.imds.interrupt(time.time() + 110)
    until(lambda: members() == {"i-2", "i-3"}, "the replacement's first generation")
    [notice] = found(events.PreemptionNoticed)
    assert notice.worker == "i-1"
    assert notice.deadline == pytest.approx(notice.time + 110, abs=10)
    assert [(e.worker, e.reason) for e in found(events.WorkerLeft)] == [("i-1", "preempted")]
    assert found(events.WorkerLost) == []
    assert found(events.JobRestored) == []
    SLOW.unlink()
    at = job.step
    until(lambda: job.step > at + 3, "steps with the replacement")
    job.stop()
    assert job.wait(timeout=100) == "stopped", job
    assert_invariants(job.events())
    assert [e.text for e in found(events.LogLine) if e.level == "warning"] == []
