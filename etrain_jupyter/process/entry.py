"""Process start-up: logging, garbage collection, and exiting with the parent or the keeper.

Every process in a local cluster detects the keeper's death through a pipe. The keeper holds the
only write end, and never writes. All other processes inherit the read end as their standard input,
and exit when it reaches end-of-file, regardless of how the keeper died and which process is their
parent by then.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def log_to_stderr() -> None:
    """Send log messages to standard error, which is a file in the state directory."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def collect_garbage_rarely() -> None:
    """Let Python search for unreachable cycles less often.

    By default, the search takes about a fifth of the processor time of a scheduler with 400
    workers, because its many long-lived objects are searched each time. Reference counting alone
    frees nearly everything.
    """
    gc.set_threshold(10_000, 20, 50)


def die_with_parent(parent: int) -> int:
    """Make this process exit when its parent exits, for any reason.

    Returns:
        File descriptor of the pipe, to pass on to children.
    """
    # Linux treats the exit of the thread that forked as the parent's death; the keeper forks on its
    # main thread.
    kill_with_parent(parent)
    return die_with_keeper()


def kill_with_parent(parent: int) -> None:
    """Make Linux kill this process when its parent exits, even if none of its threads can run.

    Args:
        parent: Process ID; 0 if unknown.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent exited before the line above, no signal arrives.
    if parent and os.getppid() != parent:
        os._exit(1)


def die_with_keeper() -> int:
    """Make this process and its group exit at end-of-file on standard input.

    Returns:
        File descriptor of the pipe, to pass on to children that should do the same.
    """
    # Standard input becomes /dev/null, so that children started without an explicit stdin neither
    # inherit the pipe nor keep it open. ``dup`` makes the new descriptor non-inheritable.
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(
        target=_await_end_of, args=(pipe,), name="etrain-keeper-watch", daemon=True
    ).start()
    return pipe


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (Linux only).

    On other systems init adopts and reaps them.
    """
    # Workers outlive the scheduler that started them. Without this, they would remain as zombies
    # under a container's init, which often reaps nothing.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _await_end_of(pipe: int) -> None:
    while os.read(pipe, 1):  # nothing is ever written: this returns at end-of-file
        pass
    # A worker leads its own group, which includes its leftover children. The scheduler is in the
    # keeper's group and must kill only itself.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
