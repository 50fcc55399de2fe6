"""Training on workers queued by dask-jobqueue, with its own stand-in for a batch system."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.log.events import WorkerLost
from etrain_jupyter.pools.address.pool import AddressPool
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long
from tests.integration.dask_cluster import ROOT
from tests.integration.slow_jobs import PATIENCE_S, await_steps, submit, until

# Not `importorskip`: importing it replaces the SIGINT handler of the whole test process.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("dask_jobqueue") is None,
        reason="libraries: dask-jobqueue is in the extra `test`",
    ),
]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the signal handlers that the import of dask-jobqueue replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@dataclass
class QueuedCluster:
    process: subprocess.Popen[str]
    address: str

    def keep(self, num_workers: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num_workers}\n")
        self.process.stdin.flush()


@pytest.fixture
def queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QueuedCluster]:
    monkeypatch.setenv("ETRAIN_RUNS", str(tmp_path / "runs"))
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT": "1s",
    }
    module = "tests.integration.jobqueue_cluster"
    with (tmp_path / "jobqueue.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(tmp_path / "scratch")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=environment,
        )
    assert process.stdout is not None
    with process:
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("tcp://"), (tmp_path / "jobqueue.log").read_text()
            yield QueuedCluster(process, address)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@long
def test_job_survives_a_killed_queued_worker_and_uses_its_replacement(
    queued: QueuedCluster,
) -> None:
    pool = AddressPool(queued.address)
    pool.up()
    queued.keep(2)
    job = submit(queued.address)
    await_steps(job, world_size=2)

    def pids() -> dict[str, Any]:
        return {node.id: node.pid for node in pool.nodes() if node.state == "running"}

    before = until(lambda: len(found := pids()) == 2 and found, "two workers")
    victim, pid = next(iter(before.items()))
    os.kill(pid, signal.SIGKILL)
    lost = until(lambda: [e.worker for e in job.events() if isinstance(e, WorkerLost)], "a loss")
    assert lost == [victim]

    # jobqueue gives the replacement the same name.
    after = until(lambda: len(f := pids()) == 2 and f[victim] != pid and f, "its replacement")
    assert after.keys() == before.keys()
    await_steps(job, world_size=2)

    # Dask's adaptive mode sees no tasks, but it must not retire a worker during a step.
    queued.keep(1)
    await_steps(job, world_size=2)
    job.scale(min=1, max=1)
    until(lambda: len(pool.nodes()) == 1, "the end of the idle worker")
    await_steps(job, world_size=1)
    assert [e.worker for e in job.events() if isinstance(e, WorkerLost)] == [victim]

    assert pool.down(timeout_s=60.0) == Leftovers()
    assert job.wait(timeout=PATIENCE_S) == "stopped"
    assert_invariants(job.events())
    assert job.audit().ok
    assert queued.process.poll() is None, "down must not stop it"


def test_documented_script_of_another_batch_system_runs_the_worker_itself() -> None:
    from dask_jobqueue.pbs import PBSJob

    text = (ROOT / "docs" / "how-to" / "use-slurm.md").read_text(encoding="utf-8")
    call = text.partition("cluster = PBSCluster(")[2].partition("scheduler_options=")[0]
    options = eval(f"dict({call})", {"sys": sys})
    script = PBSJob(scheduler="tcp://head:8786", name="w", **options).job_script()

    *_, command = script.strip().splitlines()
    # The shell execs the worker itself, without a shell or a nanny in between, so that it gets the
    # batch system's signals.
    assert command.startswith(f"exec {sys.executable} -m distributed.cli.dask_worker tcp://head:")
    assert command.split().index("--no-nanny") > command.split().index("--nanny")
