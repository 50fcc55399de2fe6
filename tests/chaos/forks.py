"""Trainers that a process of the tests forks, with shorter timeouts than the product's.

It is the product's fork server, except that it may change constants, see ``zygote.py``. A forked
trainer starts in 50 ms, without imports; a spawned one costs 3 s of CPU time.
"""

from __future__ import annotations

import json
import os

from etrain_jupyter.process.fork_server import ForkServerProcess
from etrain_jupyter.wire.fork_records import RECORD, Kind
from tests.chaos.trainers import Limits, Served

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ZygoteProcess(ForkServerProcess):
    """The fork server, with changed constants.

    Args:
        parent_pipe: As in the base class.
        changes: The arguments of ``Zygote``.
    """

    def __init__(self, parent_pipe: int, changes: dict[str, float | None]) -> None:
        environment = {"CUDA_VISIBLE_DEVICES": "", **dict.fromkeys(THREADS, "1")}
        super().__init__(parent_pipe=parent_pipe, environment=environment)
        self.command = ("-m", "tests.chaos.zygote", json.dumps(changes))


class Zygote(Served):
    """Trainers that the tests' own fork server forks. Used by one event loop at a time.

    Args:
        keep_records: Number of records that a rank keeps; the product's default if None.
        collective_timeout_s: Timeout of a collective; the product's default if None.
    """

    # Short timeouts suffice: nothing is slow here, and a new trainer imports nothing.
    limits = Limits(hang_s=3.0, beat_s=0.25, restore_patience=2, warm_up_patience=2)
    warms_up = False

    def __init__(
        self, *, keep_records: int | None = None, collective_timeout_s: float | None = None
    ) -> None:
        changes = {"keep_records": keep_records, "collective_timeout_s": collective_timeout_s}
        self._pipe = os.pipe()
        super().__init__(ZygoteProcess(self._pipe[0], changes))
        connection = self._process.connect()
        assert connection is not None
        with connection:  # wait for its imports, which no job's timeouts allow for
            connection.send(RECORD.pack(Kind.IMPORT, 0, 0))
            assert connection.recv(RECORD.size) == RECORD.pack(Kind.READY, 0, 0)

    def close(self) -> None:
        """Stop the server, and with it all processes that it has forked."""
        self._process.close()
        for end in self._pipe:
            os.close(end)
