"""The keeper of a local cluster: ``python -m etrain_jupyter.head.keeper STATE_DIR``.

Detached from the kernel, small, and with nothing to do but this: it starts the scheduler's process,
starts another one in the same folder if that dies, and removes everything when the cluster ends.
Workers belong to it, not to the scheduler, and so do the trainers under them: they outlive a
scheduler that dies. It imports neither torch nor distributed.
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
from etrain_jupyter.process.parent_pipe import adopt_orphans
from etrain_jupyter.process.processes import kill_processes_of
from etrain_jupyter.process.start_lock import remove_start_lock, start_lock

logger = logging.getLogger("etrain.keeper")

MOST_DEATHS = 5
WITHIN_S = 60.0
"""So many deaths within that time: the next scheduler would die as well."""

FIRST_BACK_OFF_S = 0.5
END_S = 12.0
"""How long a scheduler that was asked to end may take."""


@dataclass
class Restarts:
    """Says when a scheduler that has died may be started again. Time is an argument."""

    most_deaths: int = MOST_DEATHS
    within_s: float = WITHIN_S
    _deaths: list[float] = field(default_factory=list)

    def after_death(self, now: float) -> float | None:
        """Return how long to wait before the next start; None to give up.

        >>> restarts = Restarts(most_deaths=4, within_s=60.0)
        >>> [restarts.after_death(now) for now in (0.0, 1.0, 2.0, 3.0)]
        [0.0, 0.5, 1.0, None]
        """
        self._deaths = [at for at in self._deaths if now - at < self.within_s] + [now]
        num_deaths = len(self._deaths)
        if num_deaths >= self.most_deaths:
            return None
        return 0.0 if num_deaths == 1 else FIRST_BACK_OFF_S * 2.0 ** (num_deaths - 2)


class ChildWatch:
    """Waits for children and for the wish to end, on the main thread."""

    def __init__(self) -> None:
        self._wake_read, wake_write = os.pipe()
        for end in (self._wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.is_end_wanted = False
        signal.signal(signal.SIGTERM, self._ask_to_end)
        # The wake-up is what matters; without a handler there would be none.
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _ask_to_end(self, *_: Any) -> None:
        self.is_end_wanted = True

    def wait_for(self, pid: int) -> int | None:
        """Wait for the end of one child; None if somebody asks for the cluster's end first."""
        while (code := self._bury(pid)) is None and not self.is_end_wanted:
            self._sleep(None)
        return code

    def wait_for_end(self, pid: int, *, timeout_s: float) -> int | None:
        """Wait for the end of one child that was told to; None if it takes too long."""
        deadline = time.monotonic() + timeout_s
        while (code := self._bury(pid)) is None and (left := deadline - time.monotonic()) > 0:
            self._sleep(left)
        return code

    def pause(self, duration_s: float) -> None:
        """Let time pass, unless somebody asks for the end."""
        deadline = time.monotonic() + duration_s
        while not self.is_end_wanted and (left := deadline - time.monotonic()) > 0:
            self._sleep(left)

    def _sleep(self, timeout_s: float | None) -> None:
        """Wait for a signal."""
        select.select([self._wake_read], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _bury(self, pid: int) -> int | None:
        """Take note of the children that have ended: also orphans, which are ours since then."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == pid:
                    found = os.waitstatus_to_exitcode(ended[1])
        return found


class Keeper:
    """Keeps one cluster's scheduler alive.

    Args:
        cluster: Its folder.
        start: Starts a scheduler's process, given how many there were and when the last one died.
        children: Waits for it.
        restarts: Says when to start the next one.
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
        """Return when the cluster shall end: whether it did so in order."""
        died_at, num_lives = self._cluster.last_life()
        num_taken_over = num_lives
        while not self._children.is_end_wanted:
            num_lives += 1
            try:
                pid = self._start(num_lives, died_at)
            except OSError as exc:
                if num_lives == num_taken_over + 1:
                    raise  # nobody has a job here yet; the launcher hears of it
                if not self._may_retry(exc):
                    return False
                continue
            code = self._children.wait_for(pid)
            if code is None:
                self._end_scheduler(pid)
                return True
            if code == 0:
                return True
            if code == START_FAILED and num_lives == num_taken_over + 1:
                return False  # it has told the launcher, who removes everything
            if not self._cluster.is_published():
                return True  # it was about to end
            died_at = time.time()
            delay_s = self._restarts.after_death(time.monotonic())
            if delay_s is None:
                self._give_up(code)
                return False
            logger.warning(
                "the scheduler, process %d, died (exit code %s); workers and trainers go on, and "
                "the next one starts in %.1f s",
                *(pid, code, delay_s),
            )
            self._children.pause(delay_s)
        return True

    def _may_retry(self, exc: OSError) -> bool:
        """Wait after a start that the system refused; False if there were too many."""
        logger.error("the next scheduler could not be started: %s", exc)
        delay_s = self._restarts.after_death(time.monotonic())
        if delay_s is None:
            self._give_up(START_FAILED)
            return False
        self._children.pause(delay_s)
        return True

    def _end_scheduler(self, pid: int) -> None:
        """Somebody has asked us to end: let it end its workers first."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if self._children.wait_for_end(pid, timeout_s=END_S) is None:
            logger.warning("the scheduler, process %d, did not end when asked: it is killed", pid)

    def _give_up(self, code: int) -> None:
        logger.error(
            "the scheduler died %d times within %g s, at last with exit code %s: cluster %s is "
            "given up. Its jobs can be resumed from their checkpoints: %%etrain resume",
            *(MOST_DEATHS, WITHIN_S, code, self._cluster.cluster_id),
        )


def end_cluster(cluster: ClusterDir) -> None:
    """End what is left of a cluster and remove its folder.

    Whoever wants a cluster meanwhile waits for the lock, until this one is gone.
    """
    root, key = cluster.path.parent, cluster.lock_key
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(start_lock(root, key, timeout_s=1.0))
            stack.callback(remove_start_lock, root, key)
        except TimeoutError:
            logger.warning("another cluster is starting; this one ends beside it")
        cluster.retract()
        # Trainers end with their workers; what user code has started may not.
        kill_processes_of(cluster.cluster_id)
        logger.info("cluster %s has ended", cluster.cluster_id)
        cluster.remove()


class SchedulerStarter:
    """Starts the scheduler's processes of one cluster.

    Args:
        cluster: Its folder.
        lock_fd: Open file that holds the start lock, for the first one to let go.
        ready_fd: Pipe to the launcher, for the first one to write to.
    """

    def __init__(self, cluster: ClusterDir, lock_fd: int, ready_fd: int) -> None:
        self._cluster = cluster
        self._for_first = [lock_fd, ready_fd]
        # Nobody else has the end that is written to: it is closed when this process ends.
        self._lifeline, self._kept_open = os.pipe()

    def __call__(self, num_lives: int, died_at: float) -> int:
        """Start one and return its process id."""
        flags = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *flags, "-m", "etrain_jupyter.head.main"]
        fds, self._for_first = self._for_first, []
        options = {
            **dict(zip(("lock-fd", "ready-fd"), map(str, fds), strict=False)),
            "keeper": str(os.getpid()),
            "num-lives": str(num_lives),
            "died-at": repr(died_at),
        }
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        process = subprocess.Popen(
            [*command, str(self._cluster.path), *words], stdin=self._lifeline, pass_fds=fds
        )
        for fd in fds:
            os.close(fd)
        # ``Children`` waits for it; Popen must not warn that nobody does.
        process.returncode = 0
        return process.pid


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
    parser = argparse.ArgumentParser(prog="etrain-local-keeper")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--lock-fd", type=int, required=True, help="open file that holds the lock")
    parser.add_argument("--ready-fd", type=int, required=True, help="pipe to the launcher")
    return parser.parse_args(words)


def main() -> None:
    """Keep the cluster until it has ended."""
    arguments = parse_arguments()
    detach()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    cluster = ClusterDir(arguments.state_dir)
    adopt_orphans()
    starter = SchedulerStarter(cluster, arguments.lock_fd, arguments.ready_fd)
    keeper = Keeper(cluster, starter, children=ChildWatch(), restarts=Restarts())
    is_in_order = False
    try:
        is_in_order = keeper.run()
    except BaseException:
        logger.exception("the keeper of cluster %s failed", cluster.cluster_id)
    if is_in_order:
        end_cluster(cluster)
    else:
        # The folder stays, for its log to be read; whoever starts the next cluster removes it.
        kill_processes_of(cluster.cluster_id)
    logging.shutdown()
    os._exit(0 if is_in_order else 1)


if __name__ == "__main__":
    main()
