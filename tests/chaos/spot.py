"""A spot cluster for tests: the real head, agents, workers and trainers on a fake EC2.

``Spot.finish`` stops what a test has left running and asserts that nothing remains: no machine, no
object except the ledger, no head process. ``Spot.check_costs`` compares the ledger with the bill of
the fake EC2.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

import etrain_jupyter
from etrain_jupyter.log.events import Event, GenerationFormed
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.plugins.ec2.client.pool import AwsSpotPool
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.simulator import FakeAws
from etrain_jupyter.plugins.ec2.simulator.bill import InstanceRecord
from etrain_jupyter.plugins.ec2.simulator.fixtures import point_boto_at
from etrain_jupyter.pools import get_pool
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.local import LocalPool
from etrain_jupyter.process.cluster_dir import cluster_dirs
from etrain_jupyter.process.processes import processes_of, stamp_of
from etrain_jupyter.testing.invariants import assert_invariants

PATIENCE_S = 100.0
ROOT = Path(__file__).parents[2]
SLOW = Path(tempfile.mkdtemp()) / "slow"
"""While this file exists, steps are slow but use no CPU time."""
ETRAIN = """
import sys, time
now = time.time
time.time = lambda: now() + {}
from etrain_jupyter.cli import main
sys.exit(main())
"""
TERMINAL = ("finished", "stopped", "failed")


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(640, 8, generator=torch.Generator().manual_seed(3))
    return x, (x.sum(1) > 0).long()


def make_model() -> nn.Module:
    return nn.Linear(8, 2)


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if SLOW.exists():
        time.sleep(0.05)
    return F.cross_entropy(output, target)


class Spot:
    """One user's folder with ``pools.yaml``, and the jobs and processes started from it.

    Args:
        cloud: The cloud that provides machines.
        folder: The user's folder.
    """

    def __init__(self, cloud: FakeAws, folder: Path) -> None:
        self.cloud = cloud
        self.folder = folder
        self.account = cloud.make_account()
        self.jobs: list[TrainingJob] = []
        self.figures: dict[str, float] = {}
        self._pools: dict[str, Any] = {}
        self._reads: dict[str, AwsSpotPool] = {}
        self._children: list[subprocess.Popen[str]] = []

    # --- what a user does ---

    def configure(self, name: str = "spot", **keys: Any) -> None:
        """Write a pool into ``pools.yaml``: the given keys over defaults for tests."""
        usual: dict[str, Any] = {
            "kind": "aws-spot",
            "region": self.account.region,
            "bucket": self.account.bucket,
            "head_host": self.cloud.host_address,
            "workers": {"max": 2},
            "tick": "1 s",
            "capacity": {"types": ["g5.xlarge", "g6.xlarge"]},
            "image": {"ami": self.account.image, "python": sys.executable},
            "lifetime": {"lease_ttl": "60 s", "linger": "1 s", "boot": "60 min"},
            "interruption": {"imds_poll": "1 s", "drain": "5 s"},
        }
        for key, value in keys.items():
            is_group = isinstance(value, Mapping) and key in usual
            usual[key] = {**usual[key], **value} if is_group else value
        self._pools[name] = usual
        (self.folder / "pools.yaml").write_text(yaml.safe_dump(self._pools))

    def pool(self, name: str = "spot") -> AwsSpotPool:
        """Return a pool of ``pools.yaml``."""
        found = get_pool(name)
        assert isinstance(found, AwsSpotPool)
        return found

    def submit(self, workers: int = 2, **keys: Any) -> TrainingJob:
        """Submit a job that is long enough to train until the test stops it."""
        body = {
            "model": make_model,
            "data": {"train": make_data},
            "loss": slow_loss,
            "batch": {"global": 32},
            "epochs": 5000,
            "workers": {"min": 1, "max": workers},
            "pool": "spot",
        }
        job = etrain_jupyter.distributed({**body, **keys})
        self.jobs.append(job)
        return job

    def train(self, workers: int = 2, **keys: Any) -> TrainingJob:
        """Submit a job and wait until all its workers train."""
        job = self.submit(workers, **keys)
        self.until(lambda: job.world_size == workers and job.step >= 3, f"{workers} workers", job)
        return job

    def run(
        self,
        *words: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path,
        days_later: float = 0.0,
    ) -> str:
        """Run ``etrain`` in another process and return its output.

        Args:
            words: Arguments of ``etrain``.
            environment: Additional environment variables.
            cwd: Working directory.
            days_later: Offset of its clock in days.
        """
        done = subprocess.run(
            [sys.executable, "-c", ETRAIN.format(24 * 3600 * days_later), *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def open_kernel(self, code: str) -> subprocess.Popen[str]:
        """Run code in another process, like a kernel, and do not wait for it."""
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=self.folder,
            text=True,
        )
        self._children.append(child)
        return child

    # --- what a test observes ---

    def until(self, is_true: Callable[[], Any], what: str, job: TrainingJob | None = None) -> Any:
        """Wait for a true value and return it; on timeout, fail with a description of the state."""
        ends_at = time.monotonic() + PATIENCE_S
        while not (found := is_true()):
            assert time.monotonic() < ends_at, f"{what} did not come\n{self.describe(job)}"
            time.sleep(0.05)
        return found

    def await_steps(self, job: TrainingJob) -> None:
        """Wait until a job has completed a few more steps."""
        step = job.step
        self.until(lambda: job.step > step + 3, "steps", job)

    def describe(self, job: TrainingJob | None = None) -> str:
        """Return a description of the current state for failure messages."""
        lines = [str(job)] if job else []
        if job:
            lines += [str(event)[:200] for event in job.events()[-15:]]
        for one in self.cloud.instances():
            lines.append(f"{one.instance_id} {one.state} {one.reason}")
            lines.append(self.cloud.console(one.instance_id)[-1500:])
        for cluster in cluster_dirs():
            lines.append(f"{cluster.cluster_id}: {cluster.log_tail()}")
        return "\n".join(lines)

    def living(self) -> list[InstanceRecord]:
        """Return the machines that are charged."""
        return self.cloud.instances("pending", "running")

    def ids(self) -> list[str]:
        """Return the ids of the clusters known on this machine."""
        return [cluster.cluster_id for cluster in cluster_dirs()]

    def ledgers(self) -> dict[str, dict[str, Any]]:
        """Return the clusters' cost ledgers, by cluster."""
        bucket = Clients(self.pool(next(iter(self._pools))).spec).bucket
        keys = bucket.keys("ledgers", "test")
        return {Path(key).stem: json.loads(bucket.get(key, "test") or b"{}") for key in keys}

    # --- what a test does to it ---

    def kill_heads(self) -> None:
        """Kill the keepers and schedulers of all clusters at once, with SIGKILL."""
        heads = [one for cluster in cluster_dirs() for one in self.heads_of(cluster.cluster_id)]
        for pid in heads:  # stop them first, so that none observes the death of another one
            os.kill(pid, signal.SIGSTOP)
        for pid in heads:
            os.kill(pid, signal.SIGKILL)
        self.until(lambda: all(stamp_of(pid) is None for pid in heads), "the end of the head")

    def heads_of(self, cluster_id: str) -> list[int]:
        """Return the keeper and the scheduler of a cluster, without processes on its machines."""
        found = processes_of(cluster_id)
        return [one.pid for one in found if "ETRAIN_FAKEAWS_INSTANCE" not in one.environ()]

    def kill_kernels(self) -> None:
        """Kill the processes that ``open_kernel`` has started."""
        for child in self._children:
            child.kill()
            child.wait()
        self._children.clear()

    def finish(self) -> None:
        """Stop all jobs, check each log, shut down all clusters and assert that nothing is left."""
        self.cloud.set_faults()
        self.cloud.set_lag(0)
        SLOW.unlink(missing_ok=True)
        for job in self.jobs:
            if job.status not in TERMINAL:
                job.stop()
                job.wait(timeout=PATIENCE_S)
            check(job)
        self.end_clusters()
        assert self.cloud.leftovers() == {}

    def settle(self) -> None:
        """Finish, and compare the costs."""
        self.finish()
        self.check_costs()

    def end_clusters(self) -> None:
        """Shut down every cluster of this folder, as ``%etrain down`` does."""
        self.kill_kernels()
        for name in self._pools:
            assert self.pool(name).down() == Leftovers()

    def check_costs(self) -> None:
        """Compare the clusters' ledgers with the charges of the fake EC2, including disks."""
        bill, ledgers = self.cloud.bill(), self.ledgers()
        rows = [row for ledger in ledgers.values() for row in ledger["rows"]]
        assert {row["id"] for row in rows} == {row.instance_id for row in bill.rows}
        assert all(row["ended_at"] for row in rows)
        spent = sum(ledger["spent_usd"] for ledger in ledgers.values())
        disks = sum(ledger["volumes_usd"] for ledger in ledgers.values())
        assert spent == pytest.approx(bill.usd, rel=0.05)
        assert disks == pytest.approx(bill.usd - bill.compute_usd, rel=0.05)
        self.figures["ledger / bill"] = spent / bill.usd


def check(job: TrainingJob) -> None:
    """Assert the audit and the invariants of a job."""
    report = job.audit()
    assert report.ok, str(report)
    assert_invariants(job.events())


def events(job: TrainingJob, *kinds: type[Event]) -> list[Any]:
    """Return the events of these kinds, oldest first."""
    return [event for event in job.events() if isinstance(event, kinds)]


def trainers(job: TrainingJob) -> dict[str, int]:
    """Return the process id of each worker's trainer in the last generation."""
    last = events(job, GenerationFormed)[-1]
    return dict(zip(last.ranks, last.trainer_pids, strict=True))


def open_cloud() -> FakeAws:
    """Start a cloud in which a minute of a machine's timers takes one second.

    ``ETRAIN_SPOT_MODE=loopback`` runs the tests as they run without root.
    """
    mode: Any = os.environ.get("ETRAIN_SPOT_MODE", "auto")
    return FakeAws(mode, minute_s=1.0)


def open_spot(
    cloud: FakeAws, monkeypatch: pytest.MonkeyPatch, folder: Path, name: str
) -> Iterator[Spot]:
    """Provide a new user's folder in the reset cloud; assert at the end that nothing is left."""
    cloud.reset()
    cloud.set_boot(0)
    point_boto_at(cloud, monkeypatch, folder)
    monkeypatch.setenv("ETRAIN_STATE", str(folder / "state"))
    monkeypatch.setenv("ETRAIN_RUNS", str(folder / "runs"))
    monkeypatch.setenv("ETRAIN_POOLS", str(folder / "pools.yaml"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(folder)
    SLOW.touch()
    spot = Spot(cloud, folder)
    try:
        yield spot
        spot.finish()
    finally:
        SLOW.unlink(missing_ok=True)
        spot.end_clusters()
        LocalPool().down()
        figures_text = ", ".join(f"{key} {value:.3g}" for key, value in spot.figures.items())
        print(f"\n{name} ({cloud.mode}): {figures_text}")
    assert cloud.leftovers() == {}
