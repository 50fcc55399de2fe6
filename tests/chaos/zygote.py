"""A process that has imported everything and forks trainers.

The product spawns trainers, which costs seconds of imports each; hundreds of schedules on real
processes are affordable only if that is paid once. What a fork must not copy is kept out of the
zygote: it has one thread, no CUDA, and has computed nothing.

``python -m tests.chaos.zygote FD CHANGES``: CHANGES are ``Zygote``'s arguments in JSON. It reads
requests from a socket (four descriptors: channel, progress page, stdout, stderr) and answers
``{"forked": pid}``; it tells ``{"exited": pid, "code": n}`` of each trainer's end.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import sys
from datetime import timedelta
from typing import NoReturn

NUM_FDS = 4


def main() -> None:
    """Fork on request until the rig closes its end."""
    import torch
    import torch._dynamo  # every optimizer imports it when it is made

    import etrain_jupyter.trainer.trainer  # noqa: F401  (what a trainer imports)
    from etrain_jupyter.trainer.control import reporter
    from etrain_jupyter.trainer.group import backends
    from etrain_jupyter.trainer.main import die_with_parent

    # Two things that grow by design up to a bound, which the test of growth should not have to
    # wait for: the records that a rank keeps, and threads that gloo lets go of at its time-out
    # only (a send that its own thread was about to make when the connection broke is told to
    # nobody). All other tests keep the product's values.
    changes = json.loads(sys.argv[2])
    assert reporter.KEEP_RECORDS, backends.COLLECTIVE_TIMEOUT
    if changes["keep_records"] is not None:
        reporter.KEEP_RECORDS = changes["keep_records"]
    if changes["collective_timeout_s"] is not None:
        backends.COLLECTIVE_TIMEOUT = timedelta(seconds=changes["collective_timeout_s"])
    die_with_parent()
    torch.set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread only"
    rig = socket.socket(fileno=int(sys.argv[1]))
    ends, wake = socket.socketpair()
    for end in (ends, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    rig.send(b'{"ready": true}')
    while True:
        ready, _, _ = select.select([rig, ends], [], [])
        if ends in ready:
            ends.recv(4096)
            tell_ends(rig)
        if rig in ready and not serve(rig):
            os._exit(0)  # there is nothing to tidy up, and taking torch down takes seconds


def tell_ends(rig: socket.socket) -> None:
    """Tell of every trainer that has ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            tell(rig, exited=pid, code=os.waitstatus_to_exitcode(status))


def serve(rig: socket.socket) -> bool:
    """Fork one trainer; return False once the rig is gone."""
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
    tell(rig, forked=pid)
    return True


def tell(rig: socket.socket, **words: int) -> None:
    """Send one packet."""
    rig.send(json.dumps(words).encode())


def live(fds: list[int], parent: int) -> NoReturn:
    """Be a trainer: what ``ranks.main`` does after its imports."""
    from etrain_jupyter.trainer import main as trainer
    from etrain_jupyter.wire.channel import Channel

    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ["ETRAIN_SUPERVISOR_PID"] = str(parent)
        trainer.die_with_parent()
        os.setsid()
        channel, page, out, err = fds
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        faulthandler.enable()
        mapped = trainer.open_page(page)
        trainer.run_trainer(Channel(socket.socket(fileno=channel)), mapped)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
