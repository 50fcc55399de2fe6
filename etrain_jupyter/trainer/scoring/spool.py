"""Keep records on disk: the parts that this rank has evaluated, and the records of all samples.

The files have no name, so nothing is left behind even if the process is killed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from etrain_jupyter.trainer.references import WorkloadError


class Spool:
    """An append-only file of parts, in any order."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, closed in ``close``
        self._places: dict[int, tuple[int, int]] = {}
        """Offset and length by part."""
        self._end = 0

    @property
    def lengths(self) -> dict[int, int]:
        """Number of bytes of each part that is complete."""
        return {part: length for part, (_, length) in self._places.items()}

    def add(self, part: int, data: Sequence[bytes]) -> None:
        """Append a part.

        Raises:
            WorkloadError: If the disk is full.
        """
        length = 0
        for piece in data:
            self.write(memoryview(piece), length)
            length += len(piece)
        self.register({part: length})

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes beyond the complete parts; they count once ``register`` names their parts.

        Raises:
            WorkloadError: If the disk is full.
        """
        self._file.seek(self._end + offset)
        write_all(self._file, data)

    def register(self, lengths: Mapping[int, int]) -> None:
        """Add parts, in the order in which their bytes were written."""
        for part, length in lengths.items():
            self._places[part] = (self._end, length)
            self._end += length

    def fill(self, starts: Mapping[int, int], position: int, window: memoryview) -> None:
        """Write this spool's bytes into a window of the merged records.

        Args:
            starts: Position of each part in the merged records, for parts that this rank sends.
            position: Position of the window.
            window: Receives the bytes; its other bytes are left unchanged.
        """
        for part, start in starts.items():
            offset, length = self._places[part]
            first, last = max(start, position), min(start + length, position + len(window))
            if first < last:
                piece = window[first - position : last - position]
                read_all(self._file, piece, offset + first - start)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


class RecordFile:
    """The records of all samples, in the order of data.eval."""

    def __init__(self, num_bytes: int, num_records: int) -> None:
        self.num_bytes = num_bytes
        self.num_records = num_records
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, closed in ``close``

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def append(self, data: memoryview) -> None:
        """Append bytes.

        Raises:
            WorkloadError: If the disk is full.
        """
        write_all(self._file, data)

    def fill(self, position: int, window: memoryview) -> None:
        """Read the bytes of a window."""
        read_all(self._file, window, position)

    def close(self) -> None:
        """Delete the file, once no process reads it any more."""
        self._file.close()


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write bytes to an unbuffered file.

    Raises:
        WorkloadError: If the disk is full.
    """
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as exc:
        raise WorkloadError(
            f"the records of eval.predict could not be stored in {tempfile.gettempdir()} "
            f"({exc.strerror}). Free space there, set TMPDIR on the workers to a larger disk, or "
            "return smaller records."
        ) from exc


def read_all(file: IO[bytes], window: memoryview, offset: int) -> None:
    """Fill a window from an offset; the file's own position does not move."""
    done = 0
    while done < len(window):
        count = os.preadv(file.fileno(), [window[done:]], offset + done)
        if not count:
            raise EOFError(f"the spool ends {len(window) - done} bytes early")
        done += count
