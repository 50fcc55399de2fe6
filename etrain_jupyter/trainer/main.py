"""Entry point of the trainer: ``python -m etrain_jupyter.trainer.main CHANNEL_FD PROGRESS_FD``.

The process imports torch, reports that it is ready, and waits as a warm spare for a job.
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
from etrain_jupyter.wire.messages import LaunchTrainer, SpareReady
from etrain_jupyter.wire.progress_page import ProgressPage, start_pulse

_PR_SET_PDEATHSIG = 1

MAX_DESCRIPTORS = 2**20
"""Upper bound for the descriptor limit. Without a limit, programs that close every possible
descriptor at startup would take minutes."""


def die_with_parent() -> None:
    """Make Linux kill this process when its supervisor dies. Elsewhere, channel closure ends it."""
    if sys.platform != "linux":
        return
    parent = int(os.environ.get("ETRAIN_SUPERVISOR_PID", "0"))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)  # the supervisor died before the call


def raise_descriptor_limit() -> None:
    """Raise the open-file limit to the user's maximum: gloo terminates the process at the limit.

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
    # Register it before the first pulse, which permits the signal.
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
    """Wait as a warm spare, then train."""
    die_with_parent()
    raise_descriptor_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles interrupts
    print_any_text()
    page = open_page(int(sys.argv[2]))
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # loader processes must not keep the channel open
    channel = Channel(socket.socket(fileno=descriptor))
    code = 0
    try:
        run_trainer(channel, page)
    except BaseException:
        traceback.print_exc()  # the supervisor reports this as the crash output
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # With threads stuck inside gloo, an ordinary exit would abort.
    os._exit(code)


def run_trainer(channel: Channel, page: ProgressPage) -> None:
    """Import torch, which takes seconds, then wait for a job and run it."""
    import torch

    from etrain_jupyter.trainer.trainer import Trainer

    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    channel.send(SpareReady(pid=os.getpid()))
    for message in channel.messages():
        if isinstance(message, LaunchTrainer):
            Trainer(channel, message, progress=page).run()
            break


if __name__ == "__main__":
    main()
