"""Layout of a bundle's payload: the pickles, then the arrays and tensors that they refer to."""

from __future__ import annotations

import io
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from etrain_jupyter.bundle.tensors import TensorRecorder, align

MAX_BYTES = 1 << 30
"""Maximum size of a bundle."""

_OUT_OF_BAND_BYTES = 16 * 1024
"""Arrays of at least this size are not copied into the pickle."""

_IN_MEMORY_BYTES = 16 << 20
"""Pickles up to this size are kept in memory, larger ones in a temporary file."""

_CHUNK_BYTES = 1 << 20


class SpooledBytes:
    """A byte buffer that moves to a temporary file when it grows large.

    ``tempfile.SpooledTemporaryFile`` copies the buffer to read it; this one does not.
    """

    def __init__(self) -> None:
        self._file: Any = io.BytesIO()

    def __del__(self) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        """Append bytes."""
        is_in_memory = isinstance(self._file, io.BytesIO)
        if is_in_memory and self._file.tell() + memoryview(data).nbytes > _IN_MEMORY_BYTES:
            file = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in __del__
            file.write(self._file.getbuffer())
            self._file = file
        return int(self._file.write(data))

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes in bounded chunks."""
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK_BYTES):
            yield chunk


Part = memoryview | SpooledBytes
"""A contiguous section of a bundle."""


def chunks_of(parts: Sequence[Part]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of all parts in order, in bounded chunks."""
    for part in parts:
        if isinstance(part, memoryview):
            for first in range(0, len(part), _CHUNK_BYTES):
                yield part[first : first + _CHUNK_BYTES]
        else:
            yield from part.chunks()


class PayloadTooLargeError(Exception):
    """Abort pickling: the pickles alone exceed the maximum size of a bundle."""


class PickleStream:
    """Output of a pickler: the pickled bytes, and the arrays that are stored out of band.

    Args:
        max_bytes: Maximum size of all pickles. Without this limit, a huge list would fill the
            disk before its size is known.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.owner = ""
        """The captured name that is being pickled."""
        self.sizes: dict[str, int] = defaultdict(int)
        """Bytes by captured name."""
        self.num_bytes = 0
        """Total size of the pickles."""
        self.pickles = SpooledBytes()
        self.arrays: list[memoryview] = []
        self._max_bytes = max_bytes

    def write(self, data: Any) -> int:
        """Append bytes of the pickles.

        Raises:
            PayloadTooLargeError: If they exceed ``max_bytes``.
        """
        size = memoryview(data).nbytes
        self.num_bytes += size
        self.sizes[self.owner] += size
        if self.num_bytes > self._max_bytes:
            raise PayloadTooLargeError
        return self.pickles.write(data)

    def keep_out_of_band(self, buffer: pickle.PickleBuffer) -> bool:
        """Record a large array's memory; return True if the array should be pickled in band."""
        memory = buffer.raw()
        # Each array outside of the pickle needs padding and an entry in the table.
        if memory.nbytes < _OUT_OF_BAND_BYTES:
            return True
        self.sizes[self.owner] += memory.nbytes
        self.arrays.append(memory)
        return False


class Payload:
    """The pickles, followed by arrays, tensors, and the table of their positions."""

    def __init__(self, stream: PickleStream, tensors: TensorRecorder) -> None:
        self.parts: list[Part] = [stream.pickles]
        self._end = stream.num_bytes
        # The unpickler expects the arrays of the table in the order in which they were pickled.
        positions = []
        for memory in stream.arrays:
            positions.append((align(self._end), len(memory)))
            self._append(align(self._end), memory)
        table, pieces = tensors.collect(self._end)
        for position, memory in pieces:
            self._append(position, memory)
        # The table comes last, because its positions are known only now. The header, which is
        # written afterwards, contains the position of the table.
        values = {"arrays": positions, "ranges": table.ranges, "packed": table.packed}
        self.table_position = self._end
        self._append(self._end, memoryview(pickle.dumps(values, protocol=5)))

    def _append(self, position: int, memory: memoryview) -> None:
        padding = memoryview(bytes(position - self._end))
        self.parts += [padding, memory]
        self._end = position + len(memory)
