"""Logger for TensorBoard: write a job's log as event files.

The files are written from the durable log and not by a rank, because rank 0 may die or change, and
the job may undo a step that rank 0 would already have written. The log records when the job goes
back to an older step; a ``START`` record then makes TensorBoard drop the steps from there on. If a
writer is killed, its successor writes a new file, which first makes TensorBoard drop everything
from step 0.

Torch is not loaded: ``torch.utils.tensorboard`` only wraps ``EventFileWriter`` of the tensorboard
package.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from etrain_jupyter.config.fields import Section
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.log.events import JobStatus
from etrain_jupyter.log.loggers.base import Exhibit, LoggerEntry, Record, RunInfo, Values
from etrain_jupyter.log.loggers.feed import export_log
from etrain_jupyter.log.loggers.timeline import ReadExhibit
from etrain_jupyter.log.tensorboard_exhibits import note_of, summary_of

SUFFIX = ".etrain"
"""Suffix of the files that this package writes; other files in the folder are not touched."""
MAX_EXHIBIT_BYTES = 200_000_000
"""Maximum size of all exhibits in one event file: TensorBoard cannot remove the oldest ones."""
OPTIONS = "--samples_per_plugin images=200,text=200"
"""Options of TensorBoard: by default, it displays 10 steps of an image, chosen at random."""


def require_tensorboard() -> None:
    """Check that the tensorboard package is installed.

    Raises:
        ConfigError: If it is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "log.tensorboard needs the package tensorboard, which is not installed",
            hint="pip install 'etrain-jupyter[tensorboard]', or remove the line; job.history() "
            "has every value",
        )


class TensorBoardOptions(Section):
    """Options of ``log.to: {tensorboard: ...}``."""

    folder: str
    """Folder for the event files of all jobs, with a subfolder per job."""


class TensorBoardFiles:
    """Logger for TensorBoard: writes event files into a folder.

    Earlier files of this package in the job's subfolder are replaced.

    Args:
        folder: Folder for the event files, with a subfolder per job.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._exhibit_bytes = 0  # in this file

    @classmethod
    def from_entry(cls, entry: LoggerEntry) -> Self:
        """Create the logger for ``log.to``.

        Raises:
            ConfigError: If an option is invalid or tensorboard is not installed.
        """
        entry.require("tensorboard", extra="tensorboard")
        folder = entry.read_as(TensorBoardOptions).folder
        return cls(Path(folder).expanduser().absolute())

    @property
    def options(self) -> dict[str, Any]:
        """All options, as JSON."""
        return {"folder": str(self._folder)}

    def open(self, run: RunInfo) -> int:
        """Create the event file, and remove earlier ones."""
        # Imported here because the package is optional.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = self._folder / run.job_id
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old_files(folder)
        self._writer = EventFileWriter(str(folder), filename_suffix=SUFFIX)
        self._exhibit_bytes = 0
        # A running TensorBoard must also drop the data from the previous writer.
        self._drop_from(0, time.time())
        self._writer.flush()
        return 0

    def write(self, records: Sequence[Record]) -> None:
        """Write scalars and exhibits, so that readers see them; TensorBoard has no notes."""
        for record in records:
            if isinstance(record, Values):
                self._write_values(record)
            elif isinstance(record, Exhibit):
                self._write_exhibit(record)
        self._writer.flush()

    def drop_after(self, step: int, time: float) -> bool:
        """Make TensorBoard drop the records after a step."""
        self._drop_from(step + 1, time)
        return True

    def close(self, status: JobStatus | None) -> None:
        """Write everything and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _write_values(self, record: Values) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=t, simple_value=v) for t, v in record.values.items()]
        self._add(record.step, record.time, summary=Summary(value=values))

    def _write_exhibit(self, record: Exhibit) -> None:
        if self._exhibit_bytes >= MAX_EXHIBIT_BYTES:
            return
        content = record.load()
        if content is None:
            return
        self._exhibit_bytes += record.size_bytes
        self._add(record.step, record.time, summary=summary_of(record.name, content))
        if self._exhibit_bytes >= MAX_EXHIBIT_BYTES:
            note = (
                f"The event files contain {self._exhibit_bytes:,} bytes of figures, texts and "
                f"tables. Those after step {record.step:,} are left out. The dashboard and "
                "job.exhibits() have them."
            )
            self._add(record.step, record.time, summary=note_of(note))

    def _drop_from(self, step: int, at: float) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(step, at, session_log=SessionLog(status=SessionLog.START))

    def _add(self, step: int, at: float, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        self._writer.add_event(Record(step=step, wall_time=at, **content))


def _remove_old_files(folder: Path) -> None:
    # TensorBoard reads files in the order of their names, which begin with their creation time in
    # seconds. It stops if the file that it is reading disappears. Therefore keep the newest file,
    # and create the next one in a later second.
    ours = sorted(folder.glob(f"events.out.tfevents.*{SUFFIX}"))
    for old in ours[:-1]:
        old.unlink(missing_ok=True)
    waits_until = time.monotonic() + 2.0  # bounded, because the clock may have been set back
    while ours and time.monotonic() < waits_until and int(time.time()) <= _second_of(ours[-1]):
        time.sleep(0.05)


def _second_of(file: Path) -> int:
    """Return the time at which an event file was created, in seconds since the epoch.

    >>> _second_of(Path("events.out.tfevents.1763712000.host.4711.0.etrain"))
    1763712000
    """
    return int(file.name.split(".")[3])


def convert(log_path: Path, folder: Path, read_exhibit: ReadExhibit | None = None) -> None:
    """Write the event files of a log in its current state.

    Args:
        log_path: The log.
        folder: Folder for the event files, with a subfolder per job.
        read_exhibit: Reads exhibits; by default from the folder of the log.
    """
    export_log(log_path, TensorBoardFiles(folder), read_exhibit)
