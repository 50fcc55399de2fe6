"""Exception hierarchy.

::

    EtrainError
    ├── ConfigError (ValueError)         the cell or the mapping is not a valid job
    │   └── CellError                    ... with the line and column in the cell
    ├── BundleError (ValueError)         a notebook object cannot be sent to workers
    ├── PoolError (RuntimeError)         workers or their scheduler are not available
    ├── JobNotFoundError (LookupError)   no job with that name or id in the run store
    ├── JobFailedError (RuntimeError)    a job has failed; carries the user's traceback
    ├── JobLostError (RuntimeError)      the cluster of a job is gone
    ├── UntrustedJobError (RuntimeError) another user may have submitted the job to resume
    ├── ShardError (RuntimeError)        a data set in shards cannot be read or written
    ├── RecipeError (ValueError)         input that a recipe cannot use
    ├── TraceError (ValueError)          a recorded spot market cannot be simulated
    ├── LoggerError (RuntimeError)       a logger of `log.to` has failed
    ├── StoreError (RuntimeError)        an object store cannot be read or written
    ├── RunStoreError (RuntimeError)     the bucket with the jobs cannot be read or written
    │   └── FencedError                  ... because another process has taken over the job
    └── CheckpointError (RuntimeError)   no valid checkpoint

Each message states what happened, with the values involved, what the system does now, and what to
do next.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).parent)


class EtrainError(Exception):
    """Base class of all errors that this package raises deliberately."""

    def render(self) -> list[str]:
        """Return the lines that a cell shows instead of a traceback."""
        return [f"etrain: {self}"]

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of a traceback, without this package's frames."""
        return [*_frames_of_caller(self.__traceback__), *self.render()]


def _frames_of_caller(trace: TracebackType | None) -> list[str]:
    """Return one line per frame, down to the code that called this package."""
    lines = []
    # From the outermost frame inwards: IPython, the cell or the script, then this package.
    for frame in traceback.extract_tb(trace):
        if frame.filename.startswith(_PACKAGE):
            break
        if "/IPython/" not in frame.filename:
            lines.append(f"{_place_of(frame.filename)}, line {frame.lineno}: {frame.line}")
    return lines


def _place_of(filename: str) -> str:
    """Return ``Cell In[3]`` for a cell, or the file's name otherwise."""
    ipython = sys.modules.get("IPython")  # not imported, because a script may run without it
    shell = ipython.get_ipython() if ipython else None
    # A private dict of IPython that maps the file name of a cell to its execution count.
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"Cell In[{numbers[filename]}]" if filename in numbers else filename


class ConfigError(EtrainError, ValueError):
    """The configuration is not a valid job.

    Attributes:
        path: Keys from the top of the body to the invalid key, for example ``("batch", "global")``;
            empty if none.
        hint: Hint on what to type instead, or an empty string.
    """

    def __init__(self, message: str, *, path: tuple[str | int, ...] = (), hint: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.hint = hint
        if hint:
            self.add_note(hint)  # shown by Python outside of a cell

    def render(self) -> list[str]:
        """Return the message and, if there is one, the hint."""
        lines = [f"etrain: {self}"]
        return [*lines, f"  {self.hint}"] if self.hint else lines


class CellError(ConfigError):
    """A ConfigError with its position in the cell, or in a file such as ``pools.yaml``.

    Attributes:
        line: Line number; in a cell, the ``%%etrain`` line is 1.
        column: Column, counted from 1.
        text: Text of that line.
        length: Number of characters to underline.
        file: Path of the file; empty for a cell.
    """

    def __init__(
        self,
        message: str,
        *,
        line: int,
        column: int,
        text: str = "",
        length: int = 1,
        file: str = "",
        path: tuple[str | int, ...] = (),
        hint: str = "",
    ) -> None:
        super().__init__(message, path=path, hint=hint)
        self.line, self.column, self.text, self.length = line, column, text, length
        self.file = file

    def render(self) -> list[str]:
        """Return the message, the line with the error underlined, and the hint."""
        place = f"{self.file}, line" if self.file else "line"
        lines = [f"etrain: {place} {self.line}, column {self.column}: {self}"]
        if self.text:
            lines.append(f"  {self.line:>3} | {self.text}")
            lines.append("      | " + " " * (self.column - 1) + "^" * max(1, self.length))
        return [*lines, f"  {self.hint}"] if self.hint else lines


class BundleError(EtrainError, ValueError):
    """An object cannot be sent to the workers. The message names it and its cell."""


class PoolError(EtrainError, RuntimeError):
    """Workers or their scheduler are not available."""


class JobNotFoundError(EtrainError, LookupError):
    """The run store has no job with that name or id."""


class JobFailedError(EtrainError, RuntimeError):
    """A job has failed.

    Attributes:
        job_id: The job.
        traceback: The user's traceback from the failing rank, or an empty string.
    """

    def __init__(self, message: str, *, job_id: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id
        self.traceback = traceback
        if traceback:
            self.add_note(traceback)

    def render(self) -> list[str]:
        """Return the user's traceback first, then the message."""
        # The message comes last, so that a long traceback does not scroll it out of view.
        head = self.traceback.rstrip().splitlines()
        return [*head, f"etrain: {self}"]


class JobLostError(EtrainError, RuntimeError):
    """The cluster that ran a job is gone; committed steps are still in the run folder."""


class UntrustedJobError(EtrainError, RuntimeError):
    """Resuming this job would run code that another user may have put into the run store."""


class TraceError(EtrainError, ValueError):
    """A recorded spot market cannot be read, or the job cannot be simulated on it.

    Attributes:
        hint: Hint on what to type instead, or an empty string.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(hint)

    def render(self) -> list[str]:
        """Return the message and, if there is one, the hint."""
        lines = [f"etrain: {self}"]
        return [*lines, f"  {self.hint}"] if self.hint else lines


class LoggerError(EtrainError, RuntimeError):
    """A logger of ``log.to`` cannot store the values of a job. Training is not affected."""


class StoreError(EtrainError, RuntimeError):
    """An object store cannot be read or written, or has denied access."""


class ShardError(EtrainError, RuntimeError):
    """A data set in shards cannot be read or written: a shard is missing, altered or invalid."""


class RecipeError(EtrainError, ValueError):
    """A recipe cannot use its input: wrong format, too long, or not available."""


class RunStoreError(EtrainError, RuntimeError):
    """The bucket with the jobs' records and logs cannot be read or written."""


class FencedError(RunStoreError):
    """Another process has taken over this job's log or this study, so this one must not write."""


class CheckpointError(EtrainError, RuntimeError):
    """No valid checkpoint was found, or the checkpoint must not be loaded."""
