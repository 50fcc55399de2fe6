"""Entry point of a spare: ``python -m etrain_jupyter.trainer.main CHANNEL PROGRESS FORKS``.

The arguments are descriptors. The process imports torch, reports that it is ready, and then forks
trainers on request (``trainer.spare``). It becomes a trainer itself if it cannot fork, if a job was
already waiting for it, or if the third descriptor is missing.

``python -m etrain_jupyter.trainer.main --serve CONTROL`` is the machine's fork server, which forks
spares (``trainer.fork_server``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import io
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from etrain_jupyter.wire.channel import Channel
from etrain_jupyter.wire.messages import LaunchTrainer, SpareReady
from etrain_jupyter.wire.progress_page import ProgressPage, Pulse, start_pulse

_PR_SET_PDEATHSIG = 1

MAX_DESCRIPTORS = 2**20
"""Upper bound for the descriptor limit. Without a limit, programs that close every possible
descriptor at startup would take minutes."""

TRIM_THRESHOLD = 256 << 20
"""Free memory at the end of the heap that is kept, in bytes."""

MMAP_THRESHOLD = 32 << 20
"""Size from which a block is always returned when it is freed, in bytes; the maximum of glibc."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NAMES = ("trim_threshold", "mmap_threshold")


def die_with_parent(parent: int) -> None:
    """Make Linux kill this process when its parent dies; elsewhere, the closed channel ends it.

    The parent is the supervisor, or the spare, which itself dies with the supervisor. This works
    even if no thread of this process can run.

    Args:
        parent: Process ID; 0 if unknown.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)  # the parent died before the call


def raise_descriptor_limit() -> None:
    """Raise the open-file limit to the user's maximum: gloo terminates the process at the limit.

    While a rank's connections form, each unknown connection to its port uses one descriptor.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    with contextlib.suppress(ValueError, OSError):  # some systems allow fewer than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_page(descriptor: int) -> tuple[ProgressPage, Pulse]:
    """Map the progress page, and update its pulse as long as this process can run Python code."""
    os.set_inheritable(descriptor, False)
    # The handler writes in the signal context, so its report includes a thread that holds the GIL.
    # Register it before the first pulse, because the supervisor sends the signal only after a
    # pulse.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    page = ProgressPage(descriptor)
    return page, start_pulse(page)


def print_any_text() -> None:
    """Escape characters that cannot be encoded, such as those in a non-UTF-8 file name."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Wait for a job as a warm spare, then train; or serve as the machine's fork server."""
    is_server = sys.argv[1] == "--serve"
    if not is_server:
        die_with_parent(int(os.environ.get("ETRAIN_SUPERVISOR_PID", "0")))
    raise_descriptor_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles interrupts
    if os.environ.get("ETRAIN_SIGTERM") == "ignore":
        # A batch system sends SIGTERM to all processes of a job, some time before SIGKILL. The
        # worker handles it: this trainer leaves at the next step boundary. Ignored rather than
        # handled, so that the signal does not interrupt system calls of gloo or NCCL.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print_any_text()
    if is_server:
        exit_after(lambda: run_server(int(sys.argv[2])))
    exit_after(lambda: run_spare(*map(int, sys.argv[1:])))


def exit_after(run: Callable[[], None]) -> NoReturn:
    """Exit with status 0 after ``run``, or with 1 and a traceback if it fails."""
    code = 0
    try:
        run()
    except BaseException:
        traceback.print_exc()  # the supervisor reports this as the crash output
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # With threads stuck inside gloo, an ordinary exit would abort.
    os._exit(code)


def run_spare(channel_fd: int, page_fd: int, forks_fd: int = -1) -> None:
    """Import torch, which takes seconds, then fork trainers or run one in this process.

    The page's pulse is stopped while the process forks, because only one thread may exist then.
    """
    page, pulse = open_page(page_fd)
    channel = open_channel(channel_fd)
    from etrain_jupyter.trainer import spare
    from etrain_jupyter.trainer.imports import import_packages

    importlib.import_module("etrain_jupyter.trainer.trainer")  # now, not in each trainer
    import_packages()
    channel.send(SpareReady(pid=os.getpid()))
    is_launched = bool(select.select([channel], [], [], 0)[0])
    if forks_fd >= 0 and not is_launched:
        os.set_inheritable(forks_fd, False)
        pulse.stop()
        own_pid = os.getpid()
        with socket.socket(fileno=forks_fd) as requests:
            fds = spare.fork_trainers(channel, requests) if spare.can_fork() else None
        if fds is not None:
            die_with_parent(own_pid)
            channel_fd, page_fd = spare.enter_trainer(fds, page)
            page, pulse = open_page(page_fd)
            channel = open_channel(channel_fd)
        else:
            start_pulse(page)
    run_trainer(channel, page)


def run_server(control_fd: int) -> None:
    """Fork spares for this machine's workers until all of them have exited."""
    from etrain_jupyter.trainer import fork_server

    os.set_inheritable(control_fd, False)
    with socket.socket(fileno=control_fd) as control:
        request = fork_server.serve(control)
    if request is not None:
        run_spare(*fork_server.enter_spare(request))


def open_channel(descriptor: int) -> Channel:
    """Open the channel to the supervisor."""
    os.set_inheritable(descriptor, False)  # loader processes must not keep the channel open
    return Channel(socket.socket(fileno=descriptor))


def run_trainer(channel: Channel, page: ProgressPage) -> None:
    """Wait for a job and run it."""
    import torch

    from etrain_jupyter.trainer.main import keep_freed_memory
    from etrain_jupyter.trainer.trainer import Trainer

    keep_freed_memory()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    for message in channel.messages():
        if isinstance(message, LaunchTrainer):
            Trainer(channel, message, progress=page).run()
            break


if __name__ == "__main__":
    main()


def keep_freed_memory() -> bool:
    """Keep freed memory for the next step instead of returning it to the kernel.

    By default, glibc returns the free end of the heap when it is twice as large as the largest
    block freed so far, and always from 64 MiB. A step frees its activations and gradients, and the
    next step gets the same memory back page by page, each filled with zeros by the kernel::

        default   step: page faults ── free: returned ── step: page faults ── free: returned
        kept      step: page faults ── free: kept ────── step ─────────────── free: kept

    Returns:
        False if the allocator is not glibc's, or the user has set one of its thresholds.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(f"MALLOC_{n.upper()}_" in os.environ or f"malloc.{n}" in tunables for n in _NAMES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Setting one threshold ends glibc's own adjustment of the other, so both are set.
    return bool(
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    )
