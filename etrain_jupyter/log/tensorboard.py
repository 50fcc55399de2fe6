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
from etrain_jupyter.log.exhibits import Cell, Content, Table, size_of_png
from etrain_jupyter.log.loggers.base import Exhibit, LoggerEntry, Record, RunInfo, Values
from etrain_jupyter.log.loggers.feed import export_log
from etrain_jupyter.log.loggers.timeline import ReadExhibit
from etrain_jupyter.untrusted import plain_line, plain_text

SUFFIX = ".etrain"
"""Suffix of the files that this package writes; other files in the folder are not touched."""
MAX_EXHIBIT_BYTES = 200_000_000
"""Maximum size of the exhibits in an event file, because TensorBoard cannot remove old ones."""
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
        from tensorboard.compat.proto.summary_pb2 import Summary

        for record in records:
            if isinstance(record, Values):
                values = [Summary.Value(tag=t, simple_value=v) for t, v in record.values.items()]
                self._add(record.step, record.time, summary=Summary(value=values))
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
    """Write the event files of a log in its current state."""
    export_log(log_path, TensorBoardFiles(folder), read_exhibit)


_MARKDOWN = frozenset("\\`*_[]|<>&")
"""Characters with a meaning in Markdown, in its tables or in HTML."""


def summary_of(name: str, content: Content) -> Any:
    """Return the ``Summary`` of an exhibit: a picture as an image, text and tables as Markdown."""
    # The tag depends on the format, because TensorBoard displays all steps of a tag with the plugin
    # of the first one, and `eval.score` may return a figure at one step and a text at another.
    # Imported here because the package is optional.
    from tensorboard.compat.proto.summary_pb2 import Summary

    match content:
        case bytes():
            width, height = size_of_png(content)
            image = Summary.Image(width=width, height=height, encoded_image_string=content)
            return Summary(value=[Summary.Value(tag=f"figures/{name}", image=image)])
        case str():
            return _markdown_summary(f"texts/{name}", code_block(content))
        case Table():
            return _markdown_summary(f"tables/{name}", markdown_table(content))


def note_of(text: str) -> Any:
    """Return a ``Summary`` with a sentence about the exhibits."""
    return _markdown_summary("texts/etrain-note", _escaped(text))


def code_block(text: str) -> str:
    r"""Return Markdown that displays a text as it is, with its columns aligned.

    >>> code_block("a  1\nb *2*")
    '    a  1\n    b *2*'
    """
    # Indent instead of fencing, so that no mark in the text can end the block.
    return "\n".join("    " + line for line in plain_text(text).split("\n"))


def markdown_table(table: Table) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(Table(("name", "a|b"), ((None, 0.123456789),))))
    | name | a&#124;b |
    | --- | --- |
    |  | 0.123457 |
    """
    lines = [
        [_escaped(plain_line(column)) for column in table.columns],
        ["---"] * len(table.columns),
        *([_cell(value) for value in row] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return _escaped(plain_line(str(value), max_length=1000))


def _escaped(text: str) -> str:
    # Character references, because a backslash does not escape "|" and "<" everywhere.
    return "".join(f"&#{ord(c)};" if c in _MARKDOWN else c for c in text)


def _markdown_summary(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text import metadata

    tensor = TensorProto(
        dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=TensorShapeProto()
    )
    kind = metadata.create_summary_metadata(display_name="", description="")
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=kind)])
