"""Entry point of a trainer: ``python -m etrain_jupyter.trainer.main CHANNEL PROGRESS``.

The arguments are descriptors. The process imports torch, waits for a job and trains.

``python -m etrain_jupyter.trainer.main --serve CONTROL`` is a fork server, which imports torch once
and forks trainers on request (``trainer.fork_server``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from etrain_jupyter.process.entry import kill_with_parent
from etrain_jupyter.wire.channel import Channel
from etrain_jupyter.wire.messages import LaunchTrainer, SpareReady
from etrain_jupyter.wire.progress_page import ProgressPage, start_pulse

MAX_DESCRIPTORS = 2**20
"""Upper bound for the descriptor limit. Without this bound, programs that close every possible
descriptor at startup would take minutes to start."""

TRIM_THRESHOLD = 256 << 20
"""Number of bytes of free memory that are kept at the end of the heap."""

MMAP_THRESHOLD = 32 << 20
"""Blocks of at least this many bytes are always returned when they are freed; this is glibc's
maximum."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NAMES = ("trim_threshold", "mmap_threshold")


def raise_descriptor_limit() -> None:
    """Raise the open-file limit to the user's maximum, because gloo ends a process that reaches it.

    While a rank's connections form, each unknown connection to its port uses one descriptor.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    with contextlib.suppress(ValueError, OSError):  # some systems allow fewer than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_page(descriptor: int) -> ProgressPage:
    """Map the progress page, and update its pulse as long as this process can run Python code."""
    os.set_inheritable(descriptor, False)
    # The handler writes in the signal context, so its report includes a thread that holds the GIL.
    # Register it before the first pulse, because the supervisor sends the signal only after a
    # pulse.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    page = ProgressPage(descriptor)
    start_pulse(page)
    return page


def print_any_text() -> None:
    """Escape characters that cannot be encoded, such as those in a non-UTF-8 file name."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Wait for a job and train, or serve as a fork server."""
    is_server = sys.argv[1] == "--serve"
    if not is_server:
        kill_with_parent(int(os.environ.get("ETRAIN_SUPERVISOR_PID", "0")))
    raise_descriptor_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles interrupts
    if os.environ.get("ETRAIN_SIGTERM") == "ignore":
        # A batch system sends SIGTERM to all processes of a job, some time before SIGKILL. The
        # worker handles it: this trainer leaves at the next step boundary. The signal is ignored
        # rather than handled, so that it does not interrupt system calls of gloo or NCCL.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print_any_text()
    if is_server:
        exit_after(lambda: run_server(int(sys.argv[2])))
    exit_after(lambda: run_trainer(*map(int, sys.argv[1:])))


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


def run_server(control_fd: int) -> None:
    """Fork trainers for this machine's workers until all of them have exited."""
    from etrain_jupyter.trainer import fork_server

    os.set_inheritable(control_fd, False)
    with socket.socket(fileno=control_fd) as control:
        request = fork_server.serve(control)
    if request is not None:
        run_trainer(*request.enter())


def run_trainer(channel_fd: int, page_fd: int) -> None:
    """Import torch, which takes seconds unless this process was forked, then run a job."""
    page = open_page(page_fd)
    os.set_inheritable(channel_fd, False)  # loader processes must not keep the channel open
    channel = Channel(socket.socket(fileno=channel_fd))
    import torch

    from etrain_jupyter.trainer.trainer import Trainer

    channel.send(SpareReady(pid=os.getpid()))
    keep_freed_memory()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    for message in channel.messages():
        if isinstance(message, LaunchTrainer):
            Trainer(channel, message, progress=page).run()
            break


def keep_freed_memory() -> bool:
    """Keep freed memory for the next step instead of returning it to the kernel.

    By default, glibc returns the free end of the heap when it is twice as large as the largest
    block freed so far, and always when it reaches 64 MiB. A step frees its activations and
    gradients, and the next step gets the same memory back page by page, each filled with zeros by
    the kernel::

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


if __name__ == "__main__":
    main()
