"""The head of a local cluster: ``python -m etrain_jupyter.head.main STATE_DIR``.

Started by the keeper: one process with the Dask scheduler and the coordinator in it, which starts
and ends the workers. It ends by itself when no job has been there for a while, and the cluster with
it. If it dies, the keeper starts another one, which adopts the workers. It imports no torch.
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
from etrain_jupyter.head.node_source import HeadFacts, HeadNodes
from etrain_jupyter.process.cluster_dir import (
    READY,
    START_FAILED,
    ClusterDir,
    start_lock,
)
from etrain_jupyter.process.entry import load_factory, log_to_stderr
from etrain_jupyter.process.machine_load import Load, write_load
from etrain_jupyter.process.parent_pipe import die_with_parent
from etrain_jupyter.process.peers import WORKER_REQUESTS, restricted
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

GPU_QUERY_S = 10.0
SAME_S = 2.0
"""Two instants that differ by less are one, told by two clocks."""
WORKERS_END_S = 4.0
"""How long workers may take to end gently when the cluster goes down."""


@dataclass(frozen=True, kw_only=True)
class SchedulerIncarnation:
    """One of the schedulers that a cluster has had, one after the other."""

    keeper: int
    """The keeper's process id."""
    lifeline: int
    """The pipe that workers get from us."""
    number: int = 1
    died_at: float = 0.0
    """When the one before died, in seconds since the epoch; 0.0 for the first."""


class Head:
    """The scheduler of a local cluster and what belongs to it.

    Args:
        cluster: Its folder.
        life: Which of the cluster's schedulers it is.
    """

    def __init__(self, cluster: ClusterDir, life: SchedulerIncarnation) -> None:
        self._cluster = cluster
        self._life = life
        self._settings = cluster.settings()
        self._stop = asyncio.Event()
        self._touched_at = time.monotonic()
        self._load: Load | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.nodes: HeadNodes = load_factory(self._settings.nodes)(
            HeadFacts(
                cluster=cluster,
                settings=self._settings,
                lifeline=life.lifeline,
                num_lives=life.number,
                is_connected=lambda name: name in self.scheduler.aliases,
                on_gone=self._lose,
                on_warning=lambda text: self.coordinator.warn(text),
                on_notice=lambda worker, at: self.coordinator.take_notice(worker, at),
                on_halt=lambda why: self.coordinator.halt(why),
            )
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
        # Before anybody can ask for a job that the scheduler before had.
        if hasattr(self.coordinator, "recall"):
            self.coordinator.register(self.scheduler)
            self.coordinator.recall(self._cluster.jobs, died_at=self._life.died_at)
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
        self._tell_costs()  # what there is until now no job of ours has spent
        self._cluster.publish(
            self.scheduler.address, keeper=self._life.keeper, num_lives=self._life.number
        )
        logger.info("cluster %s serves at %s", self._cluster.cluster_id, self.scheduler.address)

    async def serve(self) -> None:
        """Return when the cluster shall end."""
        while not (self._stop.is_set() or self._is_closed() or self._is_idle()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), min(1.0, self._settings.idle_s / 4))
            for do in (self.nodes.reap, self._note_load, self._tell_costs):
                try:
                    do()
                except Exception:
                    # It would end the scheduler, and five of these the cluster.
                    logger.exception("%s failed", do.__name__)

    def _note_load(self) -> None:
        """Write down how busy the cluster is, if that has changed."""
        idle_s: float = self.coordinator.idle_s()
        since = time.time() - idle_s if idle_s > 0 else None
        load = Load(workers=len(self.nodes.nodes()), idle_since=since)
        known = self._load
        if since and known and known.idle_since and abs(since - known.idle_since) < SAME_S:
            load = replace(load, idle_since=known.idle_since)
        if load != known:
            with contextlib.suppress(OSError):  # somebody removed the folder: we are about to end
                write_load(self._cluster, load)
                self._load = load

    @property
    def ends_soon(self) -> bool:
        """Whether its workers are processes of this machine; machines elsewhere take minutes."""
        return not self.nodes.replaces_early

    def _tell_costs(self) -> None:
        """Let the coordinator tell the jobs what their workers cost."""
        if hasattr(self.coordinator, "take_costs"):
            self.coordinator.take_costs(self.nodes.costs())

    def _lose(self, worker: str, why: str) -> None:
        """Drop a worker whose machine is gone: its connection may stand for a minute."""
        address = self.scheduler.aliases.get(worker)
        if address is None:
            return
        logger.info("worker %s is dropped: %s", worker, why)
        dropping = self.scheduler.remove_worker(
            address, stimulus_id=f"etrain-gone-{time.time()}", expected=True, close=False
        )
        task = asyncio.get_running_loop().create_task(dropping)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the workers, then the scheduler."""
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
        """Return where the scheduler before listened, if that is free; else any port will do.

        Kernels and workers find a new address by themselves, but sooner an old one.
        """
        record = self._cluster.record()
        port = self._settings.port
        if record is not None:
            port = int(record.address.rpartition(":")[2])
        if not port:
            return 0
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._settings.host, port))
            except OSError:
                return 0
        return port

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

    # --- what the kernel may call ---

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
    cluster: ClusterDir, life: SchedulerIncarnation, lock_fd: int, ready_fd: int
) -> None:
    """Start, tell the launcher, serve, and end; the keeper removes what is left."""
    mint(cluster)
    head = Head(cluster, life)
    try:
        await head.start()
        if lock_fd >= 0:
            os.close(lock_fd)
            tell_launcher(ready_fd, READY)
        await head.serve()
        with contextlib.ExitStack() as stack:
            if head.ends_soon:  # else a new cluster need not wait for the end of this one
                with contextlib.suppress(TimeoutError):  # else another cluster is starting
                    root = cluster.path.parent
                    stack.enter_context(start_lock(root, cluster.lock_key, timeout_s=1.0))
            await head.close()
    except BaseException:
        if not cluster.is_published():  # else the next head adopts them
            await head.nodes.close(grace_s=0)
        raise


def tell_launcher(ready_fd: int, words: bytes) -> None:
    """Write one line to the launcher, if that still lives and still listens."""
    with contextlib.suppress(OSError):
        os.write(ready_fd, words)
        os.close(ready_fd)


def root_of(error: BaseException) -> str:
    """Return the first cause of an error in one line: Dask wraps what a plugin raises.

    An error of ours says already what caused it, and what to do.
    """
    while (cause := error.__cause__ or error.__context__) is not None:
        if isinstance(error, PoolError):
            break
        error = cause
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read what the keeper gave."""
    parser = argparse.ArgumentParser(prog="etrain-local-head")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--lock-fd", type=int, default=-1, help="open file that holds the lock")
    parser.add_argument("--ready-fd", type=int, default=-1, help="pipe to the launcher")
    parser.add_argument("--keeper", type=int, required=True, help="process id of the keeper")
    parser.add_argument("--num-lives", type=int, default=1, help="how many heads, with this one")
    parser.add_argument("--died-at", type=float, default=0.0, help="when the last one died")
    return parser.parse_args(words)


def mint(cluster: ClusterDir) -> None:
    """Make the certificates of a cluster, unless a head before has."""
    if not cluster.tls.exists():
        write_certificates(cluster.tls, mint_certificates(cluster.cluster_id))


def main() -> None:
    """Run the head until its cluster ends."""
    arguments = parse_arguments()
    cluster = ClusterDir(arguments.state_dir)
    lifeline = die_with_parent(arguments.keeper)
    # Signals to the keeper's group are for the keeper; see ``local_keeper.detach``.
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    log_to_stderr()
    code = 0
    try:
        configure_dask(cluster.scratch)
        life = SchedulerIncarnation(
            keeper=arguments.keeper,
            lifeline=lifeline,
            number=arguments.num_lives,
            died_at=arguments.died_at,
        )
        asyncio.run(run_head(cluster, life, arguments.lock_fd, arguments.ready_fd))
    except BaseException as error:
        logger.exception("the head of cluster %s failed", cluster.cluster_id)
        if arguments.ready_fd >= 0:
            tell_launcher(arguments.ready_fd, f"{root_of(error)}\n".encode())
        code = START_FAILED if not cluster.is_published() else 1
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
