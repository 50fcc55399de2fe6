"""What can go wrong for a user, as one tree.

::

    EtrainError
    ├── ConfigError (ValueError)         the cell or the mapping is not a valid job
    │   ├── CellError                    ... with the line and column of the cell
    │   └── NotSupportedYetError         a documented key whose machinery this version lacks
    ├── BundleError (ValueError)         something of the notebook cannot be shipped
    ├── PoolError (RuntimeError)         workers or their scheduler cannot be had
    ├── JobNotFoundError (LookupError)   no job of that name or id in the run store
    ├── JobFailedError (RuntimeError)    a job ended as failed; carries the user's traceback
    ├── JobLostError (RuntimeError)      the cluster of a job is gone
    ├── UntrustedJobError (RuntimeError) somebody else may have submitted the job that is to go on
    ├── StoreError (RuntimeError)        an object store cannot be read or written
    ├── RunStoreError (RuntimeError)     the bucket with the jobs cannot be read or written
    │   └── FencedError                  ... since somebody else goes on with the job
    └── CheckpointError (RuntimeError)   no checkpoint that verifies

Each message says what happened with its values, what the system does now, and what to type next.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).parent)


class EtrainError(Exception):
    """Base of everything that this package raises on purpose."""

    def render(self) -> list[str]:
        """Return the lines that a cell shows instead of a traceback."""
        return [f"etrain: {self}"]

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows where Python code called us: its frames, and none of ours."""
        return [*_frames_of_caller(self.__traceback__), *self.render()]


def _frames_of_caller(trace: TracebackType | None) -> list[str]:
    """Return a line for each frame down to the one that called this package."""
    lines = []
    for frame in traceback.extract_tb(trace):
        if frame.filename.startswith(_PACKAGE):
            break
        if "/IPython/" not in frame.filename:
            lines.append(f"{_place_of(frame.filename)}, line {frame.lineno}: {frame.line}")
    return lines


def _place_of(filename: str) -> str:
    """Return ``Cell In[3]`` for a cell, the file's name otherwise."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"Cell In[{numbers[filename]}]" if filename in numbers else filename


class ConfigError(EtrainError, ValueError):
    """The configuration is not a valid job.

    Attributes:
        path: Keys from the top of the body to the culprit, for example ``("batch", "global")``;
            empty if none.
        hint: What to type instead, or an empty string.
    """

    def __init__(self, message: str, *, path: tuple[str | int, ...] = (), hint: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.hint = hint
        if hint:
            self.add_note(hint)  # what Python shows where it is not a cell that asked

    def render(self) -> list[str]:
        """Return the message and, if there is one, the hint."""
        lines = [f"etrain: {self}"]
        return [*lines, f"  {self.hint}"] if self.hint else lines


class CellError(ConfigError):
    """A ConfigError that knows where in the cell it is.

    Attributes:
        line: Line of the cell, the ``%%etrain`` line being 1.
        column: Column from 1.
        text: That line's text.
        length: How many characters the carets underline.
    """

    def __init__(
        self,
        message: str,
        *,
        line: int,
        column: int,
        text: str = "",
        length: int = 1,
        path: tuple[str | int, ...] = (),
        hint: str = "",
    ) -> None:
        super().__init__(message, path=path, hint=hint)
        self.line, self.column, self.text, self.length = line, column, text, length

    def render(self) -> list[str]:
        """Return the message, the line with carets under the culprit, and the hint."""
        lines = [f"etrain: line {self.line}, column {self.column}: {self}"]
        if self.text:
            lines.append(f"  {self.line:>3} | {self.text}")
            lines.append("      | " + " " * (self.column - 1) + "^" * max(1, self.length))
        return [*lines, f"  {self.hint}"] if self.hint else lines


class NotSupportedYetError(ConfigError):
    """A documented key whose machinery this version does not have: refused, never ignored."""


class BundleError(EtrainError, ValueError):
    """Something of the notebook cannot be shipped: names it and the cell that defines it."""


class PoolError(EtrainError, RuntimeError):
    """Workers, or the scheduler that they belong to, cannot be had."""


class JobNotFoundError(EtrainError, LookupError):
    """No job of that name or id is in the run store."""


class JobFailedError(EtrainError, RuntimeError):
    """A job ended as failed.

    Attributes:
        job_id: The job.
        traceback: The user's own traceback from the rank that raised, or an empty string.
    """

    def __init__(self, message: str, *, job_id: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id
        self.traceback = traceback
        if traceback:
            self.add_note(traceback)

    def render(self) -> list[str]:
        """Return the user's traceback first, then the message."""
        head = self.traceback.rstrip().splitlines()
        return [*head, f"etrain: {self}"]


class JobLostError(EtrainError, RuntimeError):
    """The cluster that ran a job is gone; what it committed is still in the run folder."""


class UntrustedJobError(EtrainError, RuntimeError):
    """To go on with this job would run code that somebody else may have put into the run store."""


class StoreError(EtrainError, RuntimeError):
    """An object store cannot be read or written, or refused access."""


class RunStoreError(EtrainError, RuntimeError):
    """The bucket with the jobs' records and logs cannot be read or written."""


class FencedError(RunStoreError):
    """Somebody else writes the log of this job: whoever gets this must not go on with it."""


class CheckpointError(EtrainError, RuntimeError):
    """No checkpoint that verifies, or one that must not be loaded."""
