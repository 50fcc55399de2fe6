"""Warm spare: a process that has imported torch, and forks a trainer for each job.

Imports take seconds, a fork takes milliseconds. In a local cluster, the spares are themselves forks
of one process (``trainer.fork_server``). The spare itself runs no user code, so a trainer starts
without any state from earlier jobs, such as modules, random states, CUDA contexts, threads or
files::

    spare   imports torch ── forks ──────────── forks ─────────▶ waits for the next request
                               └▶ trainer of job A   └▶ trainer of job B

A fork copies only the calling thread, and CUDA cannot be used in a fork of a process that has
initialized it. If imports leave a spare in such a state, it does not fork. Instead, it becomes the
trainer of one job, and its worker starts another spare.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import sys

import numpy as np
import torch

from etrain_jupyter.wire.channel import Channel
from etrain_jupyter.wire.fork_records import NUM_FORK_FDS, RECORD, Kind
from etrain_jupyter.wire.progress_page import ProgressPage

PROBE_S = 5.0
"""Timeout in seconds for the trial fork."""


def can_fork() -> bool:
    """Return True if a fork of this process is usable as a trainer.

    A trial fork reveals two problems. OpenBLAS stops its threads before a fork and restarts them
    when needed; a thread that is still running afterwards belongs to a library that does not
    support forks. And in the child, torch can report whether the parent has initialized CUDA.
    """
    if sys.platform != "linux":
        return False
    gc.collect()
    gc.freeze()  # a garbage collection in a trainer would copy the pages of all these objects
    try:
        pid = os.fork()
        if not pid:
            os._exit(int(torch.cuda._is_in_bad_fork()))
        return _exits_well(pid) and len(os.listdir("/proc/self/task")) == 1
    except OSError:  # out of memory or processes, or the kernel has no pidfds
        return False


def _exits_well(pid: int) -> bool:
    """Wait for the trial process; kill it if a library's fork handler blocks it."""
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], PROBE_S)[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1] == 0
    finally:
        os.close(pidfd)


def fork_trainers(channel: Channel, requests: socket.socket) -> list[int] | None:
    """Fork a trainer for each request. Returns in each forked process, and finally in the spare.

    Args:
        channel: The spare's own channel. A message on it launches this process itself as a trainer.
        requests: Connection to the supervisor.

    Returns:
        In a forked process, its descriptors: channel, progress page, stdout, stderr. In the spare,
        None once it should become a trainer itself or the supervisor is gone.
    """
    children: dict[int, int] = {}  # process IDs by pidfd
    own, asked = channel.fileno(), requests.fileno()
    requests.send(RECORD.pack(Kind.READY, 0, 0))
    while True:
        ready, _, _ = select.select([own, asked, *children], [], [])
        for pidfd in children.keys() & set(ready):
            pid = children.pop(pidfd)
            _, status = os.waitpid(pid, 0)
            requests.send(RECORD.pack(Kind.EXITED, pid, os.waitstatus_to_exitcode(status)))
            os.close(pidfd)
        if asked in ready:
            data, fds, _, _ = socket.recv_fds(requests, RECORD.size, NUM_FORK_FDS)
            if not data:
                return None
            if _fork(requests, children, fds):
                continue
            # The spare's own descriptors must close when it exits, so no other process may hold
            # them.
            for pidfd in children:
                os.close(pidfd)
            requests.close()
            channel.close()
            return fds
        if own in ready:
            return None


def _fork(requests: socket.socket, children: dict[int, int], fds: list[int]) -> bool:
    """Fork one trainer and report it; return False in the trainer."""
    try:
        if not (pid := os.fork()):
            return False
    except OSError as exc:
        requests.send(RECORD.pack(Kind.FAILED, 0, exc.errno or errno.ENOMEM))
    else:
        pidfd = os.pidfd_open(pid)  # not reaped yet, so the ID still refers to this process
        children[pidfd] = pid
        socket.send_fds(requests, [RECORD.pack(Kind.FORKED, pid, 0)], [pidfd])
    for fd in fds:
        os.close(fd)
    return True


def enter_trainer(fds: list[int], page: ProgressPage) -> tuple[int, int]:
    """Make a forked process independent of the spare; return its channel and page descriptors.

    Args:
        fds: Descriptors of the trainer: channel, progress page, stdout, stderr.
        page: The spare's page.
    """
    channel_fd, page_fd, out, err = fds
    os.setsid()  # a signal to one trainer's process group must not reach another trainer
    for given, standard in ((out, 1), (err, 2)):
        os.dup2(given, standard)
        os.close(given)
    page.close()
    np.random.seed()  # Python reseeds its own generator; torch's has a constant seed
    return channel_fd, page_fd
