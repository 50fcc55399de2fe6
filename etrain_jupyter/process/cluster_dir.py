"""State directory of a cluster: its settings, its record, and the files of its processes.

::

    $ETRAIN_STATE, or $XDG_RUNTIME_DIR/etrain, or ~/.local/state/etrain       0700
    ├── start-4f0c21.lock        held while a cluster of this Python environment starts or stops
    └── local-4f0c21-9ab2c3/     0700; removed by the keeper at shutdown; other kinds of pools have
        │                        other prefixes
        ├── settings.json        the cluster's settings
        ├── cluster.json         written last, when the scheduler listens; removed first
        ├── slots.json           worker slots, as detected by the first scheduler
        ├── load.json            number of workers and idle time; see ``Load``
        ├── workers/             one file per worker process: its pid and slot
        ├── held                 number of workers to keep regardless of demand
        ├── jobs/                one folder per unfinished job: what the next scheduler needs
        ├── tls/                 certificates, 0600
        ├── logs/                head.log (keeper and scheduler), and one file per worker
        └── scratch/             Dask's own folders
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import secrets
import shutil
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.processes import kill_processes_of, stamp_of
from etrain_jupyter.process.start_lock import lock_key_of
from etrain_jupyter.process.state_root import local_prefix, package_version, state_root

READY = b"ready\n"
"""Line that a head writes to its launcher once it is serving. Any other line is a start-up
error."""
START_FAILED = 3
"""Exit code of a head that never started serving."""

LOAD_FILE = "load.json"


@dataclass(frozen=True, kw_only=True)
class ClusterRecord:
    """The record of a running cluster, stored as ``cluster.json``."""

    cluster_id: str
    address: str
    pid: int
    """Pid of the keeper; the cluster lives as long as this process."""
    stamp: str
    """Distinguishes the keeper from later processes with its pid; see ``stamp_of``."""
    host: str
    python: str
    version: str
    started_at: float
    """Seconds since the epoch."""
    scheduler_pid: int = 0
    """Pid of the current scheduler; the keeper replaces a scheduler that dies."""
    scheduler_stamp: str = ""
    num_lives: int = 1
    """Incarnation number of the scheduler, starting at 1."""

    @property
    def is_here(self) -> bool:
        """True if the keeper was started on this machine; home folders may be shared by several."""
        return self.host == platform.node()

    @property
    def is_alive(self) -> bool:
        """True if the keeper is running on this machine."""
        return self.is_here and stamp_of(self.pid) == self.stamp

    @property
    def is_serving(self) -> bool:
        """True if the scheduler is running. Otherwise, a running keeper is about to restart it."""
        return self.is_alive and stamp_of(self.scheduler_pid) == self.scheduler_stamp


@dataclass(frozen=True)
class ClusterDir:
    """Folder of one cluster.

    The cluster can be found as long as ``cluster.json`` exists::

        start lock held ──┐  scheduler listens   scheduler dies       idle, or %etrain down
        make ─────────────┴─ publish ─────────── publish (next one) ─ retract ── remove
    """

    path: Path

    @property
    def cluster_id(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def prefix(self) -> str:
        """Id prefix shared by all clusters in the same pool."""
        return self.cluster_id.rpartition("-")[0]

    @property
    def lock_key(self) -> str:
        """Key of the lock held while the cluster starts or stops; see ``start_lock``."""
        return lock_key_of(self.prefix)

    @property
    def tls(self) -> Path:
        """Folder of the certificates."""
        return self.path / "tls"

    @property
    def scratch(self) -> Path:
        """Folder for Dask's own folders."""
        return self.path / "scratch"

    @property
    def jobs(self) -> Path:
        """Folder with the job state that the next scheduler needs."""
        return self.path / "jobs"

    def log(self, name: str) -> Path:
        """Return the log file for ``head`` (keeper and scheduler) or a worker."""
        return self.path / "logs" / f"{name}.log"

    @classmethod
    def create(cls, root: Path, settings: ClusterSettings) -> ClusterDir:
        """Create the folder for a new cluster with a random id."""
        name = f"{settings.prefix or local_prefix()}-{secrets.token_hex(3)}"
        return cls.make(root / name, settings)

    @classmethod
    def make(cls, path: Path, settings: ClusterSettings) -> ClusterDir:
        """Create the folder for a cluster with a given id."""
        new = cls(path)
        new.path.mkdir(mode=0o700)
        new.log("head").parent.mkdir(mode=0o700)
        new.scratch.mkdir(mode=0o700)
        write_private(new.path / "settings.json", json.dumps(dataclasses.asdict(settings)))
        return new

    def settings(self) -> ClusterSettings:
        """Read the cluster's settings."""
        return ClusterSettings(**json.loads((self.path / "settings.json").read_text()))

    def record(self) -> ClusterRecord | None:
        """Read the cluster's record; None while the cluster starts or shuts down."""
        try:
            return ClusterRecord(**json.loads((self.path / "cluster.json").read_text()))
        except (OSError, ValueError, TypeError):
            # Files are replaced atomically, so the record cannot be half-written. Either it is
            # missing, or another version wrote it with different fields (TypeError).
            return None

    def publish(self, address: str, *, keeper: int | None = None, num_lives: int = 1) -> None:
        """Write the record, with this process as the scheduler, so that the cluster can be found.

        Args:
            address: Address on which the scheduler listens.
            keeper: Pid of the keeper; None for this process.
            num_lives: Incarnation number of the scheduler.
        """
        keeper = keeper or os.getpid()
        record = ClusterRecord(
            cluster_id=self.cluster_id,
            address=address,
            pid=keeper,
            stamp=stamp_of(keeper) or "",  # "" matches no process, so the record counts as dead
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
        """Delete the record, so that the cluster can no longer be found."""
        (self.path / "cluster.json").unlink(missing_ok=True)

    def is_published(self) -> bool:
        """Return whether the record exists."""
        return (self.path / "cluster.json").is_file()

    def last_life(self) -> tuple[float, int]:
        """Return when the last scheduler was last known to be alive, and its incarnation number.

        Both are 0 for a new cluster. A cluster being taken over has a record; its scheduler died
        with its keeper.
        """
        record = self.record()
        if record is None:
            return 0.0, 0
        # The time of a keeper's death is not recorded. The scheduler updated these files each time
        # it logged a report, so the newest file was written shortly before the scheduler died.
        signs = [path.stat().st_mtime for path in self.jobs.rglob("*") if path.is_file()]
        return max(signs, default=record.started_at), record.num_lives

    def address(self, record: ClusterRecord) -> SchedulerAddress:
        """Return the scheduler's address, with the folder of the certificates."""
        return SchedulerAddress(
            address=record.address,
            cluster_id=self.cluster_id,
            state_dir=str(self.path),
            tls_dir=str(self.tls),
        )

    def log_tail(self, name: str = "head", num_lines: int = 15) -> str:
        """Return the last lines of a log, for an error message."""
        try:
            lines = self.log(name).read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-num_lines:]) or "(the log is empty)"

    def remove(self) -> None:
        """Delete the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def cluster_dirs(root: Path | None = None) -> list[ClusterDir]:
    """Return the folders of all of this user's clusters, newest first."""
    root = root or state_root()
    found = []
    for path in root.glob("[a-z]*-*-*"):
        # A folder may vanish at any time. ETRAIN_STATE may be in a shared place, where another
        # user's folder or symbolic link could make us connect to that user's scheduler.
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and (path / "settings.json").exists():
                found.append((status.st_mtime, path))
    return [ClusterDir(path) for _, path in sorted(found, reverse=True)]


def remove_stale(root: Path) -> None:
    """Delete what dead clusters left behind. Call only while holding the start lock.

    A folder from this environment that has no record belongs to a head that died during start-up,
    because a head that is still starting would hold the lock. Other environments' folders are kept.
    """
    own = f"{local_prefix()}-"
    for cluster in cluster_dirs(root):
        if not cluster.cluster_id.startswith("local-"):
            continue  # the cluster has remote machines, which a new head can take over
        record = cluster.record()
        # With a home folder on NFS, the record may belong to another host, so only that host can
        # check whether the keeper is running.
        is_stale = (
            record.is_here and not record.is_alive
            if record is not None
            else cluster.cluster_id.startswith(own)
        )
        if is_stale:
            # Processes started by user code may have outlived their trainers.
            kill_processes_of(cluster.cluster_id)
            cluster.remove()


@dataclass(frozen=True, kw_only=True)
class Load:
    """Content of ``load.json``, readable without contacting the scheduler.

    Contacting it requires Dask, whose modules have circular imports, so importing Dask in a
    background thread of the kernel fails if a cell first imports it at the same moment.
    """

    workers: int
    """Number of worker processes, including those still starting."""
    idle_since: float | None
    """When the last job ended, in seconds since the epoch; None while a job runs."""


def write_load(cluster: ClusterDir, load: Load) -> None:
    """Record the load of a cluster.

    Raises:
        OSError: If the cluster's folder was deleted.
    """
    write_private(cluster.path / LOAD_FILE, json.dumps(dataclasses.asdict(load)))


def read_load(cluster: ClusterDir) -> Load | None:
    """Return the recorded load of a cluster, or None if it is not known yet."""
    try:
        return Load(**json.loads((cluster.path / LOAD_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
