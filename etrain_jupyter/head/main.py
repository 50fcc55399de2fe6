"""The scheduler process of a cluster: ``python -m etrain_jupyter.head.main STATE_DIR``.

The keeper starts it. It runs the Dask scheduler with the coordinator as a plugin, and starts and
stops the workers. After ``idle_s`` seconds without a job it exits, which shuts down the cluster. If
it dies, the keeper starts another one, which adopts the workers::

    keeper ── starts ──> scheduler 1 ── starts ──> workers
           ── restarts ─> scheduler 2 ── adopts ──> the same workers

Never imports torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import PoolError
from etrain_jupyter.head.interfaces import HeadCoordinator, HeadFacts, HeadNodes
from etrain_jupyter.plugin import load
from etrain_jupyter.process.cluster_dir import READY, START_FAILED, ClusterDir, Load, write_load
from etrain_jupyter.process.entry import collect_garbage_rarely, die_with_parent, log_to_stderr
from etrain_jupyter.process.peers import WORKER_REQUESTS, restricted
from etrain_jupyter.process.start_lock import start_lock
from etrain_jupyter.process.tls import (
    check_listen,
    configure_dask,
    mint_certificates,
    read_security,
    without_http,
    write_certificates,
)
from etrain_jupyter.wire import requests as q

logger = logging.getLogger(__name__)

SAME_S = 2.0
"""Idle times that differ by less than this many seconds are treated as equal, because the offset
between the monotonic clock and the wall clock jitters."""
WORKERS_END_S = 4.0
"""Seconds between SIGTERM and SIGKILL for workers when the cluster shuts down."""


@dataclass(frozen=True, kw_only=True)
class SchedulerIncarnation:
    """Identity of one of a cluster's schedulers; each restart creates the next incarnation."""

    keeper: int
    """The keeper's process id."""
    parent_pipe: int
    """Pipe that workers inherit; it closes when the keeper dies."""
    number: int = 1
    """Incarnation number, starting at 1."""
    died_at: float = 0.0
    """When the previous scheduler died, in seconds since the epoch; 0.0 for the first."""


class Head:
    """A cluster's scheduler, with its coordinator and node source.

    Args:
        cluster: The cluster's folder.
        incarnation: This scheduler's number and parent processes.
    """

    def __init__(self, cluster: ClusterDir, incarnation: SchedulerIncarnation) -> None:
        self._cluster = cluster
        self._incarnation = incarnation
        self._settings = cluster.settings()
        self._stop = asyncio.Event()
        self._touched_at = time.monotonic()
        self._load: Load | None = None  # as last written
        self._tasks: set[asyncio.Task[Any]] = set()
        # Nodes, coordinator and scheduler depend on each other. The lambdas look up the coordinator
        # and the scheduler when called, after this constructor has returned.
        self.nodes: HeadNodes = load(self._settings.nodes)(
            HeadFacts(
                cluster=cluster,
                settings=self._settings,
                parent_pipe=incarnation.parent_pipe,
                incarnation=incarnation.number,
                is_connected=lambda name: name in self.scheduler.aliases,
                is_busy=lambda name: self.coordinator.is_busy(name),
                on_gone=self._remove_worker,
                on_warning=lambda text: self.coordinator.warn(text),
                on_note=lambda text: self.coordinator.note(text),
                on_notice=lambda worker, at: self.coordinator.take_notice(worker, at),
                progress=lambda: self.coordinator.progress(),
                on_halt=lambda why: self.coordinator.halt(why),
            )
        )
        self.coordinator: HeadCoordinator = load(self._settings.coordinator)(
            self.nodes, cluster_id=cluster.cluster_id, on_shutdown=self._stop.set
        )
        self.scheduler = self._make_scheduler()

    async def start(self) -> None:
        """Restore jobs, start the scheduler, and publish its address."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self.nodes.reap)
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        # Restore the jobs before the scheduler listens. Otherwise a kernel that reconnects early
        # would be refused because its job is unknown.
        self.coordinator.register(self.scheduler)
        self.coordinator.replay(self._cluster.jobs, died_at=self._incarnation.died_at)
        handlers: dict[type[q.Request[Any]], Any] = {
            q.TouchCluster: self._touch,
            q.WantWorkers: self._want,
            q.ListNodes: self._list_nodes,
            q.ListCosts: self._list_costs,
            q.ReleaseWorker: self._release,
            q.KillWorker: self._kill,
        }
        for request, handler in handlers.items():
            self.scheduler.handlers[request.op] = q.handler_of(request, handler)
        await self.scheduler
        await self.nodes.start(self.scheduler.address)
        # Report costs once before any job runs, because costs so far belong to no job.
        self._report_costs()
        self._cluster.publish(
            self.scheduler.address,
            keeper=self._incarnation.keeper,
            num_lives=self._incarnation.number,
        )
        logger.info("cluster %s listens at %s", self._cluster.cluster_id, self.scheduler.address)

    async def serve(self) -> None:
        """Run periodic tasks until the cluster should shut down."""
        while not (self._stop.is_set() or self._is_closed() or self._is_idle()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), min(1.0, self._settings.idle_s / 4))
            for task in (self.nodes.reap, self._write_load, self._report_costs):
                try:
                    task()
                except Exception:
                    # An exception here would kill the scheduler, and the keeper gives up after five
                    # deaths within a minute, so log it and retry instead.
                    logger.exception("%s failed", task.__name__)

    def _write_load(self) -> None:
        idle_s = self.coordinator.idle_s()
        # ``idle_s`` is measured on the monotonic clock, whose offset from the wall clock jitters.
        # Without the comparison below, the file would be written every second.
        since = time.time() - idle_s if idle_s > 0 else None
        load = Load(workers=len(self.nodes.nodes()), idle_since=since)
        previous = self._load
        if since and previous and previous.idle_since and abs(since - previous.idle_since) < SAME_S:
            load = replace(load, idle_since=previous.idle_since)
        if load != previous:
            with contextlib.suppress(OSError):  # the folder was removed: serve() returns next
                write_load(self._cluster, load)
                self._load = load

    @property
    def shuts_down_fast(self) -> bool:
        """True if the workers are local processes; remote machines take minutes to stop."""
        return not self.nodes.replaces_early

    def _report_costs(self) -> None:
        self.coordinator.take_costs(self.nodes.costs())

    def _remove_worker(self, worker: str, why: str) -> None:
        # A machine that vanishes does not close its connection: Dask would notice only when TCP
        # gives up.
        address = self.scheduler.aliases.get(worker)
        if address is None:
            return  # not connected yet, or already disconnected
        logger.info("removing worker %s: %s", worker, why)
        removal = self.scheduler.remove_worker(
            address, stimulus_id=f"etrain-gone-{time.time()}", expected=True, close=False
        )
        task = asyncio.get_running_loop().create_task(removal)
        # The event loop keeps only a weak reference to a task; without this it could be collected.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop the workers, then the scheduler."""
        # Remove the address first, so that no kernel connects to a cluster that is shutting down.
        # If this process dies from here on, the keeper does not restart it, and workers do not wait
        # for it.
        self._cluster.retract()
        await self.nodes.close(grace_s=WORKERS_END_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.scheduler.close(reason="the cluster ends"), WORKERS_END_S)

    def _make_scheduler(self) -> Any:
        from distributed import Scheduler

        security = read_security(self._cluster.tls, "scheduler")
        check_listen(self._settings.host, security)
        return restricted(without_http(Scheduler), worker_may=WORKER_REQUESTS)(
            host=self._settings.host,
            port=self._port(),
            protocol="tls",
            security=security,
            dashboard=False,
            plugins=[self.coordinator],
        )

    def _port(self) -> int:
        # Use the previous scheduler's port if it is free, otherwise any port (0). Kernels and
        # workers can also find a new address, but they reconnect faster to the old one.
        record = self._cluster.record()
        port = self._settings.port
        if record is not None:  # from the previous scheduler: this one has none yet
            port = int(record.address.rpartition(":")[2])
        if not port:
            return 0
        with socket.socket() as probe:
            # Dask's own server does the same, as old connections may still be in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._settings.host, port))
            except OSError:
                return 0
        return port

    def _is_closed(self) -> bool:
        # A client may close it through Dask, bypassing our handlers.
        return self.scheduler.status.name in ("closing", "closed", "failed")

    def _is_idle(self) -> bool:
        idle_s = self.coordinator.idle_s()
        # Check this only while no job is active, because an active job can still finish.
        if idle_s > 0 and not self._cluster.is_published():
            logger.info(
                "cluster.json was removed, so no kernel can find this cluster: shutting down"
            )
            return True
        # A kernel that connects sends TouchCluster, because it is about to submit a job.
        idle_s = min(idle_s, time.monotonic() - self._touched_at)
        if idle_s < self._settings.idle_s:
            return False
        logger.info("no job for %.0f s: shutting down", idle_s)
        return True

    # --- request handlers for kernels ---

    async def _touch(self, request: q.TouchCluster) -> q.ClusterIdentity:
        self._touched_at = time.monotonic()
        return q.ClusterIdentity(cluster_id=self._cluster.cluster_id, pid=os.getpid())

    async def _want(self, request: q.WantWorkers) -> q.WorkersPresent:
        self.nodes.hold(request.count, reason=request.reason)
        return q.WorkersPresent()

    async def _list_nodes(self, request: q.ListNodes) -> q.NodeList:
        return q.NodeList(nodes=tuple(self.nodes.nodes()))

    async def _list_costs(self, request: q.ListCosts) -> q.CostList:
        return q.CostList(costs=tuple(asdict(cost) for cost in self.nodes.costs()))

    async def _release(self, request: q.ReleaseWorker) -> q.Done:
        self.nodes.release(request.worker, drain_s=request.drain_s)
        return q.Done()

    async def _kill(self, request: q.KillWorker) -> q.Done:
        self.nodes.kill(request.worker)
        return q.Done()


async def run_head(
    cluster: ClusterDir, incarnation: SchedulerIncarnation, lock_fd: int, ready_fd: int
) -> None:
    """Start the scheduler, notify the launcher, serve, then stop the workers.

    The keeper removes the cluster's folder afterwards.
    """
    # A cluster's first scheduler, compared with those restarted by the keeper:
    #
    #     incarnation     1                               2, 3 ...
    #     certificates    created                         those from incarnation 1
    #     jobs            none                            restored from their records
    #     workers         started on request              adopted; they reconnect within seconds
    #     launcher        releases the start lock, then   none: lock_fd and ready_fd are -1
    #                     notifies it
    ensure_certificates(cluster)
    head = Head(cluster, incarnation)
    try:
        await head.start()
        if lock_fd >= 0:
            os.close(lock_fd)
            notify_launcher(ready_fd, READY)
        await head.serve()
        with contextlib.ExitStack() as stack:
            # Hold the start lock while local workers stop, so that a new cluster finds their slots
            # free. Remote machines take minutes to stop, so a new cluster must not wait for them.
            if head.shuts_down_fast:
                with contextlib.suppress(TimeoutError):  # another cluster is already starting
                    root = cluster.path.parent
                    stack.enter_context(start_lock(root, cluster.lock_key, timeout_s=1.0))
            await head.close()
    except BaseException:
        # The keeper restarts the scheduler of a published cluster, and the next one adopts the
        # workers. If there is no record, there will be no next scheduler, so stop them here.
        if not cluster.is_published():
            await head.nodes.close(grace_s=0)
        raise


def notify_launcher(ready_fd: int, line: bytes) -> None:
    """Write one line to the launcher, if it is still running."""
    with contextlib.suppress(OSError):
        os.write(ready_fd, line)
        os.close(ready_fd)


def describe_cause(error: BaseException) -> str:
    """Return the root cause of an error in one line."""
    # Dask wraps exceptions raised by plugins. Stop at a PoolError, because it already names cause
    # and remedy.
    while (cause := error.__cause__ or error.__context__) is not None:
        if isinstance(error, PoolError):
            break
        error = cause
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line passed by the keeper."""
    parser = argparse.ArgumentParser(prog="etrain-local-head")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--lock-fd", type=int, default=-1, help="open file that holds the lock")
    parser.add_argument("--ready-fd", type=int, default=-1, help="pipe to the launcher")
    parser.add_argument("--keeper", type=int, required=True, help="process id of the keeper")
    parser.add_argument("--incarnation", type=int, default=1, help="number of this scheduler")
    parser.add_argument("--died-at", type=float, default=0.0, help="when the previous one died")
    return parser.parse_args(argv)


def ensure_certificates(cluster: ClusterDir) -> None:
    """Create the cluster's certificates unless a previous scheduler already did."""
    # A new certificate authority would lock out the surviving workers, which have the old
    # certificates.
    if not cluster.tls.exists():
        write_certificates(cluster.tls, mint_certificates(cluster.cluster_id))


def main() -> None:
    """Run the scheduler process until its cluster shuts down."""
    arguments = parse_arguments()
    cluster = ClusterDir(arguments.state_dir)
    parent_pipe = die_with_parent(arguments.keeper)
    # These only arrive by mistake (see ``keeper.detach``, whose handlers do not survive exec).
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    log_to_stderr()
    collect_garbage_rarely()
    code = 0
    try:
        configure_dask(cluster.scratch)
        incarnation = SchedulerIncarnation(
            keeper=arguments.keeper,
            parent_pipe=parent_pipe,
            number=arguments.incarnation,
            died_at=arguments.died_at,
        )
        asyncio.run(run_head(cluster, incarnation, arguments.lock_fd, arguments.ready_fd))
    except BaseException as error:
        logger.exception("the scheduler process of cluster %s failed", cluster.cluster_id)
        if arguments.ready_fd >= 0:
            notify_launcher(arguments.ready_fd, f"{describe_cause(error)}\n".encode())
        code = START_FAILED if not cluster.is_published() else 1
    logging.shutdown()
    # Skip the interpreter's shutdown, because blocked Dask threads could delay it.
    os._exit(code)


if __name__ == "__main__":
    main()
