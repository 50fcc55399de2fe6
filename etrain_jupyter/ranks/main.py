"""Entry of the trainer process: ``python -m etrain_jupyter.ranks.main FD``.

It imports everything heavy, says that it is ready, and waits as a warm spare until it is given a
job.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

import torch

from etrain_jupyter.ranks.channel import Channel
from etrain_jupyter.ranks.trainer import Trainer

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process with its supervisor; elsewhere the closed channel does."""
    if sys.platform != "linux":
        return
    parent = int(os.environ.get("ETRAIN_SUPERVISOR_PID", "0"))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)  # it died before we asked


def main() -> None:
    """Wait as a spare, then train."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the supervisor's business
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # loader processes must not keep the channel open
    channel = Channel(socket.socket(fileno=descriptor))
    channel.send({"op": "spare", "pid": os.getpid()})
    for message in channel.messages():
        if message["op"] == "start":
            Trainer(channel, message).run()
            break
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that are stuck inside gloo would make an ordinary exit abort.
    os._exit(0)


if __name__ == "__main__":
    main()
