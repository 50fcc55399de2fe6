"""Peer systems: availability, version and start of each.

A system that is not installed is not skipped silently: ``missing`` returns the reason, and the
benchmarks print it and write it to their JSON file.
"""

from __future__ import annotations

import functools
import secrets
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import psutil
import torch.distributed as dist

from benchmarks.peers.run import PeerRun
from benchmarks.peers.training import Task

MANY = 1000
"""Number of restarts that no run reaches."""
START_TIMEOUT_S = 60.0
LOGS = "--log-dir=agents"
"""Subfolder of the run's folder, which is deleted; an agent's default folder would remain."""


class System(ABC):
    """A peer system."""

    name: ClassVar[str]
    package: ClassVar[str]
    """Distribution package that determines the version."""
    needs: ClassVar[str] = "torch"
    """Module that must be importable."""
    survives_kill: ClassVar[bool] = True
    """Whether it recovers when a rank is killed."""

    def missing(self) -> str:
        """Return why the system cannot run here, or an empty string if it can."""
        return import_error(self.needs)

    def version(self) -> str:
        """Return the installed version."""
        return metadata.version(self.package)

    @abstractmethod
    def start(self, task: Task) -> PeerRun:
        """Start training and return the run; the caller must close it."""


class PlainTorchrun(System):
    """DDP under ``torchrun``, not elastic."""

    name = "torchrun DDP"
    package = "torch"
    survives_kill = False

    def start(self, task: Task) -> PeerRun:
        """Start one agent with all ranks."""
        run = PeerRun(task)
        ranks = f"--nproc-per-node={task.world_size}"
        launch = ["torch.distributed.run", "--standalone", ranks, LOGS]
        run.spawn("agent", *launch, "-m", "benchmarks.peers.elastic_train", str(task.folder))
        return run


class ElasticRun(PeerRun):
    """Agents that rendezvous at a store in the benchmark process, which survives all of them.

    This models a careful setup, in which the store runs on a machine that is not preempted.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10)
        )
        self.agents: list[subprocess.Popen[bytes]] = []

    def worker_of(self, agent: subprocess.Popen[bytes]) -> psutil.Process:
        """Return the process of an agent's rank."""
        return next(
            child
            for child in psutil.Process(agent.pid).children(recursive=True)
            if "benchmarks.peers.elastic_train" in child.cmdline()
        )

    def add_agent(self) -> None:
        """Start another node with one rank."""
        settings = {
            "is_host": "false",
            "last_call_timeout": "2",  # default 30 s
            "keep_alive_interval": "1",  # default 5 s
            "keep_alive_max_attempt": "3",
        }
        self.agents.append(
            self.spawn(
                f"agent-{len(self.agents)}",
                "torch.distributed.run",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{self._store.port}",
                "--rdzv-id=benchmark",
                f"--rdzv-conf={','.join(f'{key}={value}' for key, value in settings.items())}",
                f"--nnodes=1:{self.task.world_size}",
                "--nproc-per-node=1",
                f"--max-restarts={MANY}",
                "--local-addr=127.0.0.1",
                LOGS,
                "-m",
                "benchmarks.peers.elastic_train",
                str(self.task.folder),
                # By default all rounds share the workers' store, including stale addresses, and
                # the first restart would wait for a dead rank until it times out.
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            )
        )


class ElasticTorchrun(System):
    """``torchrun`` with the c10d rendezvous, 1 to N nodes of one rank each."""

    name = "elastic torchrun"
    package = "torch"

    def start(self, task: Task) -> ElasticRun:
        """Start one agent per rank."""
        run = ElasticRun(task)
        for _ in range(task.world_size):
            run.add_agent()
        return run


class RayTrain(System):
    """Ray Train: a cluster and an elastic group of workers."""

    name = "Ray Train"
    package = "ray"
    needs = "ray.train.torch"

    def start(self, task: Task) -> PeerRun:
        """Start the driver, which starts all other processes."""
        run = PeerRun(task)
        settings = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",  # default 2 s
            # Restrict Ray to loopback, as it does by default on other operating systems.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # A token for this run, so that Ray does not write one to the user's home folder.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        run.spawn("driver", "benchmarks.peers.ray_train", str(task.folder), **settings)
        return run


class TorchFT(System):
    """torchft: replica groups of one rank, each restarted by its own agent."""

    name = "torchft"
    package = "torchft-nightly"
    needs = "torchft"

    def start(self, task: Task) -> PeerRun:
        """Start the lighthouse, then the replicas."""
        run = PeerRun(task)
        path = task.folder / "lighthouse"
        run.spawn("lighthouse", "benchmarks.peers.torchft_lighthouse", str(path))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not path.exists():
            run.check()
            if time.monotonic() > deadline:
                run.close()
                raise TimeoutError(
                    f"no lighthouse after {START_TIMEOUT_S:.0f} s; output:\n{run.output()}"
                )
            time.sleep(0.05)
        for replica in range(task.world_size):
            run.spawn(
                f"replica-{replica}",
                "torch.distributed.run",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=127.0.0.1:0",
                f"--rdzv-id=replica-{replica}",
                "--nnodes=1",
                "--nproc-per-node=1",
                f"--max-restarts={MANY}",
                "--local-addr=127.0.0.1",
                LOGS,
                "-m",
                "benchmarks.peers.torchft_train",
                str(task.folder),
                TORCHFT_LIGHTHOUSE=path.read_text(encoding="utf-8"),
                REPLICA_GROUP_ID=str(replica),
            )
        return run


SYSTEMS: tuple[System, ...] = (PlainTorchrun(), ElasticTorchrun(), RayTrain(), TorchFT())


def runnable(*, survivors: bool = False) -> tuple[list[System], dict[str, str]]:
    """Return the systems that can run here, and the reasons why the others cannot.

    Args:
        survivors: Exclude systems that do not recover when a rank is killed.
    """
    wanted = [system for system in SYSTEMS if system.survives_kill or not survivors]
    skipped = {system.name: why for system in wanted if (why := system.missing())}
    for name, why in skipped.items():
        print(f"{name} is not measured: {why}", flush=True)
    return [system for system in wanted if system.name not in skipped], skipped


@functools.cache
def import_error(module: str) -> str:
    """Import a module in a separate process; return the error, or an empty string."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else (lines or [f"exit status {done.returncode}"])[-1]


def new_task(
    parent: Path, *, workload: str, num_steps: int, world_size: int, checkpoint_every: int = 0
) -> Task:
    """Create a task with a new, empty folder in ``parent``."""
    folder = parent / f"{time.time_ns()}"
    folder.mkdir(parents=True)
    return Task(
        folder=folder,
        workload=workload,
        num_steps=num_steps,
        world_size=world_size,
        checkpoint_every=checkpoint_every,
    )
