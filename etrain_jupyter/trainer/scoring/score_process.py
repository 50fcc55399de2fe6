"""Run ``eval.score`` in a process of its own, next to training.

A thread of the trainer waits for the process, reads what it returned, and sends the exhibits. The
training loop only checks after each step whether the thread has ended, because sending figures of 4
MB would stall the loop for several steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.scoring.exhibits import Exhibit
from etrain_jupyter.trainer.scoring.spool import RecordFile

STOP_S = 5.0
"""Timeout in seconds for the end of a killed process, and of the thread that waits for it."""

SendExhibit = Callable[[Exhibit], None]
"""Sends an exhibit to the coordinator; called in another thread."""


class ScoreError(WorkloadError):
    """``eval.score`` raised, crashed or returned something invalid.

    Attributes:
        user_traceback: Traceback of the user's frames; empty if there is none.
    """

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


class Scoring(Protocol):
    """A run of ``eval.score``."""

    def poll(self) -> dict[str, float] | None:
        """Return the scores; None until ``score`` has ended and all exhibits are sent.

        Raises:
            ScoreError: If ``score`` failed.
        """
        ...

    def stop(self) -> None:
        """Stop the run, if it has not ended."""
        ...


class Scorer(Protocol):
    """Starts runs of ``eval.score``."""

    def start(self, records: RecordFile, send: SendExhibit) -> Scoring:
        """Start to score the records; ``send`` is called with each exhibit."""
        ...


@dataclass(frozen=True)
class ProcessScorer:
    """Scores in a new process for each evaluation."""

    bundle_fd: int
    """Descriptor of the file with the notebook's objects."""

    def start(self, records: RecordFile, send: SendExhibit) -> Scoring:
        """Start a process that reads the records. Call from the main thread."""
        return ScoreProcess(self.bundle_fd, records, send)


class ScoreProcess:
    """One process that runs ``eval.score``."""

    def __init__(self, bundle_fd: int, records: RecordFile, send: SendExhibit) -> None:
        self._send = send
        self._result = tempfile.TemporaryFile()  # noqa: SIM115, closed when the process has ended
        module = "etrain_jupyter.trainer.scoring.score_main"
        fds = (bundle_fd, records.fileno(), self._result.fileno())
        numbers = (os.getpid(), fds[0], fds[1], records.num_bytes, fds[2])
        # The process watches its standard input, which closes when this trainer exits. On Linux,
        # the kernel also kills the process when the thread that started it ends, so the main thread
        # must start it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, numbers)],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,
            # Figures are drawn without a window. A kernel sets this variable for its own process,
            # and the pool's processes inherit it.
            env={**os.environ, "MPLBACKEND": "Agg"},
        )
        self._outcome: dict[str, Any] = {}
        self.is_stopped = False
        """True once ``stop`` is called: no further exhibit is sent."""
        self._thread = threading.Thread(target=self._wait, name="etrain-score", daemon=True)
        self._thread.start()

    def poll(self) -> dict[str, float] | None:
        """Return the scores; None until the process has ended and all exhibits are sent.

        Raises:
            ScoreError: If ``score`` raised, or its process crashed.
        """
        if self._thread.is_alive():
            return None
        if "error" in self._outcome:
            raise ScoreError(self._outcome["error"], self._outcome["traceback"])
        scores: dict[str, float] = self._outcome["scores"]
        return scores

    def stop(self) -> None:
        """Kill the process and its children."""
        self.is_stopped = True
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._thread.join(STOP_S)

    def _wait(self) -> None:
        outcome = self._read(self._process.wait())
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._result.close()
        # Without a supervisor, the trainer exits on its own.
        with contextlib.suppress(OSError):
            for exhibit in outcome.get("exhibits", ()):
                if not self.is_stopped:
                    self._send(Exhibit(*exhibit))
        self._outcome = outcome

    def _read(self, code: int) -> dict[str, Any]:
        self._result.seek(0)
        data = self._result.read()
        if code == 0 and data:
            outcome: dict[str, Any] = msgpack.unpackb(data)
            return outcome
        how = f"exited with status {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        hint = "Its last lines are in the log (%etrain logs)."
        if code == -signal.SIGKILL:
            hint = "The system kills a process when memory runs out: return smaller records."
        return {
            "error": f"eval.score crashed: the process that ran it {how}. {hint}",
            "traceback": "",
        }
