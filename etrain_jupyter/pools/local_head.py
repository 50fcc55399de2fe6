"""The head of a local cluster: ``python -m etrain_jupyter.pools.local_head STATE_DIR``.

Detached from the kernel: one process with the Dask scheduler, the coordinator in it, and the worker
processes under it. It ends by itself when no job has been there for a while, and takes everything
with it. It imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from etrain_jupyter.pools.local_nodes import (
    LocalNodes,
    Slot,
    finish_gpu_query,
    make_slots,
    start_gpu_query,
)
from etrain_jupyter.pools.local_worker import load_factory, log_to_stderr
from etrain_jupyter.pools.state_dir import (
    READY,
    ClusterDir,
    environment_key,
    kill_processes_of,
    remove_start_lock,
    start_lock,
)
from etrain_jupyter.pools.tls import (
    check_listen,
    configure_dask,
    mint_certificates,
    read_security,
    without_http,
    write_certificates,
)

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
GPU_QUERY_S = 10.0
WORKERS_END_S = 4.0
"""How long workers may take to end gently when the cluster goes down."""


class Head:
    """The scheduler of a local cluster and what belongs to it.

    Args:
        cluster: Its folder.
        slots: Room for workers.
    """

    def __init__(self, cluster: ClusterDir, slots: list[Slot]) -> None:
        self._cluster = cluster
        self._settings = cluster.settings()
        self._stop = asyncio.Event()
        self._touched_at = time.monotonic()
        self.nodes = LocalNodes(
            slots,
            self._spawn,
            is_connected=lambda name: name in self.scheduler.aliases,
            linger_s=self._settings.linger_s,
        )
        self.coordinator = load_factory(self._settings.coordinator)(
            self.nodes, cluster_id=cluster.cluster_id, on_shutdown=self._stop.set
        )
        # A coordinator that knows which workers are in use lets us end the others while a job runs.
        self.nodes.is_busy = getattr(self.coordinator, "is_busy", None)
        self.scheduler = self._make_scheduler()

    async def start(self) -> None:
        """Listen, and let the world know."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self.nodes.reap)
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        await self.scheduler
        self.scheduler.handlers |= {
            "etrain_pool_touch": self._touch,
            "etrain_pool_want": self._want,
            "etrain_pool_nodes": self._list_nodes,
            "etrain_pool_release": self._release,
            "etrain_pool_kill": self._kill,
        }
        self._cluster.publish(self.scheduler.address)
        logger.info("cluster %s serves at %s", self._cluster.cluster_id, self.scheduler.address)

    async def serve(self) -> None:
        """Return when the cluster shall end."""
        while not (self._stop.is_set() or self._is_closed() or self._is_idle()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), min(1.0, self._settings.idle_s / 4))

    async def close(self) -> None:
        """End the workers, then the scheduler."""
        self._cluster.retract()
        await self.nodes.close(grace_s=WORKERS_END_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.scheduler.close(reason="the cluster ends"), WORKERS_END_S)

    def _make_scheduler(self) -> Any:
        from distributed import Scheduler

        security = read_security(self._cluster.tls, "scheduler")
        check_listen(HOST, security)
        return without_http(Scheduler)(
            host=HOST,
            port=0,
            protocol="tls",
            security=security,
            dashboard=False,
            plugins=[self.coordinator],
        )

    def _is_closed(self) -> bool:
        """Tell whether somebody closed the scheduler through Dask itself."""
        return self.scheduler.status.name in ("closing", "closed", "failed")

    def _is_idle(self) -> bool:
        idle_s: float = self.coordinator.idle_s()
        if idle_s > 0 and not self._cluster.is_published():
            logger.info("the record is gone, so that nobody can find this cluster: it ends")
            return True
        # A kernel that has just found us is about to submit.
        idle_s = min(idle_s, time.monotonic() - self._touched_at)
        if idle_s < self._settings.idle_s:
            return False
        logger.info("no job for %.0f s: the cluster ends", idle_s)
        return True

    def _spawn(self, name: str, slot: Slot) -> subprocess.Popen[bytes]:
        flags = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *flags, "-m", "etrain_jupyter.pools.local_worker"]
        options = {
            "scheduler": self.scheduler.address,
            "name": name,
            "device": slot.device,
            "supervisor": self._settings.supervisor,
            "parent": str(os.getpid()),
        }
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        log = os.open(self._cluster.log(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return subprocess.Popen(
                [*command, str(self._cluster.path), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | slot.environment,
                process_group=0,
            )
        finally:
            os.close(log)

    # --- what the kernel may call ---

    async def _touch(self) -> dict[str, Any]:
        self._touched_at = time.monotonic()
        return {"cluster_id": self._cluster.cluster_id, "pid": os.getpid()}

    async def _want(self, count: int, reason: str = "") -> dict[str, Any]:
        self.nodes.hold(count, reason=reason)
        return {}

    async def _list_nodes(self) -> dict[str, Any]:
        return {"nodes": self.nodes.nodes()}

    async def _release(self, worker: str, drain_s: float) -> dict[str, Any]:
        self.nodes.release(worker, drain_s=drain_s)
        return {}

    async def _kill(self, worker: str) -> dict[str, Any]:
        self.nodes.kill(worker)
        return {}


async def run_head(cluster: ClusterDir, slots: list[Slot], lock_fd: int, ready_fd: int) -> None:
    """Start, tell the launcher, serve, and end."""
    head = Head(cluster, slots)
    try:
        await head.start()
        os.close(lock_fd)
        tell_launcher(ready_fd, READY)
        await head.serve()
        await end_cluster(head, cluster)
    except BaseException:
        await head.nodes.close(grace_s=0)
        raise


async def end_cluster(head: Head, cluster: ClusterDir) -> None:
    """End everything under the head and remove the cluster's folder.

    Whoever wants a cluster meanwhile waits for the lock, until this one is gone.
    """
    root, key = cluster.path.parent, environment_key()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(start_lock(root, key, timeout_s=1.0))
            stack.callback(remove_start_lock, root, key)
        except TimeoutError:
            logger.warning("another cluster is starting; this one ends beside it")
        await end_all(head, cluster)


async def end_all(head: Head, cluster: ClusterDir) -> None:
    """End the processes, then remove the folder."""
    await head.close()
    # Trainers end with their workers; what user code has started may not.
    kill_processes_of(cluster.cluster_id)
    logger.info("cluster %s has ended", cluster.cluster_id)
    cluster.remove()


def tell_launcher(ready_fd: int, words: bytes) -> None:
    """Write one line to the launcher, if that still lives and still listens."""
    with contextlib.suppress(OSError):
        os.write(ready_fd, words)
        os.close(ready_fd)


def root_of(error: BaseException) -> str:
    """Return the first cause of an error in one line: Dask wraps what a plugin raises."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def detach() -> None:
    """Go on in a child of init: the kernel need not reap us, nor can its end reach us."""
    if os.fork():
        os._exit(0)
    # The launcher has made the session; a hang-up or an interrupt could only come from a mistake. A
    # handler that does nothing is not inherited by workers, unlike SIG_IGN.
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read what the launcher gave."""
    parser = argparse.ArgumentParser(prog="etrain-local-head")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--lock-fd", type=int, required=True, help="open file that holds the lock")
    parser.add_argument("--ready-fd", type=int, required=True, help="pipe to the launcher")
    return parser.parse_args(words)


def main() -> None:
    """Run the head until its cluster has ended."""
    arguments = parse_arguments()
    cluster = ClusterDir(arguments.state_dir)
    detach()
    log_to_stderr()
    # The driver takes its time; meanwhile we import and mint.
    query = start_gpu_query()
    code = 0
    try:
        configure_dask(cluster.scratch)
        write_certificates(cluster.tls, mint_certificates(cluster.cluster_id))
        gpus = finish_gpu_query(query, timeout_s=GPU_QUERY_S)
        slots = make_slots(gpus, max_cpu_slots=cluster.settings().max_cpu_slots)
        asyncio.run(run_head(cluster, slots, arguments.lock_fd, arguments.ready_fd))
    except BaseException as error:
        logger.exception("the head of cluster %s failed", cluster.cluster_id)
        tell_launcher(arguments.ready_fd, f"{root_of(error)}\n".encode())
        code = 1
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
