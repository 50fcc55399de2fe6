"""Run ``eval.score`` in a process of its own, next to training."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Protocol

from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.scoring.exhibits import Exhibit, ScoreResult
from etrain_jupyter.trainer.scoring.spool import RecordFile

STOP_S = 5.0
"""Timeout in seconds for the end of a killed process."""


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

    def poll(self) -> ScoreResult | None:
        """Return the scores and exhibits; None while it is running.

        Raises:
            ScoreError: If it failed.
        """
        ...

    def stop(self) -> None:
        """Stop it, if it is running."""
        ...


class Scorer(Protocol):
    """Starts runs of ``eval.score``."""

    def start(self, records: RecordFile) -> Scoring:
        """Start to score the records."""
        ...


@dataclass(frozen=True)
class ProcessScorer:
    """Scores in a new process for each evaluation."""

    bundle_fd: int
    """Descriptor of the file with the notebook's objects."""

    def start(self, records: RecordFile) -> Scoring:
        """Start a process that reads the records. Call from the main thread."""
        return ScoreProcess(self.bundle_fd, records)


class ScoreProcess:
    """One process that runs ``eval.score``."""

    def __init__(self, bundle_fd: int, records: RecordFile) -> None:
        self._result = tempfile.TemporaryFile()  # noqa: SIM115, closed when the process has ended
        module = "etrain_jupyter.trainer.scoring.score_main"
        fds = (bundle_fd, records.fileno(), self._result.fileno())
        numbers = (os.getpid(), fds[0], fds[1], records.num_bytes, fds[2])
        # The process watches its standard input, which ends with this process; on Linux, the kernel
        # also kills it when the thread that started it ends, so that must be the main thread.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, numbers)],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,
            # Figures are drawn without a window. A kernel sets this variable for its own process,
            # and the pool's processes inherit it.
            env={**os.environ, "MPLBACKEND": "Agg"},
        )
        self._outcome: dict[str, Any] | None = None

    def poll(self) -> ScoreResult | None:
        """Return the scores and exhibits; None while the process is running.

        Raises:
            ScoreError: If ``score`` raised, or its process crashed.
        """
        if self._outcome is None:
            code = self._process.poll()
            if code is None:
                return None
            self._outcome = self._read(code)
            self._close()
        if "error" in self._outcome:
            raise ScoreError(self._outcome["error"], self._outcome["traceback"])
        exhibits = (
            Exhibit(name, format, base64.b64decode(data))
            for name, format, data in self._outcome["exhibits"]
        )
        return ScoreResult(self._outcome["scores"], tuple(exhibits))

    def stop(self) -> None:
        """Kill the process and its children."""
        if self._outcome is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self._close()

    def _read(self, code: int) -> dict[str, Any]:
        self._result.seek(0)
        text = self._result.read()
        if code == 0 and text:
            outcome: dict[str, Any] = json.loads(text)
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

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._result.close()
