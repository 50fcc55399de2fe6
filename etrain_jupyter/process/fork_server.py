"""Start a fork server, and connect workers to it.

The server imports torch once and forks the workers' trainers (``trainer.fork_server``). The head of
a local cluster starts one for all of its workers. Other workers start their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import site
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

logger = logging.getLogger(__name__)

MAX_FAILURES = 2
"""After this many unexpected exits, the server is not restarted."""


class ForkServerProcess:
    """The fork server, which is started with the first worker.

    Args:
        parent_pipe: Pipe that makes the server exit when it is closed; see ``process.entry``.
        log: File for its output; None for this process's standard error.
        environment: Environment variables that libraries read while they are imported. All others
            come from the worker.
    """

    command: Sequence[str] = ("-m", "etrain_jupyter.trainer.main", "--serve")

    def __init__(
        self,
        *,
        parent_pipe: int,
        log: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._parent_pipe = parent_pipe
        self._log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: list[subprocess.Popen[bytes]] = []  # outdated, but still in use by workers
        self._control: socket.socket | None = None
        self._installed: Installed = ()
        self._num_failures = 0

    def connect(self) -> socket.socket | None:
        """Return a new worker's end of a connection to the server; start it if necessary.

        Returns:
            The connection; None without a server.
        """
        if sys.platform != "linux":
            return None
        self._check()
        if self._process is None and self._num_failures < MAX_FAILURES:
            self._start()
        if self._control is None:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
            except OSError:  # it has just ended
                ours.close()
                return None
        return ours

    def close(self) -> None:
        """Kill the server. Call this after all workers have exited."""
        self.retire()
        for process in self._ending:
            process.kill()
            process.wait()
        self._ending.clear()

    def _check(self) -> None:
        """Forget a server that has ended, or whose imported packages have been replaced."""
        self._ending = [process for process in self._ending if process.poll() is None]
        if self._process is None:
            return
        if (code := self._process.poll()) is not None:
            self._num_failures += 1
            log = self._log or "the log of this worker"
            logger.warning("the fork server ended with exit code %d, see %s", code, log)
        elif self._installed == read_installed():
            return
        else:
            logger.info("packages have been installed: a new fork server is started")
        self.retire()

    def retire(self) -> None:
        """Close the control connection. The server exits with the last of its workers."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._ending.append(self._process)
            self._process = None

    def give_up(self) -> None:
        """Kill a server that does not answer; its trainers survive."""
        if self._process is not None:
            self._process.kill()
            self._num_failures += 1
        self.retire()

    def _start(self) -> None:
        self._installed = read_installed()  # before its imports begin
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as files:
            log = 2
            if self._log is not None:
                log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                files.callback(os.close, log)
            try:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        # Forked trainers inherit these flags; see ``worker.trainer_process``.
                        *("-u", "-X", "faulthandler", *self.command, str(theirs.fileno())),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=self._parent_pipe,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._environment},
                    process_group=0,  # an interrupt of the notebook must not reach it
                )
            except OSError as exc:  # out of memory, processes or file descriptors
                logger.error("the fork server could not be started: %s", exc)
                self._num_failures += 1
                self.retire()


Installed = tuple[int, ...]


def read_installed() -> Installed:
    """Return a value that changes when a package is installed, updated or removed.

    The value consists of the package folders' modification times. An installer adds or removes
    entries in these folders, at least the entry whose name contains the version.
    """
    paths = sysconfig.get_paths()
    folders = {paths["purelib"], paths["platlib"], site.getusersitepackages()}
    return tuple(_modified_at(folder) for folder in sorted(folders))


def _modified_at(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0
