"""A machine vanishes without closing its connections; later its traffic is restored."""

from __future__ import annotations

import contextlib
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
from etrain_jupyter.log.events import GenerationFormed, WorkerLost
from etrain_jupyter.notebook.job.open_jobs import submit_job
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools import SchedulerAddress
from etrain_jupyter.process.tls import mint_certificates, write_certificates
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import needs
from tests.chaos.machines import Machine, network

pytestmark = [needs("namespaces"), pytest.mark.plugins, pytest.mark.timeout(300)]

PATIENCE_S = 120.0
SILENCE_S = 3.0
PORT = 8786
ROOT = Path(__file__).parents[2]
SLOW = Path(tempfile.mkdtemp()) / "slow"


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 8, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if SLOW.exists():
        time.sleep(0.03)
    return F.cross_entropy(output, target)


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen in {PATIENCE_S:.0f} s"
        time.sleep(0.05)
    return found


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[SchedulerAddress, list[Machine]]]:
    """Provide a scheduler on a bridge and a worker on each of three machines."""
    write_certificates(tmp_path / "tls", mint_certificates("machines"))
    tls = ("--tls", str(tmp_path / "tls"), "--port", str(PORT))
    with network(3) as (host, found), contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.chdir(ROOT)  # for `-m tests...`
        patch.setenv("ETRAIN_SILENCE_S", str(SILENCE_S))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        command = [sys.executable, "-m", "tests.chaos.processes", "scheduler", "--host", host, *tls]
        with (tmp_path / "scheduler.log").open("ab") as log:
            scheduler = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
        stack.callback(end, scheduler)
        until(lambda: is_listening(host), "the scheduler's start")
        for number, machine in enumerate(found):
            words = ("worker", "--host", machine.address, "--scheduler", host, *tls)
            name = ("--name", f"w{number}")
            worker = machine.start(
                "tests.chaos.processes", *words, *name, log=tmp_path / f"w{number}.log"
            )
            stack.callback(end, worker)
        address = f"tls://{host}:{PORT}"
        tls_dir = str(tmp_path / "tls")
        yield SchedulerAddress(address=address, cluster_id="machines", tls_dir=tls_dir), found


def is_listening(host: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, PORT)) == 0


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group; trainers lead their own groups and die with their parent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def submit(address: SchedulerAddress, store: RunStore) -> TrainingJob:
    keys = {
        "model": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)),
        "data": {"train": make_data},
        "loss": slow_loss,
        "batch": {"global": 16},
        "epochs": 10_000,
        "workers": {"min": 1, "max": 3},
    }
    plan = launch.plan_job(parse_mapping(keys, {}), {})
    return submit_job(plan.config, plan.bundle, address=address, store=store)


def lost(job: TrainingJob) -> list[WorkerLost]:
    job.raise_for_status()
    return [event for event in job.events() if isinstance(event, WorkerLost)]


def is_whole(job: TrainingJob) -> bool:
    job.raise_for_status()
    return job.world_size == 3 and job.status == "running"


def test_survivors_of_a_vanished_machine_continue_and_it_rejoins_with_a_new_trainer(
    machines: tuple[SchedulerAddress, list[Machine]], tmp_path: Path
) -> None:
    address, found = machines
    SLOW.touch()
    job = submit(address, RunStore(tmp_path / "runs"))
    until(lambda: is_whole(job) and job.step > 5, "world size 3")
    before = {w["worker"]: w["trainer_pid"] for w in job.workers()}

    found[1].vanish()
    until(lambda: lost(job), "the discovery of the loss")
    until(lambda: job.world_size == 2, "a generation of the survivors")
    step = job.step
    until(lambda: job.step > step + 5, "steps of the survivors")

    assert [event.worker for event in lost(job)] == ["w1"]
    assert "no heartbeat for" in lost(job)[0].cause
    formed = [e for e in job.events() if isinstance(e, GenerationFormed)][-1]
    now = dict(zip(formed.ranks, formed.trainer_pids, strict=True))
    assert now == {worker: before[worker] for worker in ("w0", "w2")}

    found[1].return_()
    until(lambda: is_whole(job), "the return of the machine")
    again = {w["worker"]: w["trainer_pid"] for w in job.workers()}
    assert again["w1"] != before["w1"], "it must not continue with its previous state"
    job.stop()
    assert job.wait(timeout=PATIENCE_S) == "stopped", job
    assert_invariants(job.events())
