"""The state directory: a folder a cluster, the record of its processes, a lock.

::

    $ETRAIN_STATE, or $XDG_RUNTIME_DIR/etrain, or ~/.local/state/etrain       0700
    ├── start-4f0c21.lock        held while a cluster of this Python environment starts or ends
    └── local-4f0c21-9ab2c3/     0700; removed by the keeper when it ends; aws-... for the head of a
        │                        cluster on EC2
        ├── settings.json        how the cluster was asked to be
        ├── cluster.json         written last, when the scheduler listens; removed first
        ├── slots.json           room for workers, as the first scheduler found it
        ├── load.json            how busy the cluster is, see ``load``
        ├── workers/             a file a worker process: who it is
        ├── held                 how many workers somebody keeps whatever the jobs need
        ├── jobs/                a folder a job that has not ended: what the next scheduler needs
        ├── tls/                 certificates, 0600
        ├── logs/                head.log (keeper and scheduler), and one file a worker
        └── scratch/             Dask's own folders

A process is named by its id *and* its start, because ids are reused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from etrain_jupyter.errors import PoolError
from etrain_jupyter.process.address import SchedulerAddress

MARKER = "ETRAIN_CLUSTER_ID"
"""Variable that all processes of a cluster inherit: how to find what is left of it."""

READY = b"ready\n"
"""What a head writes to its launcher when it serves; anything else is why it does not."""


START_FAILED = 3
"""Exit code of a head that has never served."""

KINDS = ("local", "aws")
"""What the ids of clusters begin with whose head runs on this machine."""


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """How a local cluster behaves; written for its head to read."""

    idle_s: float = 900.0
    """Without a job for that long, the cluster ends itself; ``inf`` for never."""
    linger_s: float = 60.0
    """Workers that nobody wants any more are kept that long, warm for the next job."""
    max_cpu_slots: int = 8
    """Most workers on a machine without GPUs."""
    workers_per_gpu: int = 1
    """Most workers that share one GPU. Above 1, they exchange gradients by gloo through host
    memory, because NCCL refuses two ranks on one GPU: useful for tests, rarely for speed."""
    coordinator: str = "etrain_jupyter.head.coordinator.coordinator:Coordinator"
    supervisor: str = "etrain_jupyter.worker.supervisor:Supervisor"
    pool: str = "local"
    """What a cell calls the pool."""
    prefix: str = ""
    """What the cluster's id begins with; by default that of this environment's local pool."""
    host: str = "127.0.0.1"
    """Where its scheduler listens."""
    port: int = 0
    """At which port, if that is free; 0 for any."""
    nodes: str = "etrain_jupyter.head.local_node_source:LocalHeadNodes"
    """What starts and ends its workers, made by the head: see ``head_nodes``."""
    spec: dict[str, Any] = field(default_factory=dict)
    """What that has to know besides."""

    @classmethod
    def from_environment(cls) -> LocalSettings:
        """Return the defaults, with ``ETRAIN_IDLE_S`` and ``ETRAIN_WORKERS_PER_GPU`` if set.

        Raises:
            PoolError: If one of them is not a positive number.
        """
        settings = cls()
        if (text := os.environ.get("ETRAIN_IDLE_S")) is not None:
            settings = dataclasses.replace(settings, idle_s=_parse_idle_s(text))
        if (text := os.environ.get("ETRAIN_WORKERS_PER_GPU")) is not None:
            workers_per_gpu = _parse_workers_per_gpu(text)
            settings = dataclasses.replace(settings, workers_per_gpu=workers_per_gpu)
        return settings


def _parse_idle_s(text: str) -> float:
    try:
        idle_s = float(text)
    except ValueError:
        idle_s = 0.0
    if not idle_s > 0:
        raise PoolError(
            f"ETRAIN_IDLE_S={text!r} is no number of seconds above 0. No cluster was started. "
            "Set it to 900, for example, or to inf for a cluster that only `%etrain down` ends."
        )
    return idle_s


def _parse_workers_per_gpu(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise PoolError(
            f"ETRAIN_WORKERS_PER_GPU={text!r} is not a whole number of at least 1. No cluster was "
            "started. Set it to 2, for example, or unset it for one worker per GPU."
        )
    return int(text)


@dataclass(frozen=True, kw_only=True)
class ClusterRecord:
    """What ``cluster.json`` says."""

    cluster_id: str
    address: str
    pid: int
    """The keeper's process: the cluster lives as long as that one."""
    stamp: str
    """Its start, see ``stamp_of``."""
    host: str
    python: str
    version: str
    started_at: float
    """Seconds since the epoch."""
    scheduler_pid: int = 0
    """The process that listens; another one takes its place if it dies."""
    scheduler_stamp: str = ""
    num_lives: int = 1
    """How many schedulers there have been."""

    @property
    def is_here(self) -> bool:
        """Whether its keeper was started on this machine: a home folder may be shared by many."""
        return self.host == platform.node()

    @property
    def is_alive(self) -> bool:
        """Whether its keeper runs, on this machine."""
        return self.is_here and stamp_of(self.pid) == self.stamp

    @property
    def is_serving(self) -> bool:
        """Whether its scheduler runs; if only the keeper does, another one is about to."""
        return self.is_alive and stamp_of(self.scheduler_pid) == self.scheduler_stamp


@dataclass(frozen=True)
class ClusterDir:
    """The folder of one cluster."""

    path: Path

    @property
    def cluster_id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def prefix(self) -> str:
        """What the ids of all clusters of the same pool begin with."""
        return self.cluster_id.rpartition("-")[0]

    @property
    def lock_key(self) -> str:
        """Which lock is held while it starts or ends, see ``start_lock``."""
        return lock_key_of(self.prefix)

    @property
    def tls(self) -> Path:
        """Certificates."""
        return self.path / "tls"

    @property
    def scratch(self) -> Path:
        """Dask's own folders."""
        return self.path / "scratch"

    @property
    def jobs(self) -> Path:
        """What the next scheduler has to know of the jobs."""
        return self.path / "jobs"

    def log(self, name: str) -> Path:
        """Log of the ``head`` (keeper and scheduler) or of a worker."""
        return self.path / "logs" / f"{name}.log"

    @classmethod
    def create(cls, root: Path, settings: LocalSettings) -> ClusterDir:
        """Make the folder of a new cluster."""
        name = f"{settings.prefix or local_prefix()}-{secrets.token_hex(3)}"
        return cls.make(root / name, settings)

    @classmethod
    def make(cls, path: Path, settings: LocalSettings) -> ClusterDir:
        """Make the folder of a cluster that has an id."""
        new = cls(path)
        new.path.mkdir(mode=0o700)
        new.log("head").parent.mkdir(mode=0o700)
        new.scratch.mkdir(mode=0o700)
        write_private(new.path / "settings.json", json.dumps(dataclasses.asdict(settings)))
        return new

    def settings(self) -> LocalSettings:
        """Read how the cluster was asked to be."""
        return LocalSettings(**json.loads((self.path / "settings.json").read_text()))

    def record(self) -> ClusterRecord | None:
        """Read what is known of its head; None while it starts or ends."""
        try:
            return ClusterRecord(**json.loads((self.path / "cluster.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def publish(self, address: str, *, keeper: int | None = None, num_lives: int = 1) -> None:
        """Record this process as the scheduler: from now on the cluster can be found.

        Args:
            address: Where it listens.
            keeper: The process that keeps the cluster; None if this one does itself.
            num_lives: How many schedulers there have been, with this one.
        """
        keeper = keeper or os.getpid()
        record = ClusterRecord(
            cluster_id=self.cluster_id,
            address=address,
            pid=keeper,
            stamp=stamp_of(keeper) or "",
            scheduler_pid=os.getpid(),
            scheduler_stamp=stamp_of(os.getpid()) or "",
            num_lives=num_lives,
            host=platform.node(),
            python=sys.executable,
            version=package_version(),
            started_at=time.time(),
        )
        write_private(self.path / "cluster.json", json.dumps(dataclasses.asdict(record), indent=1))

    def retract(self) -> None:
        """Take the record away: from now on nobody finds the cluster."""
        (self.path / "cluster.json").unlink(missing_ok=True)

    def is_published(self) -> bool:
        """Whether the record is there."""
        return (self.path / "cluster.json").is_file()

    def last_life(self) -> tuple[float, int]:
        """Return when the last scheduler was last known to live, and how many there have been.

        0.0 and 0 for a new cluster. One that is taken over has a record, and died with its keeper.
        """
        record = self.record()
        if record is None:
            return 0.0, 0
        # It notes whatever it hears from its workers.
        signs = [path.stat().st_mtime for path in self.jobs.rglob("*") if path.is_file()]
        return max(signs, default=record.started_at), record.num_lives

    def address(self, record: ClusterRecord) -> SchedulerAddress:
        """Return where the scheduler listens, and with which certificates."""
        return SchedulerAddress(
            address=record.address,
            cluster_id=self.cluster_id,
            state_dir=str(self.path),
            tls_dir=str(self.tls),
        )

    def log_tail(self, name: str = "head", num_lines: int = 15) -> str:
        """Return the end of a log, for an error message."""
        try:
            lines = self.log(name).read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-num_lines:]) or "(the log is empty)"

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def open_state_root() -> Path:
    """Return the state directory, made if need be.

    Raises:
        PoolError: If it belongs to somebody else, or others may write in it.
    """
    root = state_root()
    # Parents get the user's usual mode, only the last folder is ours.
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PoolError(
            f"the state directory {root} (owner {status.st_uid}, "
            f"mode {stat.S_IMODE(status.st_mode):o}) can be written by others, who could pose as "
            "your cluster. Nothing was started. "
            f"Type `chmod 700 {root}`, or set ETRAIN_STATE to a folder of your own."
        )
    return root


def state_root() -> Path:
    """Return where the state directory is or would be."""
    if own := os.environ.get("ETRAIN_STATE"):
        return Path(own).expanduser().absolute()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # The variable may have been kept when the user was changed (su, sudo).
    if os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        return Path(runtime) / "etrain"
    return Path.home() / ".local" / "state" / "etrain"


def cluster_dirs(root: Path | None = None) -> list[ClusterDir]:
    """Return the folders of this user's clusters, in whatever state, the newest first."""
    root = root or state_root()
    found = []
    for path in itertools.chain.from_iterable(root.glob(f"{kind}-*-*") for kind in KINDS):
        # It may vanish at any time, and in a folder that others can write it may be a trap.
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                found.append((status.st_mtime, path))
    return [ClusterDir(path) for _, path in sorted(found, reverse=True)]


def local_prefix() -> str:
    """Return what the ids of the local clusters of this Python environment begin with."""
    return f"local-{environment_key()}"


def lock_key_of(prefix: str) -> str:
    """Return which lock the clusters of one pool start and end under, see ``start_lock``."""
    return prefix.removeprefix("local-")


def environment_key() -> str:
    """Return a short name of this Python environment: clusters are shared within one only."""
    text = f"{sys.executable}\n{package_version()}"
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def package_version() -> str:
    """Return the version that is installed."""
    try:
        return importlib.metadata.version("etrain-jupyter")
    except importlib.metadata.PackageNotFoundError:
        return "0+uninstalled"


@contextlib.contextmanager
def start_lock(root: Path, key: str, *, timeout_s: float) -> Iterator[int]:
    """Hold the lock under which clusters of one environment start and end.

    The lock belongs to the open file, so a child that inherits the descriptor goes on holding it: a
    launcher that is killed does not let a second one start beside the head it has just started.

    Args:
        root: The state directory.
        key: The environment, see ``environment_key``.
        timeout_s: How long to wait for whoever holds it.

    Yields:
        The descriptor.

    Raises:
        TimeoutError: If somebody else has it all the time.
    """
    path = root / f"start-{key}.lock"
    deadline = time.monotonic() + timeout_s
    while (fd := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path} is held by another process")
        time.sleep(0.02)
    try:
        yield fd
    finally:
        os.close(fd)


def remove_start_lock(root: Path, key: str) -> None:
    """Remove the lock's file; only for its holder."""
    (root / f"start-{key}.lock").unlink(missing_ok=True)


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if somebody else does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file between our open and our lock.
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    os.close(fd)
    return None


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 in one step: readers see the old text or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        f.write(text)
    os.replace(draft, path)


def stamp_of(pid: int) -> str | None:
    """Return what tells a process from any later one of the same id; None if it does not run.

    On Linux it is the boot and the clock tick of its start: psutil's time of day moves when the
    clock is set.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if sys.platform != "linux":
            return repr(process.create_time())
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name in parentheses may contain spaces and parentheses; the start is the 20th field
        # after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{boot}:{fields[19]}"
    except (psutil.Error, OSError):
        return None


def processes_of(cluster_id: str) -> list[psutil.Process]:
    """Return a cluster's head and all that descends from it, wherever it hangs now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_other = process.pid == os.getpid() or process.uids().real != os.getuid()
            if is_other or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARKER) == cluster_id:
                found.append(process)
    return found


def kill_processes_of(cluster_id: str, *, timeout_s: float = 2.0) -> list[psutil.Process]:
    """SIGKILL whatever is left of a cluster; return what would not go."""

    def kill_again() -> bool:
        # Again, because a process may have started a child since the last look.
        left[:] = processes_of(cluster_id)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return not left

    left: list[psutil.Process] = []
    wait_until(kill_again, timeout_s=timeout_s)
    return left


def wait_until(is_done: Callable[[], bool], *, timeout_s: float) -> bool:
    """Ask again and again; return whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def remove_stale(root: Path) -> None:
    """Remove what dead clusters left; only under the start lock of this environment.

    Without a record, a folder of this environment belongs to a head that died while it started,
    since a living one would hold the lock; folders of other environments are left alone.
    """
    own = f"{local_prefix()}-"
    for cluster in cluster_dirs(root):
        if not cluster.cluster_id.startswith("local-"):
            continue  # it has machines elsewhere, and may be taken over
        record = cluster.record()
        is_stale = (
            record.is_here and not record.is_alive
            if record is not None
            else cluster.cluster_id.startswith(own)
        )
        if is_stale:
            kill_processes_of(cluster.cluster_id)
            cluster.remove()
