"""The embedded pool: processes on this machine, detached from the kernel that started them.

``LocalPool().up()`` finds the cluster of this user and Python environment or starts it. Everything
here runs in the kernel (or in any other process) and owns nothing: the keeper process owns the
cluster, see ``local_keeper``; the scheduler under it is another process, see ``local_head``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools.base import CostReport, Leftovers, Node, SchedulerAddress
from etrain_jupyter.pools.state_dir import (
    MARKER,
    READY,
    ClusterDir,
    ClusterRecord,
    LocalSettings,
    cluster_dirs,
    environment_key,
    kill_processes_of,
    open_state_root,
    processes_of,
    remove_stale,
    start_lock,
    state_root,
    wait_until,
)

START_S = 60.0
"""How long a start may take. Usual is 1 s, but a machine's first import of everything is slow."""
ANSWER_S = 10.0


class LocalPool:
    """Workers on this machine: one a GPU, else CPU slots.

    Args:
        cluster_id: Bind the object to that cluster, instead of the one of this Python environment.
        settings: How a cluster that has to be started shall behave; by default what the environment
            says.
    """

    def __init__(
        self, *, cluster_id: str | None = None, settings: LocalSettings | None = None
    ) -> None:
        self._cluster_id = cluster_id
        self._settings = settings

    def up(self) -> SchedulerAddress:
        """Find the living cluster of this environment, else start one; return once it serves.

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
        ask(self._address(), "etrain_pool_want", count=n, reason=reason)

    def nodes(self) -> list[Node]:
        """Return the worker processes, the oldest first."""
        records = ask(self._address(), "etrain_pool_nodes")["nodes"]
        return [
            Node(
                id=record["worker"],
                state=record["state"],
                type=record["type"],
                pid=record["pid"],
                device=record["device"],
            )
            for record in records
        ]

    def release(self, node_id: str, *, drain_s: float) -> None:
        """End a worker gently; it has ``drain_s`` seconds."""
        ask(self._address(), "etrain_pool_release", worker=node_id, drain_s=drain_s)

    def kill(self, node_id: str) -> None:
        """SIGKILL a worker: a fault on purpose."""
        ask(self._address(), "etrain_pool_kill", worker=node_id)

    def cost(self) -> CostReport:
        """Return zeros: your own machine is free."""
        return CostReport()

    def down(self, *, timeout_s: float = 10.0) -> Leftovers:
        """End the cluster with all its jobs, gently for ``timeout_s`` seconds and then by force.

        Returns:
            What is still there; empty when all is well, also if there was no cluster.
        """
        ours = [cluster for cluster in cluster_dirs() if self._is_ours(cluster)]
        ends = [_end_cluster(cluster, timeout_s) for cluster in ours]
        return Leftovers(
            processes=tuple(process for end in ends for process in end.processes),
            files=tuple(file for end in ends for file in end.files),
        )

    def _is_ours(self, cluster: ClusterDir) -> bool:
        if self._cluster_id is not None:
            return cluster.cluster_id == self._cluster_id
        return cluster.cluster_id.startswith(f"local-{environment_key()}-")

    def _address(self) -> SchedulerAddress:
        """Return where the cluster is, without starting one and without asking it."""
        for cluster in filter(self._is_ours, cluster_dirs()):
            record = _serving_record(cluster)
            if record is not None and record.is_alive:
                return cluster.address(record)
        raise PoolError(
            "no local cluster is up for this Python environment. Nothing was done. "
            "A cell with %%etrain distributed starts one; `%etrain pools` lists what there is."
        )

    def _find(self) -> SchedulerAddress | None:
        for cluster in filter(self._is_ours, cluster_dirs()):
            record = _serving_record(cluster)
            if record is not None and record.is_alive and _answers(cluster, record):
                return cluster.address(record)
        return None

    def _find_or_start(self) -> SchedulerAddress:
        settings = self._settings or LocalSettings.from_environment()
        root = open_state_root()
        try:
            with start_lock(root, environment_key(), timeout_s=START_S) as lock_fd:
                # Another kernel may have started it while we waited.
                address = self._find()
                if address is not None:
                    return address
                remove_stale(root)
                return _start_cluster(root, settings, lock_fd)
        except TimeoutError as exc:
            raise PoolError(
                f"{exc} for {START_S:g} s: another kernel is starting a cluster and does not get "
                f"on. This one waits no longer. See the logs under {root}, or type `%etrain down`."
            ) from exc


def find_clusters() -> list[SchedulerAddress]:
    """Return this user's living clusters on this machine, the newest first."""
    found = []
    for cluster in cluster_dirs():
        record = cluster.record()
        if record is not None and record.is_alive:
            found.append(cluster.address(record))
    return found


def find_remains() -> list[str]:
    """Return the ids of this user's clusters on this machine, living, starting, ending or dead."""
    records = [(cluster.cluster_id, cluster.record()) for cluster in cluster_dirs()]
    return [cluster_id for cluster_id, record in records if record is None or record.is_here]


def ask(
    address: SchedulerAddress, op: str, *, timeout_s: float = ANSWER_S, **arguments: Any
) -> dict[str, Any]:
    """Call a handler of a cluster's scheduler and wait for its answer.

    It may be called where an event loop runs already, as in a kernel.

    Raises:
        PoolError: If there is no answer in time, or the answer is an error.
    """
    try:
        # The kernel's own thread runs an event loop already, so the question gets another thread.
        with ThreadPoolExecutor(1, thread_name_prefix="etrain-pool-ask") as thread:
            exchange = _exchange(address, op, timeout_s, arguments)
            answer = thread.submit(asyncio.run, exchange).result()
    except (OSError, TimeoutError) as exc:
        raise PoolError(
            f"the scheduler of cluster {address.cluster_id} at {address.address} did not answer "
            f"{op} within {timeout_s:g} s ({exc or type(exc).__name__}). Nothing was changed. "
            "Try again; `%etrain doctor` says more, and `%etrain down` ends the cluster."
        ) from exc
    if not isinstance(answer, dict):
        raise PoolError(
            f"the scheduler at {address.address} runs no etrain coordinator, or no longer. Nothing "
            "was changed. A cell with %%etrain distributed puts one there."
        )
    if "error" in answer:
        raise PoolError(str(answer.get("message") or answer["error"]))
    return answer


async def _exchange(
    address: SchedulerAddress, op: str, timeout_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    from distributed import core

    rpc: Any = core.rpc
    async with asyncio.timeout(timeout_s):
        scheduler = rpc(
            address.address, timeout=timeout_s, connection_args=address.connection_args()
        )
        try:
            answer: dict[str, Any] = await getattr(scheduler, op)(**arguments)
            return answer
        finally:
            await scheduler.close_rpc()


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
        ask(cluster.address(record), "etrain_pool_touch", timeout_s=ANSWER_S)
        return True
    except PoolError:
        # It may have ended between our look and our question.
        if cluster.is_published() and record.is_alive:
            raise
        return False


def _start_cluster(root: Path, settings: LocalSettings, lock_fd: int) -> SchedulerAddress:
    """Start a head and wait until it serves; remove everything if it does not."""
    cluster = ClusterDir.create(root, settings)
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
        cluster.remove()
        raise


def _spawn_keeper(cluster: ClusterDir, lock_fd: int, ready_fd: int) -> None:
    """Start the keeper, which detaches itself: no signal to the kernel's group reaches it."""
    # -P: a file of the notebook's folder must not hide a module.
    command = [sys.executable, "-P", "-m", "etrain_jupyter.pools.local_keeper", str(cluster.path)]
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
                f"the local cluster did not start within {START_S:g} s. It was ended. "
                f"Run the cell again; the end of its log:\n{cluster.log_tail()}"
            )
        chunk = pipe.read(4096)
        heard += chunk or b"it died\n"
    if heard != READY:
        raise PoolError(
            f"the local cluster did not start: {heard.decode(errors='replace').strip()}. Nothing "
            "is left of it. `%etrain doctor` checks the installation; the end of its log:\n"
            f"{cluster.log_tail()}"
        )


def _end_cluster(cluster: ClusterDir, timeout_s: float) -> Leftovers:
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
        ask(address, "etrain_down", timeout_s=min(2.0, timeout_s))
        wait_until(lambda: not record.is_alive, timeout_s=timeout_s * 0.6)
    if record.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
        wait_until(lambda: not record.is_alive, timeout_s=timeout_s * 0.2)


def load_in_words(facts: Mapping[str, Any]) -> str:
    """Return how many workers and jobs a cluster has, and how long it has been without any.

    >>> load_in_words({"workers": 1, "jobs": 0, "idle_s": 7.4})
    '1 worker, no job, idle for 7 s'
    """
    num_workers, num_jobs = facts["workers"], facts["jobs"]
    workers = f"{num_workers} worker" + ("" if num_workers == 1 else "s")
    if not num_jobs:
        return f"{workers}, no job, idle for {facts['idle_s']:.0f} s"
    return f"{workers}, {num_jobs} job" + ("" if num_jobs == 1 else "s")


def describe() -> str:
    """Return one line for each living cluster, for `%etrain pools`."""
    lines = []
    for address in find_clusters():
        try:
            state = load_in_words(ask(address, "etrain_describe", timeout_s=3.0))
        except PoolError as exc:
            state = str(exc)
        lines.append(f"{address.cluster_id} at {address.address}: {state}")
    return "\n".join(lines) or f"no cluster is up (state directory: {state_root()})"
