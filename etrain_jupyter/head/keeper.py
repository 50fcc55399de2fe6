"""Supervisor of the scheduler process: ``python -m etrain_jupyter.head.keeper STATE_DIR``.

A small process, detached from the kernel. It starts the scheduler process, restarts it in the same
folder if it dies, and removes the folder when the cluster shuts down. Workers and their trainers
belong to the keeper rather than the scheduler, so they survive its death.

Imports neither torch nor distributed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etrain_jupyter.process.cluster_dir import START_FAILED, ClusterDir
from etrain_jupyter.process.entry import adopt_orphans
from etrain_jupyter.process.processes import kill_processes_of
from etrain_jupyter.process.start_lock import remove_start_lock, start_lock

logger = logging.getLogger("etrain.keeper")

MAX_DEATHS = 5
WITHIN_S = 60.0
"""After ``MAX_DEATHS`` deaths within this many seconds, give up, as the next scheduler would die as
well."""

FIRST_BACK_OFF_S = 0.5
STOP_TIMEOUT_S = 12.0
"""Timeout for a scheduler to exit after SIGTERM, in seconds."""


@dataclass
class Restarts:
    """Compute the back-off before a dead scheduler is restarted. Callers pass in the time."""

    max_deaths: int = MAX_DEATHS
    within_s: float = WITHIN_S
    _deaths: list[float] = field(default_factory=list)

    def after_death(self, now: float) -> float | None:
        """Return the delay before the next start in seconds; None to give up.

        >>> restarts = Restarts(max_deaths=4, within_s=60.0)
        >>> [restarts.after_death(now) for now in (0.0, 1.0, 2.0, 3.0)]
        [0.0, 0.5, 1.0, None]
        """
        # Forget deaths outside the time window, because a cluster may run for weeks.
        self._deaths = [at for at in self._deaths if now - at < self.within_s] + [now]
        num_deaths = len(self._deaths)
        if num_deaths >= self.max_deaths:
            return None
        return 0.0 if num_deaths == 1 else FIRST_BACK_OFF_S * 2.0 ** (num_deaths - 2)


class ChildWatch:
    """Wait for child processes and for SIGTERM, on the main thread.

    Every signal writes one byte to a pipe, so one ``select`` covers both without polling.
    """

    def __init__(self) -> None:
        # Not ``os.waitpid(pid, 0)``: it would neither reap adopted orphans in the meantime nor
        # return after a SIGTERM, because Python retries interrupted system calls.
        self._wake_read, wake_write = os.pipe()
        for end in (self._wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.is_stop_requested = False
        signal.signal(signal.SIGTERM, self._request_stop)
        # The handler does nothing, but without a handler SIGCHLD would not write to the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _request_stop(self, *_: Any) -> None:
        self.is_stop_requested = True

    def wait_for(self, pid: int) -> int | None:
        """Wait for a child to exit and return its code; None if SIGTERM arrives first."""
        while (code := self._reap(pid)) is None and not self.is_stop_requested:
            self._wait_for_signal(None)
        return code

    def wait_for_stopped(self, pid: int, *, timeout_s: float) -> int | None:
        """Wait for a child that is stopping and return its code; None after the timeout."""
        deadline = time.monotonic() + timeout_s
        while (code := self._reap(pid)) is None and (left := deadline - time.monotonic()) > 0:
            self._wait_for_signal(left)
        return code

    def pause(self, duration_s: float) -> None:
        """Wait for ``duration_s`` seconds or until SIGTERM arrives."""
        deadline = time.monotonic() + duration_s
        while not self.is_stop_requested and (left := deadline - time.monotonic()) > 0:
            self._wait_for_signal(left)

    def _wait_for_signal(self, timeout_s: float | None) -> None:
        # A signal that arrived after the caller's check has already written its byte. Then select
        # returns immediately, so no wake-up is lost.
        select.select([self._wake_read], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _reap(self, pid: int) -> int | None:
        # Reap all exited children, including adopted orphans; return the exit code of ``pid``.
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == pid:  # others are workers of a dead scheduler, or their children
                    found = os.waitstatus_to_exitcode(ended[1])
        return found


class Keeper:
    """Run a cluster's scheduler, and restart it when it dies.

    Args:
        cluster: The cluster's folder.
        start: Starts a scheduler process and returns its id. Its arguments are the incarnation
            number and the time of the previous scheduler's death, in seconds since the epoch.
        children: Waits for child processes.
        restarts: Computes the back-off.
    """

    def __init__(
        self,
        cluster: ClusterDir,
        start: Callable[[int, float], int],
        *,
        children: ChildWatch,
        restarts: Restarts,
    ) -> None:
        self._cluster = cluster
        self._start = start
        self._children = children
        self._restarts = restarts

    def run(self) -> bool:
        """Return True once the cluster has shut down cleanly, False if it failed.

        ===================================  =====================================================
        the scheduler ...                    the keeper ...
        ===================================  =====================================================
        exits with code 0                    returns True: idle timeout or ``%etrain down``
        fails before listening               returns False: the launcher reports it and cleans up
        dies after removing its record       returns True: it was already shutting down
        dies otherwise                       restarts it after a back-off, or returns False after
                                             too many deaths
        is running when SIGTERM arrives      stops it and returns True
        ===================================  =====================================================
        """
        # A keeper that takes over a folder continues its predecessor's count, because workers
        # connect only to a scheduler with a higher number than their previous one.
        died_at, incarnation = self._cluster.last_life()
        first = incarnation + 1
        while not self._children.is_stop_requested:
            incarnation += 1
            try:
                pid = self._start(incarnation, died_at)
            except OSError as exc:
                if incarnation == first:
                    raise  # no job runs yet, and the launcher reports the error
                if not self._may_retry(exc):
                    return False
                continue
            code = self._children.wait_for(pid)
            if code is None:
                self._stop_scheduler(pid)
                return True
            if code == 0:
                return True
            if code == START_FAILED and incarnation == first:
                return False  # the scheduler has notified the launcher, which cleans up
            if not self._cluster.is_published():
                return True  # it was already shutting down; now we must stop the workers
            died_at = time.time()
            delay_s = self._restarts.after_death(time.monotonic())
            if delay_s is None:
                self._log_giving_up(code)
                return False
            logger.warning(
                "scheduler process %d died (exit code %s). Workers and trainers keep running; "
                "restarting the scheduler in %.1f s",
                pid,
                code,
                delay_s,
            )
            self._children.pause(delay_s)
        return True

    def _may_retry(self, exc: OSError) -> bool:
        # The fork failed: out of memory or processes. Back off as after a death, or give up.
        logger.error("the scheduler could not be restarted: %s", exc)
        delay_s = self._restarts.after_death(time.monotonic())
        if delay_s is None:
            self._log_giving_up(START_FAILED)
            return False
        self._children.pause(delay_s)
        return True

    def _stop_scheduler(self, pid: int) -> None:
        # The scheduler stops its workers first, which takes seconds. ``main`` then kills the rest
        # of the cluster, including a hung scheduler.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if self._children.wait_for_stopped(pid, timeout_s=STOP_TIMEOUT_S) is None:
            logger.warning(
                "scheduler process %d did not exit within %g s after SIGTERM: killing it",
                pid,
                STOP_TIMEOUT_S,
            )

    def _log_giving_up(self, code: int) -> None:
        logger.error(
            "the scheduler died %d times within %g s, last with exit code %s. Giving up on cluster "
            "%s. Its jobs can be resumed from their checkpoints with %%etrain resume",
            MAX_DEATHS,
            WITHIN_S,
            code,
            self._cluster.cluster_id,
        )


def shut_down_cluster(cluster: ClusterDir) -> None:
    """Kill the remaining processes of a cluster and remove its folder.

    Holds the start lock, so a kernel that starts a cluster waits until this cluster is gone.
    """
    root, key = cluster.path.parent, cluster.lock_key
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(start_lock(root, key, timeout_s=1.0))
            stack.callback(remove_start_lock, root, key)
        except TimeoutError:
            logger.warning("another cluster is starting; shutting down alongside it")
        cluster.retract()
        # Trainers exit with their workers, but processes started by user code may not. Their
        # environment contains the cluster's marker.
        kill_processes_of(cluster.cluster_id)
        logger.info("cluster %s has shut down", cluster.cluster_id)
        cluster.remove()


class SchedulerStarter:
    """Start the scheduler processes of one cluster.

    Args:
        cluster: The cluster's folder.
        lock_fd: Open file that holds the start lock; the first scheduler releases it.
        ready_fd: Pipe to the launcher; the first scheduler reports to it.
    """

    def __init__(self, cluster: ClusterDir, lock_fd: int, ready_fd: int) -> None:
        self._cluster = cluster
        self._for_first = [lock_fd, ready_fd]
        # Only this process has the write end, so the OS closes the pipe when the keeper dies, even
        # if it is killed with SIGKILL. The scheduler and the workers read from it and exit at
        # end-of-file.
        self._parent_pipe, self._kept_open = os.pipe()

    def __call__(self, incarnation: int, died_at: float) -> int:
        """Start a scheduler process and return its id."""
        flags = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *flags, "-m", "etrain_jupyter.head.main"]
        # A restarted scheduler has neither a lock to release nor a launcher to notify. If it
        # inherited the lock, the next cluster could not start until it exits.
        fds, self._for_first = self._for_first, []
        options = {
            **dict(zip(("lock-fd", "ready-fd"), map(str, fds), strict=False)),
            "keeper": str(os.getpid()),
            "incarnation": str(incarnation),
            "died-at": repr(died_at),
        }
        arguments = [word for key, value in options.items() for word in (f"--{key}", value)]
        process = subprocess.Popen(
            [*command, str(self._cluster.path), *arguments],
            stdin=self._parent_pipe,
            pass_fds=fds,
        )
        for fd in fds:
            os.close(fd)
        # ``ChildWatch`` reaps the process. Once a return code is set, Popen's destructor neither
        # reaps the process, which would lose the exit code, nor warns that it is still running.
        process.returncode = 0
        return process.pid


def detach() -> None:
    """Continue in a child process of init, so that the notebook kernel does not have to reap it."""
    if os.fork():
        os._exit(0)
    # The launcher started a new session, so SIGHUP and SIGINT can only arrive by mistake. Install a
    # handler that does nothing, because workers would inherit SIG_IGN, but they do not inherit
    # handlers.
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line passed by the launcher."""
    parser = argparse.ArgumentParser(prog="etrain-local-keeper")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--lock-fd", type=int, required=True, help="open file that holds the lock")
    parser.add_argument("--ready-fd", type=int, required=True, help="pipe to the launcher")
    return parser.parse_args(argv)


def main() -> None:
    """Run the keeper until its cluster has shut down."""
    arguments = parse_arguments()
    detach()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    cluster = ClusterDir(arguments.state_dir)
    adopt_orphans()
    starter = SchedulerStarter(cluster, arguments.lock_fd, arguments.ready_fd)
    keeper = Keeper(cluster, starter, children=ChildWatch(), restarts=Restarts())
    is_orderly = False
    try:
        is_orderly = keeper.run()
    except BaseException:
        logger.exception("the keeper of cluster %s failed", cluster.cluster_id)
    if is_orderly:
        shut_down_cluster(cluster)
    else:
        # Keep the folder, so that its log can be read. The next cluster to start removes it.
        kill_processes_of(cluster.cluster_id)
    logging.shutdown()
    os._exit(0 if is_orderly else 1)


if __name__ == "__main__":
    main()
