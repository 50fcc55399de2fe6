"""Entry of the trainer process: ``python -m etrain_jupyter.trainer.main CHANNEL_FD PROGRESS_FD``.

It imports everything heavy, says that it is ready, and waits as a warm spare until it is given a
job.
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

from etrain_jupyter.wire.channel import Channel
from etrain_jupyter.wire.progress_page import ProgressPage, start_pulse

_PR_SET_PDEATHSIG = 1

MAX_DESCRIPTORS = 2**20
"""Enough. Without an end, programs that close every possible descriptor would take minutes."""


def die_with_parent() -> None:
    """Ask Linux to kill this process with its supervisor; elsewhere the closed channel does."""
    if sys.platform != "linux":
        return
    parent = int(os.environ.get("ETRAIN_SUPERVISOR_PID", "0"))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)  # it died before we asked


def raise_descriptor_limit() -> None:
    """Allow as many open files as this user may have: gloo ends the process at the limit.

    Strangers that connect to a rank's port while it forms use one descriptor each.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_page(descriptor: int) -> ProgressPage:
    """Map the progress page, and pulse as long as this process runs any Python code."""
    os.set_inheritable(descriptor, False)
    # The handler writes from within the signal, so that its report includes a thread that holds the
    # GIL. Register it before the first pulse, which permits the signal.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    page = ProgressPage(descriptor)
    start_pulse(page)
    return page


def print_any_text() -> None:
    """Escape what cannot be encoded, as in a file name that is not UTF-8: a notebook prints it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Wait as a spare, then train."""
    die_with_parent()
    raise_descriptor_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the supervisor's business
    print_any_text()
    page = open_page(int(sys.argv[2]))
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # loader processes must not keep the channel open
    channel = Channel(socket.socket(fileno=descriptor))
    code = 0
    try:
        run_trainer(channel, page)
    except BaseException:
        traceback.print_exc()  # its last words
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that are stuck inside gloo would make an ordinary exit abort.
    os._exit(code)


def run_trainer(channel: Channel, page: ProgressPage) -> None:
    """Import what takes seconds, then wait for a job and do it."""
    import torch

    from etrain_jupyter.trainer.trainer import Trainer

    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    channel.send({"op": "spare", "pid": os.getpid()})
    for message in channel.messages():
        if message["op"] == "start":
            Trainer(channel, message, progress=page).run()
            break


if __name__ == "__main__":
    main()
