"""Base class of pools whose scheduler runs on this machine, detached from the kernel.

``up()`` finds or starts the cluster for a pool and a Python environment. This code may run in the
kernel or in any other process, because it does not own resources. The keeper process owns the
cluster and runs the scheduler process (``etrain_jupyter.head.keeper`` and
``etrain_jupyter.head.main``)::

    kernel                     keeper                        scheduler process
    holds the start lock  -->  inherits lock and pipe  -->   inherits lock and pipe
    waits on the pipe          waits for the scheduler       restores jobs, listens, publishes
                                                             closes its lock descriptor
    reads "ready"  <--------------------------------------   writes "ready" to the pipe
    releases the lock                                        serves
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools.base import Leftovers, Node
from etrain_jupyter.pools.rpc import ANSWER_S, ask, describe_caller
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import READY, ClusterDir, ClusterRecord, cluster_dirs
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.processes import MARKER, kill_processes_of, processes_of, wait_until
from etrain_jupyter.process.start_lock import lock_key_of, start_lock
from etrain_jupyter.process.state_root import open_state_root
from etrain_jupyter.wire.requests import (
    SAVE_S,
    DescribeCluster,
    KillWorker,
    ListNodes,
    ReleaseWorker,
    ShutDownCluster,
    TouchCluster,
    WantWorkers,
)

START_S = 60.0
"""Start timeout in seconds. A start usually takes 1 s, but the first imports may be slow."""
ERROR_PREFIX = f"{PoolError.__name__}: "
"""Prefix of errors that state the cause and the remedy, so they are shown without the log."""


class DetachedPool:
    """A pool with its scheduler on this machine.

    Args:
        name: The pool's name in cells.
        prefix: Prefix of its cluster ids.
        cluster_id: Bind this object to one cluster. By default it uses the pool's running cluster.
    """

    is_head_elsewhere = False

    def __init__(self, *, name: str, prefix: str, cluster_id: str | None = None) -> None:
        self.name = name
        self._prefix = prefix
        self._cluster_id = cluster_id

    def check_machine(self) -> None:
        """Do nothing: the pool needs nothing on this machine."""

    def up(self) -> SchedulerAddress:
        """Find the pool's running cluster or start one; return once its scheduler responds.

        Raises:
            PoolError: If the cluster does not start or does not respond, or if this object is bound
                to a cluster that has ended.
        """
        # First try without the lock, because finding a running cluster is common and must be fast.
        address = self._find()
        if address is None and self._cluster_id is not None:
            raise PoolError(
                f"cluster {self._cluster_id} has ended. Nothing was started in its place. "
                "Run the cell again for a new cluster; `%etrain attach` shows what a past job did."
            )
        return address or self._find_or_start()

    def want(self, n: int, *, reason: str) -> None:
        """Keep at least ``n`` workers even if jobs need fewer; 0 removes the minimum.

        Jobs request their workers themselves. This starts workers before the first job.
        """
        ask(self._address(), WantWorkers(count=n, reason=reason))

    def nodes(self) -> list[Node]:
        """Return the workers, oldest first."""
        records = ask(self._address(), ListNodes()).nodes
        return [
            Node(
                id=record["worker"],
                state=record["state"],
                type=record["type"],
                zone=record.get("zone", ""),
                lifecycle=record.get("lifecycle", "local"),
                price_usd_per_h=record.get("price_usd_per_h") or 0.0,
                pid=record["pid"],
                device=record["device"],
            )
            for record in records
        ]

    def release(self, node_id: str, *, drain_s: float) -> None:
        """Drain a worker and stop it within ``drain_s`` seconds."""
        ask(self._address(), ReleaseWorker(worker=node_id, drain_s=drain_s))

    def kill(self, node_id: str) -> None:
        """Kill a worker or its machine immediately, for fault injection."""
        ask(self._address(), KillWorker(worker=node_id))

    def down(self, *, timeout_s: float = 10.0) -> Leftovers:
        """Save and stop the jobs, then shut down the cluster, by force after ``timeout_s`` seconds.

        Returns:
            Remaining processes and files; empty after success or if no cluster was running.
        """
        ours = [cluster for cluster in cluster_dirs() if self._is_ours(cluster)]
        return Leftovers.of_all([end_cluster_here(cluster, timeout_s) for cluster in ours])

    def settings(self) -> ClusterSettings:
        """Return the settings for a new cluster."""
        raise NotImplementedError

    def prepare_start(self, root: Path) -> ClusterDir | None:
        """Clean up after dead clusters, while holding the start lock.

        Returns:
            The folder of the cluster to take over, if the keeper of one has died; otherwise None.
        """
        raise NotImplementedError

    def _is_ours(self, cluster: ClusterDir) -> bool:
        if self._cluster_id is not None:
            return cluster.cluster_id == self._cluster_id
        return cluster.prefix == self._prefix

    def _is_usable(self, cluster: ClusterDir) -> bool:
        """Return whether this kernel's jobs may run on a cluster of the pool."""
        return self._is_ours(cluster)

    def _address(self) -> SchedulerAddress:
        for cluster in filter(self._is_usable, cluster_dirs()):
            record = _serving_record(cluster)
            if record is not None and record.is_alive:
                return cluster.address(record)
        raise PoolError(
            f"no {self.name} cluster is up for this Python environment. Nothing was done. "
            "A cell with %%etrain distributed starts one; `%etrain pools` lists running clusters."
        )

    def _find(self) -> SchedulerAddress | None:
        # Newest first: if there are several clusters, use the one started last.
        for cluster in filter(self._is_usable, cluster_dirs()):
            record = _serving_record(cluster)
            if record is not None and record.is_alive and _answers(cluster, record):
                return cluster.address(record)
        return None

    def _find_or_start(self) -> SchedulerAddress:
        settings = self.settings()
        root = open_state_root()
        try:
            with start_lock(root, lock_key_of(self._prefix), timeout_s=START_S) as lock_fd:
                # Another kernel may have started the cluster while this one waited for the lock.
                address = self._find()
                if address is not None:
                    return address
                # Hold the lock while dead heads are removed or taken over, so that no other head
                # starts.
                orphan = self.prepare_start(root)
                print(f"etrain: starting the scheduler of pool {self.name}", flush=True)
                return start_cluster(root, settings, lock_fd, orphan)
        except TimeoutError as exc:
            raise PoolError(
                f"{exc} for {START_S:g} s: another kernel is starting a cluster and has stalled. "
                f"Nothing was started. See the logs under {root}, or run `%etrain down`."
            ) from exc


def _serving_record(cluster: ClusterDir) -> ClusterRecord | None:
    """Return a cluster's record. If its scheduler has died, wait until the keeper restarts it."""

    def is_complete() -> bool:
        record = cluster.record()
        return record is None or record.is_serving or not record.is_alive

    # The keeper restarts a dead scheduler within seconds, usually at the same address.
    wait_until(is_complete, timeout_s=ANSWER_S)
    return cluster.record()


def _answers(cluster: ClusterDir, record: ClusterRecord) -> bool:
    """Return True if a cluster's scheduler responds; raise ``PoolError`` if it runs but hangs."""
    try:
        # Restart the idle timer, so that the cluster does not shut down before the submit.
        ask(cluster.address(record), TouchCluster(), timeout_s=ANSWER_S)
        return True
    except PoolError:
        # The cluster may have ended since its record was read. The failed request is an error only
        # if the cluster is still running.
        if cluster.is_published() and record.is_alive:
            raise
        return False


def start_cluster(
    root: Path, settings: ClusterSettings, lock_fd: int, orphan: ClusterDir | None
) -> SchedulerAddress:
    """Start a keeper and wait until its scheduler listens; clean up if it does not.

    The scheduler process releases ``lock_fd``, the start lock. ``orphan`` is a cluster whose keeper
    has died and whose machines are taken over.
    """
    # An orphan keeps its settings, jobs and machines.
    cluster = orphan or ClusterDir.create(root, settings)
    read_fd, write_fd = os.pipe()
    try:
        with os.fdopen(read_fd, "rb", buffering=0) as pipe:
            # Close our write end once the keeper has it, so that we read EOF if keeper and
            # scheduler die.
            with os.fdopen(write_fd, "wb", buffering=0):
                _spawn_keeper(cluster, lock_fd, write_fd)
            # The next request needs this module. Import it now, in parallel with the scheduler
            # process.
            import distributed  # noqa: F401

            _await_ready(cluster, pipe)
        # The scheduler may already have shut down again, for example because of `%etrain down` in a
        # terminal.
        record = cluster.record()
        if record is None:
            raise PoolError(
                f"cluster {cluster.cluster_id} ended right after it started. Run the cell again."
            )
        return cluster.address(record)
    except PoolError:
        kill_processes_of(cluster.cluster_id)
        # Keep an orphan's folder, because the next attempt needs it to take over the machines.
        if orphan is None:
            cluster.remove()
        raise


def _spawn_keeper(cluster: ClusterDir, lock_fd: int, ready_fd: int) -> None:
    """Start the keeper, which detaches itself from the kernel's process group."""
    # -P: a file in the notebook's folder must not shadow a module.
    command = [sys.executable, "-P", "-m", "etrain_jupyter.head.keeper", str(cluster.path)]
    log = os.open(cluster.log("head"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        launched = subprocess.Popen(
            [*command, "--lock-fd", str(lock_fd), "--ready-fd", str(ready_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_head_environment(cluster.cluster_id),
            cwd=cluster.path,
            start_new_session=True,
            pass_fds=(lock_fd, ready_fd),
        )
    finally:
        os.close(log)
    # The process forks and exits at once; the keeper is its child; see `keeper.detach`.
    launched.wait(START_S)


def _head_environment(cluster_id: str) -> dict[str, str]:
    """Return the kernel's environment without Jupyter's own variables, plus the cluster marker."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("JPY_")}
    # setproctitle would overwrite the environment block, and with it the marker.
    kept |= {MARKER: cluster_id, "SPT_NOENV": "1"}
    package_home = Path(__file__).parents[2]
    installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    if package_home not in installed:
        # A source tree may be only on the kernel's sys.path.
        kept["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(package_home), os.environ.get("PYTHONPATH")))
        )
    return kept


def _await_ready(cluster: ClusterDir, pipe: IO[bytes]) -> None:
    """Wait until the scheduler process is listening; raise ``PoolError`` if it fails to start."""
    deadline = time.monotonic() + START_S
    line = b""
    while not line.endswith(b"\n"):
        # Not select(), which rejects descriptors above 1023, because notebooks open many files.
        if not wait([pipe.fileno()], max(0.0, deadline - time.monotonic())):
            raise PoolError(
                f"the cluster did not start within {START_S:g} s. It was stopped. "
                f"Run the cell again. End of its log:\n{cluster.log_tail()}"
            )
        chunk = pipe.read(4096)
        # An empty read means EOF: all holders of the write end have exited.
        line += chunk or b"its process died\n"
    if line != READY:
        cause = line.decode(errors="replace").strip()
        if cause.startswith(ERROR_PREFIX):
            raise PoolError(f"the cluster did not start: {cause.removeprefix(ERROR_PREFIX)}")
        raise PoolError(
            f"the cluster did not start: {cause}. It was cleaned up. Run `%etrain doctor` to "
            f"check the installation. End of its log:\n{cluster.log_tail()}"
        )


def end_cluster_here(cluster: ClusterDir, timeout_s: float) -> Leftovers:
    """Shut down a cluster on this machine: by request, then with SIGTERM, then with SIGKILL.

    The jobs save first, for at most ``SAVE_S``. The three steps may then take 0.6, 0.2 and 0.2 of
    ``timeout_s``. SIGKILL is sent to every process that has the cluster's marker in its
    environment.
    """
    record = cluster.record()
    if record is not None and not record.is_here:
        # Machines share the state directory, and this cluster runs on another one.
        return Leftovers()
    if record is not None and record.is_alive:
        _stop_scheduler(cluster.address(record), record, timeout_s)
    elif record is None:
        # The cluster is starting or shutting down. Allow time for the latter.
        wait_until(lambda: not processes_of(cluster.cluster_id), timeout_s=timeout_s * 0.6)
    left = kill_processes_of(cluster.cluster_id, timeout_s=max(1.0, timeout_s * 0.2))
    cluster.remove()
    return Leftovers(
        processes=tuple(f"{process.pid} of {cluster.cluster_id}" for process in left),
        files=(str(cluster.path),) if cluster.path.exists() else (),
    )


def _stop_scheduler(address: SchedulerAddress, record: ClusterRecord, timeout_s: float) -> None:
    """Request a shutdown; send SIGTERM to the keeper if the scheduler does not shut down."""
    with contextlib.suppress(PoolError):
        # A scheduler that hangs cannot save, so detect that before the long wait for checkpoints.
        ask(address, DescribeCluster(), timeout_s=min(2.0, timeout_s))
        ask(address, ShutDownCluster(by=describe_caller()), timeout_s=SAVE_S + ANSWER_S)
        wait_until(lambda: not record.is_alive, timeout_s=timeout_s * 0.6)
    if record.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
        wait_until(lambda: not record.is_alive, timeout_s=timeout_s * 0.2)
