"""Pools whose head runs on this machine, detached from the kernel that started it.

``up()`` finds the cluster of a pool and Python environment or starts it. Everything here runs in
the kernel (or in any other process) and owns nothing: the keeper process owns the cluster, see
``local_keeper``; the scheduler under it is another process, see ``local_head``.
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
from etrain_jupyter.pools.rpc import ANSWER_S, ask
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import (
    MARKER,
    READY,
    ClusterDir,
    ClusterRecord,
    LocalSettings,
    cluster_dirs,
    kill_processes_of,
    lock_key_of,
    open_state_root,
    processes_of,
    start_lock,
    wait_until,
)
from etrain_jupyter.wire.requests import (
    KillWorker,
    ListNodes,
    ReleaseWorker,
    ShutDownCluster,
    TouchCluster,
    WantWorkers,
)

START_S = 60.0
"""How long a start may take. Usual is 1 s, but a machine's first import of everything is slow."""
OWN_WORDS = f"{PoolError.__name__}: "
"""Before what a head says in words of ours, which need no log beside them."""


class DetachedPool:
    """A pool with its head on this machine.

    Args:
        name: What a cell calls it.
        prefix: What the ids of its clusters begin with.
        cluster_id: Bind the object to that cluster, instead of the living one of the pool.
    """

    is_head_elsewhere = False

    def __init__(self, *, name: str, prefix: str, cluster_id: str | None = None) -> None:
        self.name = name
        self._prefix = prefix
        self._cluster_id = cluster_id

    def up(self) -> SchedulerAddress:
        """Find the living cluster of the pool, else start one; return once it serves.

        Raises:
            PoolError: If it does not start or does not answer, or if the one that this object is
                bound to has ended.
        """
        address = self._find()
        if address is None and self._cluster_id is not None:
            raise PoolError(
                f"cluster {self._cluster_id} has ended. Nothing was started in its place. "
                "Run the cell again for a new cluster; `%etrain attach` shows what a past job did."
            )
        return address or self._find_or_start()

    def want(self, n: int, *, reason: str) -> None:
        """Keep at least ``n`` workers whatever the jobs need; 0 leaves it to the jobs again.

        Jobs ask for their workers by themselves, inside the head. This warms workers up before.
        """
        ask(self._address(), WantWorkers(count=n, reason=reason))

    def nodes(self) -> list[Node]:
        """Return the workers, the oldest first."""
        records = ask(self._address(), ListNodes()).nodes
        return [
            Node(
                id=record["worker"],
                state=record["state"],
                type=record["type"],
                zone=record.get("zone", ""),
                lifecycle=record.get("lifecycle", "local"),
                price_usd_per_h=record.get("price_usd_per_h", 0.0),
                pid=record["pid"],
                device=record["device"],
            )
            for record in records
        ]

    def release(self, node_id: str, *, drain_s: float) -> None:
        """End a worker gently; it has ``drain_s`` seconds."""
        ask(self._address(), ReleaseWorker(worker=node_id, drain_s=drain_s))

    def kill(self, node_id: str) -> None:
        """End a worker with SIGKILL, or its machine at once: a fault on purpose."""
        ask(self._address(), KillWorker(worker=node_id))

    def down(self, *, timeout_s: float = 10.0) -> Leftovers:
        """End the cluster with all its jobs, gently for ``timeout_s`` seconds and then by force.

        Returns:
            What is still there; empty when all is well, also if there was no cluster.
        """
        ours = [cluster for cluster in cluster_dirs() if self._is_ours(cluster)]
        ends = [end_cluster_here(cluster, timeout_s) for cluster in ours]
        return Leftovers.of_all(ends)

    def settings(self) -> LocalSettings:
        """Return how a cluster that has to be started shall behave."""
        raise NotImplementedError

    def prepare_start(self, root: Path) -> ClusterDir | None:
        """Clear up under the start lock; return the folder of a cluster to be taken over, if any.

        Args:
            root: The state directory.
        """
        raise NotImplementedError

    def _is_ours(self, cluster: ClusterDir) -> bool:
        if self._cluster_id is not None:
            return cluster.cluster_id == self._cluster_id
        return cluster.prefix == self._prefix

    def _address(self) -> SchedulerAddress:
        """Return where the cluster is, without starting one and without asking it."""
        for cluster in filter(self._is_ours, cluster_dirs()):
            record = _serving_record(cluster)
            if record is not None and record.is_alive:
                return cluster.address(record)
        raise PoolError(
            f"no {self.name} cluster is up for this Python environment. Nothing was done. "
            "A cell with %%etrain distributed starts one; `%etrain pools` lists what there is."
        )

    def _find(self) -> SchedulerAddress | None:
        for cluster in filter(self._is_ours, cluster_dirs()):
            record = _serving_record(cluster)
            if record is not None and record.is_alive and _answers(cluster, record):
                return cluster.address(record)
        return None

    def _find_or_start(self) -> SchedulerAddress:
        settings = self.settings()
        root = open_state_root()
        try:
            with start_lock(root, lock_key_of(self._prefix), timeout_s=START_S) as lock_fd:
                # Another kernel may have started it while we waited.
                address = self._find()
                if address is not None:
                    return address
                orphan = self.prepare_start(root)
                return start_cluster(root, settings, lock_fd, orphan)
        except TimeoutError as exc:
            raise PoolError(
                f"{exc} for {START_S:g} s: another kernel is starting a cluster and does not get "
                f"on. This one waits no longer. See the logs under {root}, or type `%etrain down`."
            ) from exc


def _serving_record(cluster: ClusterDir) -> ClusterRecord | None:
    """Return a cluster's record; if its scheduler has died, once another one serves."""

    def is_complete() -> bool:
        record = cluster.record()
        return record is None or record.is_serving or not record.is_alive

    wait_until(is_complete, timeout_s=ANSWER_S)
    return cluster.record()


def _answers(cluster: ClusterDir, record: ClusterRecord) -> bool:
    """Tell whether a cluster is there for us, and make it stay for its idle time.

    Raises:
        PoolError: If its head runs, but is silent.
    """
    try:
        ask(cluster.address(record), TouchCluster(), timeout_s=ANSWER_S)
        return True
    except PoolError:
        # It may have ended between our look and our question.
        if cluster.is_published() and record.is_alive:
            raise
        return False


def start_cluster(
    root: Path, settings: LocalSettings, lock_fd: int, orphan: ClusterDir | None
) -> SchedulerAddress:
    """Start a head and wait until it serves; remove everything if it does not.

    Args:
        root: The state directory.
        settings: How the cluster shall behave.
        lock_fd: The lock, for the head to let go.
        orphan: A cluster without a keeper, to be taken over with its machines.
    """
    cluster = orphan or ClusterDir.create(root, settings)
    read_fd, write_fd = os.pipe()
    try:
        with os.fdopen(read_fd, "rb", buffering=0) as pipe:
            with os.fdopen(write_fd, "wb", buffering=0):
                _spawn_keeper(cluster, lock_fd, write_fd)
            # We need it in a moment to talk to the head, which is loading it as well just now.
            import distributed  # noqa: F401

            _await_ready(cluster, pipe)
        record = cluster.record()
        if record is None:
            raise PoolError(
                f"cluster {cluster.cluster_id} ended as soon as it had started. Run the cell again."
            )
        return cluster.address(record)
    except PoolError:
        kill_processes_of(cluster.cluster_id)
        if orphan is None:
            cluster.remove()
        raise


def _spawn_keeper(cluster: ClusterDir, lock_fd: int, ready_fd: int) -> None:
    """Start the keeper, which detaches itself: no signal to the kernel's group reaches it."""
    # -P: a file of the notebook's folder must not hide a module.
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
    launched.wait(START_S)


def _head_environment(cluster_id: str) -> dict[str, str]:
    """Return the kernel's variables without those that only concern it, and with our marker."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("JPY_")}
    # setproctitle, if it is installed, would write over the variables by which we find processes.
    kept |= {MARKER: cluster_id, "SPT_NOENV": "1"}
    package_home = Path(__file__).parents[2]
    installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    if package_home not in installed:
        # Run from a source tree that is perhaps only on the kernel's own path.
        kept["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(package_home), os.environ.get("PYTHONPATH")))
        )
    return kept


def _await_ready(cluster: ClusterDir, pipe: IO[bytes]) -> None:
    """Wait until the head says that it serves, or why it does not.

    Raises:
        PoolError: If it ends before, or takes too long.
    """
    deadline = time.monotonic() + START_S
    heard = b""
    while not heard.endswith(b"\n"):
        # Not select(), which refuses descriptors above 1023; notebooks open many files.
        if not wait([pipe.fileno()], max(0.0, deadline - time.monotonic())):
            raise PoolError(
                f"the cluster did not start within {START_S:g} s. It was ended. "
                f"Run the cell again; the end of its log:\n{cluster.log_tail()}"
            )
        chunk = pipe.read(4096)
        heard += chunk or b"it died\n"
    if heard != READY:
        words = heard.decode(errors="replace").strip()
        if words.startswith(OWN_WORDS):
            raise PoolError(f"the cluster did not start: {words.removeprefix(OWN_WORDS)}")
        raise PoolError(
            f"the cluster did not start: {words}. Nothing is left of it here. `%etrain doctor` "
            f"checks the installation; the end of its log:\n{cluster.log_tail()}"
        )


def end_cluster_here(cluster: ClusterDir, timeout_s: float) -> Leftovers:
    """Ask the head to end; then tell it; then end all that carries the cluster's mark."""
    record = cluster.record()
    if record is not None and not record.is_here:
        # The state directory is shared by machines, and this cluster is on another one.
        return Leftovers()
    if record is not None and record.is_alive:
        _end_head(cluster.address(record), record, timeout_s)
    elif record is None:
        # It is starting or ending; the latter takes a moment.
        wait_until(lambda: not processes_of(cluster.cluster_id), timeout_s=timeout_s * 0.6)
    left = kill_processes_of(cluster.cluster_id, timeout_s=max(1.0, timeout_s * 0.2))
    cluster.remove()
    return Leftovers(
        processes=tuple(f"{process.pid} of {cluster.cluster_id}" for process in left),
        files=(str(cluster.path),) if cluster.path.exists() else (),
    )


def _end_head(address: SchedulerAddress, record: ClusterRecord, timeout_s: float) -> None:
    """Ask the head to end, and to a head that does not listen send SIGTERM."""
    with contextlib.suppress(PoolError):
        ask(address, ShutDownCluster(), timeout_s=min(2.0, timeout_s))
        wait_until(lambda: not record.is_alive, timeout_s=timeout_s * 0.6)
    if record.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
        wait_until(lambda: not record.is_alive, timeout_s=timeout_s * 0.2)
