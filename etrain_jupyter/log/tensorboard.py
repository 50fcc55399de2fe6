"""Write a job's log as TensorBoard event files: ``python -m etrain_jupyter.log.tensorboard``.

The files are written from the durable log and not by a rank, because rank 0 may die or change, and
the job may undo a step that rank 0 would already have written. The log records when the job goes
back to an older step; a ``START`` record then makes TensorBoard drop the steps from there on. If a
writer is killed, its successor writes a new file, which first makes TensorBoard drop everything
from step 0.

The writer is a separate process next to the coordinator, which must stay responsive. It does not
load torch: ``torch.utils.tensorboard`` only wraps ``EventFileWriter`` of the tensorboard package.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.log.event_log import LogReader
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    EvalCompleted,
    EvalScored,
    Event,
    ExhibitStored,
    JobRestored,
    JobStatusChanged,
    StepCompleted,
)
from etrain_jupyter.log.exhibit_files import load_stored
from etrain_jupyter.log.exhibits import Content
from etrain_jupyter.log.tensorboard_exhibits import note_of, summary_of

ReadExhibit = Callable[[ExhibitStored], Content | None]
"""Returns the checked content of an exhibit; None if it does not exist any more."""

SUFFIX = ".etrain"
"""Suffix of the files that this package writes; other files in the folder are not touched."""
POLL_S = 1.0
"""Interval in seconds for reading new events."""
LINGER_S = 2.0
"""Seconds to keep reading after the job has ended, for late messages from its workers."""
MAX_EXHIBIT_BYTES = 200_000_000
"""Maximum size of all exhibits in one event file: TensorBoard cannot remove the oldest ones."""
OPTIONS = "--samples_per_plugin images=200,text=200"
"""Options of TensorBoard: by default, it displays 10 steps of an image, chosen at random."""
_READ_EVENTS = 5_000
PHASES = ("data_s", "compute_s", "communication_s", "optimizer_s")


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


def scalars_of(event: StepCompleted | EvalCompleted | EvalScored) -> dict[str, float]:
    """Return the scalars of an event, by tag."""
    if isinstance(event, EvalCompleted | EvalScored):
        return {f"eval/{name}": value for name, value in event.values.items()}
    return {
        "train/loss": event.loss,
        "train/lr": event.lr,
        **{f"train/{name}": value for name, value in event.metrics.items()},
        "throughput/samples_per_s": event.samples_per_s,
        "workers/world_size": event.world_size,
        **{f"time/{name}": getattr(event, name) for name in PHASES},
    }


class TensorBoardFiles:
    """Write a job's events, in order, into a folder.

    Earlier files of this package in the folder are replaced.

    Args:
        folder: Folder for the event files.
        read_exhibit: Reads the exhibits that events describe.
    """

    def __init__(self, folder: Path, read_exhibit: ReadExhibit) -> None:
        # Imported here because the package is optional.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        _remove_old_files(folder)
        self._writer = EventFileWriter(str(folder), filename_suffix=SUFFIX)
        self._read_exhibit = read_exhibit
        self._exhibit_bytes = 0  # in this file
        self._step = 0  # the newest step in this file
        # A running TensorBoard must also drop the data from the previous writer.
        self._drop_from(0, time.time())

    def add(self, events: Iterable[Event]) -> None:
        """Write the scalars and the exhibits of events."""
        for event in events:
            if isinstance(event, JobRestored):
                self._drop_from(event.step + 1, event.time)
                self._step = event.step
            elif isinstance(event, StepCompleted):
                if event.step <= self._step:  # the log went back without a restore
                    self._drop_from(event.step, event.time)
                self._step = event.step
                self._write(event)
            elif isinstance(event, EvalCompleted | EvalScored):
                self._write(event)
            elif isinstance(event, ExhibitStored):
                self._write_exhibit(event)

    def flush(self) -> None:
        """Flush, so that readers see everything written so far."""
        self._writer.flush()

    def close(self) -> None:
        """Write everything and close the file."""
        self._writer.close()

    def _write(self, event: StepCompleted | EvalCompleted | EvalScored) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=t, simple_value=v) for t, v in scalars_of(event).items()]
        self._add(event.step, event.time, summary=Summary(value=values))

    def _write_exhibit(self, event: ExhibitStored) -> None:
        if self._exhibit_bytes >= MAX_EXHIBIT_BYTES:
            return
        content = self._read_exhibit(event)
        if content is None:
            return
        self._exhibit_bytes += event.size_bytes
        self._add(event.step, event.time, summary=summary_of(event.name, content))
        if self._exhibit_bytes >= MAX_EXHIBIT_BYTES:
            note = (
                f"The event files contain {self._exhibit_bytes:,} bytes of figures, texts and "
                f"tables. Those after step {event.step:,} are left out. The dashboard and "
                "job.exhibits() have them."
            )
            self._add(event.step, event.time, summary=note_of(note))

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
        folder: Folder for the event files.
        read_exhibit: Reads exhibits; by default from the folder of the log.
    """
    files = TensorBoardFiles(folder, read_exhibit or _exhibits_next_to(log_path))
    reader = LogReader(log_path)
    while news := reader.read(_READ_EVENTS):
        files.add(news)
    files.close()


def _exhibits_next_to(log_path: Path) -> ReadExhibit:
    return functools.partial(load_stored, log_path.parent)


def follow(log_path: Path, folder: Path, is_wanted: Callable[[], bool]) -> None:
    """Write a log's event files as it grows, until the job ends or ``is_wanted`` returns False."""
    files = TensorBoardFiles(folder, _exhibits_next_to(log_path))
    reader = LogReader(log_path)
    ends_at = float("inf")
    while True:
        # Decide before reading, so that events written just before the end are not missed.
        is_last = not is_wanted() or time.monotonic() > ends_at
        while news := reader.read(_READ_EVENTS):
            files.add(news)
            ends_at = _when_to_end(news, ends_at)
        files.flush()
        if is_last:
            break
        time.sleep(POLL_S)
    files.close()


def _when_to_end(news: list[Event], ends_at: float) -> float:
    statuses = [event.status for event in news if isinstance(event, JobStatusChanged)]
    if not statuses:
        return ends_at
    # A job that has ended may be resumed while this process lingers.
    is_ended = statuses[-1] in TERMINAL_STATUSES
    return time.monotonic() + LINGER_S if is_ended else float("inf")


def follow_elsewhere(
    log_path: Path, folder: Path, on_failure: Callable[[str], None]
) -> threading.Thread:
    """Follow a log in another process, which exits when the job ends or when this process exits.

    Args:
        log_path: The log.
        folder: Folder for the event files.
        on_failure: Called with the last line of output if the process fails, from the returned
            thread ``etrain-tensorboard-<job>``.
    """

    def wait() -> None:
        command = [sys.executable, "-m", __name__, str(log_path), str(folder), str(os.getpid())]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as exc:
            on_failure(str(exc))
            return
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            on_failure(last[0] if last else f"its process exited with code {done.returncode}")

    name = f"etrain-tensorboard-{log_path.parent.name}"
    thread = threading.Thread(target=wait, name=name, daemon=True)
    thread.start()
    return thread


def main() -> None:
    """Follow the log given on the command line while the given parent process is alive."""
    os.nice(10)
    log_path, folder, parent = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    # If the coordinator dies, Linux gives this process another parent. The next coordinator starts
    # another writer.
    follow(log_path, folder, lambda: os.getppid() == parent)


if __name__ == "__main__":
    main()
