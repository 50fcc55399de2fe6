"""Process that has imported torch and forks trainers.

The product spawns trainers, each of which imports for seconds. Hundreds of schedules on real
processes are affordable only if this cost is paid once. The zygote avoids state that a fork must
not copy: it has one thread, no CUDA context, and has computed nothing.

``python -m tests.chaos.zygote FD CHANGES``: CHANGES are the arguments of ``Zygote`` as JSON. It
reads requests from a socket (five descriptors: channel, progress page, fork requests, stdout,
stderr), replies
``{"forked": pid}`` and reports ``{"exited": pid, "code": n}`` when a trainer exits.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
from datetime import timedelta
from typing import NoReturn

NUM_FDS = 5


def main() -> None:
    """Fork trainers on request until the rig closes its end of the socket."""
    import torch
    import torch._dynamo  # imported by the constructor of every optimizer

    import etrain_jupyter.trainer.spare
    import etrain_jupyter.trainer.trainer  # noqa: F401  (what a trainer imports)
    from etrain_jupyter.trainer.control import reporter
    from etrain_jupyter.trainer.group import backends
    from etrain_jupyter.trainer.main import die_with_parent

    # Two things grow by design up to a bound, and the soak test should reach the bounds early: the
    # records that a rank keeps, and threads that gloo frees only at its timeout (gloo does not
    # report the failure of a send that its thread was about to start when the connection broke).
    # All other tests keep the product's values.
    changes = json.loads(sys.argv[2])
    assert reporter.KEEP_RECORDS, backends.COLLECTIVE_TIMEOUT
    if changes["keep_records"] is not None:
        reporter.KEEP_RECORDS = changes["keep_records"]
    if changes["collective_timeout_s"] is not None:
        backends.COLLECTIVE_TIMEOUT = timedelta(seconds=changes["collective_timeout_s"])
    die_with_parent(int(os.environ["ETRAIN_SUPERVISOR_PID"]))
    torch.set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread only"
    rig = socket.socket(fileno=int(sys.argv[1]))
    ends, wake = socket.socketpair()
    for end in (ends, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # otherwise each spare would scan these objects before its first fork
    rig.send(b'{"ready": true}')
    while True:
        ready, _, _ = select.select([rig, ends], [], [])
        if ends in ready:
            ends.recv(4096)
            report_exits(rig)
        if rig in ready and not serve(rig):
            os._exit(0)  # nothing to clean up, and unloading torch takes seconds


def report_exits(rig: socket.socket) -> None:
    """Report every trainer that has exited."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            send(rig, exited=pid, code=os.waitstatus_to_exitcode(status))


def serve(rig: socket.socket) -> bool:
    """Fork one trainer; return False after the rig has closed the socket."""
    request, ancillary, _, _ = rig.recvmsg(16, socket.CMSG_SPACE(NUM_FDS * 4))
    if not request:
        return False
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % 4])
    zygote = os.getpid()
    pid = os.fork()
    if not pid:
        rig.close()
        live(list(fds), zygote)
    for fd in fds:
        os.close(fd)
    send(rig, forked=pid)
    return True


def send(rig: socket.socket, **message: int) -> None:
    """Send one packet."""
    rig.send(json.dumps(message).encode())


def live(fds: list[int], parent: int) -> NoReturn:
    """Run as a spare or trainer: ``trainer.main`` without the command line."""
    from etrain_jupyter.trainer import main as trainer

    def run() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        trainer.die_with_parent(parent)
        os.setsid()
        channel, page, forks, out, err = fds
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        faulthandler.enable()
        trainer.run_spare(channel, page, forks)

    trainer.exit_after(run)


if __name__ == "__main__":
    main()
