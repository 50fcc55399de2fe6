"""Folder of a study in the run store: its record, and Optuna's storage.

::

    etrain-runs/
    ├── digits-1a2b3c4d/         the study
    │   ├── study.json           what was submitted, signed like a job.json
    │   ├── bundle               the notebook's objects, shared by all trials
    │   ├── optuna.journal       trials and evaluations; opens in optuna-dashboard
    │   └── study.lease          locked by the scheduler that runs the study
    └── digits-1a2b3c4d-000/     a trial: an ordinary job
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etrain_jupyter.errors import EtrainError, FencedError
from etrain_jupyter.untrusted import open_regular

if TYPE_CHECKING:
    import optuna

STUDY_FILE = "study.json"
JOURNAL_FILE = "optuna.journal"
LEASE_FILE = "study.lease"
LEASE_BYTES = 1000
"""Size of the lease file: the holder, and in the next line why the journal cannot be written."""

MAX_LINE_BYTES = 1 << 20
"""Maximum size of a line of the journal."""

NUM_ATTEMPTS = 3
"""Attempts to take the lease."""
RETRY_S = 0.01
"""Seconds between two attempts."""

STATUS = "status"
"""Attribute of the Optuna study: ``running``, ``finished``, ``stopped`` or ``failed``."""
REASON = "reason"
"""Attribute of a study or a trial: why it ended, as text; empty if that needs no explanation."""
ENDED_AT = "ended_at"
"""Attribute of the study: when it last ended, in seconds since the epoch."""
RUNGS = "rungs"
"""Attribute of the study: sample counts of the rungs, once the first trial has reported them."""
NUM_SAMPLES = "num_samples"
"""Attribute of the study: samples of a whole trial."""
NUM_TRIALS = "num_trials"
"""Attribute of the study: trials to run in total; a resume may raise it."""
JOB = "job"
"""Attribute of a trial: id of its job."""
SAMPLES = "samples"
"""Attribute of an ended trial: samples that it was trained on."""


class StudyLease:
    """The right to run a study, held by one process at a time.

    Two schedulers that resume the same study would run each trial twice::

        scheduler 1   takes the lease ── runs the study ── ends, or is killed: the lease is free
        scheduler 2                         FencedError                            takes the lease

    Args:
        folder: The study's folder.

    Raises:
        FencedError: If another process holds it.
        OSError: If the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(folder / LEASE_FILE, flags, 0o600)
        try:
            self._lock()
        except OSError as exc:
            holder = os.pread(self._file, 200, 0).decode(errors="replace").partition("\n")[0]
            # Any other error: the file system has no locks. The logs of the trials still fence a
            # second scheduler where they can.
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(self._file)
                raise FencedError(
                    f"study {folder.name} is being run by another cluster "
                    f"({holder or 'its scheduler is unknown'}). Nothing was started. Follow it "
                    f"with %etrain study {folder.name}, or stop it there and resume it then"
                ) from exc
        self.show("")

    def _lock(self) -> None:
        # The kernel releases the lock when a process exits, even if it is killed. A reader that
        # calls `is_free` holds it for some microseconds, so retry before giving up.
        for attempt in range(NUM_ATTEMPTS):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt == NUM_ATTEMPTS - 1:
                    raise
                time.sleep(RETRY_S)

    def show(self, trouble: str) -> None:
        """Store why the study cannot write its journal, for the kernels that follow it."""
        # The size never changes, so that a full disk accepts the text.
        holder = f"scheduler process {os.getpid()} on {platform.node()}"
        text = f"{holder}\n{trouble}".encode()[:LEASE_BYTES].ljust(LEASE_BYTES)
        with contextlib.suppress(OSError):
            os.pwrite(self._file, text, 0)

    @staticmethod
    def read_trouble(folder: Path) -> str:
        """Return the text that the holder of a study's lease stored last."""
        try:
            with open_regular(folder / LEASE_FILE) as file:
                text = file.read(LEASE_BYTES).decode(errors="replace")
        except OSError:
            return ""
        return text.partition("\n")[2].strip()

    @staticmethod
    def is_free(folder: Path) -> bool:
        """Return whether no process holds a study's lease; False if that cannot be determined."""
        try:
            file = os.open(folder / LEASE_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True  # no scheduler has run the study yet
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(file)
        return True

    def release(self) -> None:
        """Let another process run the study. May be called twice."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = -1


def import_optuna() -> Any:
    """Return the optuna package.

    Raises:
        EtrainError: If it is not installed.
    """
    try:
        import optuna
    except ImportError as exc:
        raise EtrainError(
            "a search needs the package optuna, which is not installed here. Nothing was started. "
            "Run: pip install 'etrain-jupyter[search]'"
        ) from exc
    # Otherwise, Optuna prints a line for each trial.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_for_reading(folder: Path) -> optuna.storages.BaseStorage:
    """Open Optuna's storage of a study, whose folder another user may have written.

    Raises:
        OSError: If the journal is not a regular file.
        Exception: If it is damaged: any error of Optuna or of a line.
    """
    return import_optuna().storages.JournalStorage(  # type: ignore[no-any-return]
        _JournalReader(folder / JOURNAL_FILE)
    )


class _JournalReader:
    """Backend of Optuna's storage that reads complete lines and writes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes_read = 0

    def read_logs(self, log_number_from: int) -> Iterator[Any]:
        """Yield the new lines; ``log_number_from`` is always the number of those already read."""
        with open_regular(self._path) as file:
            file.seek(self._num_bytes_read)
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n"):
                    if len(line) == MAX_LINE_BYTES:
                        raise ValueError(f"a line of {JOURNAL_FILE} exceeds {len(line):,} bytes")
                    return  # the scheduler is writing it
                self._num_bytes_read += len(line)
                yield json.loads(line)

    def append_logs(self, logs: Any) -> None:
        """Raise: only the scheduler writes the journal."""
        raise EtrainError("a study is only read here. study.resume(trials=N) adds trials")
