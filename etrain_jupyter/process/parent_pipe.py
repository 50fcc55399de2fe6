"""The pipe by which every process of a local cluster hears of its keeper's death.

The keeper holds the only end that could be written to, and never writes. All others inherit the end
that is read from, on their standard input, and end when it does: however the keeper dies, and
whoever their parent is by then.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> int:
    """Make sure that this process ends when the one that started it does, however that ends.

    On Linux the system sees to it, even where no thread of this process can run any more.

    Returns:
        The pipe, to be handed on to children.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the line above.
    if os.getppid() != parent:
        os._exit(1)
    return die_with_keeper()


def die_with_keeper() -> int:
    """Make sure that this process and its group end with the pipe on its standard input.

    Returns:
        The pipe, to be handed on to children that are to do the same.
    """
    # Other children must neither read from the pipe nor keep it open.
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(
        target=_await_end_of, args=(pipe,), name="etrain-keeper-watch", daemon=True
    ).start()
    return pipe


def adopt_orphans() -> None:
    """Become the parent of whatever descends from this process and loses its own; Linux only.

    Elsewhere init is, which reaps them just as well.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _await_end_of(pipe: int) -> None:
    """Wait until the pipe's other end is closed, then end this process and its group."""
    while os.read(pipe, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
