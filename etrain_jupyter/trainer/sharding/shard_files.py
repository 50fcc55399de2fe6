"""Optimizer state in the files of a checkpoint; each rank reads only its own ranges.

The files have one entry ``INDEX.NAME`` for each tensor of the state, or several entries
``INDEX.NAME@FIRST:STOP`` if several ranks wrote parts of the tensor. So any number of ranks can
read the files, regardless of how many wrote them::

    files     optimizer-1-of-3          optimizer-2-of-3          optimizer-3-of-3
    entries   0.exp_avg  1.exp_avg@0:64 | 1.exp_avg@64:99  2.exp_avg | 3.exp_avg
    blocks    |  0  |  1  |  2  |  3  |  |  0  |  1  |  2  |  3  |    ...
    rank 0              2     3            0     1                     reads these blocks only
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.rules.optimizer_shards import Range, overlap
from etrain_jupyter.storage.checkpoints.blocks import Overlap, PartBlocks, read_blocks
from etrain_jupyter.trainer.sharding.held_state import (
    SCALARS,
    Form,
    Layout,
    NewShard,
    Slice,
    vectors_of,
)
from etrain_jupyter.trainer.state.packing import TENSOR, Tensors
from etrain_jupyter.trainer.state.staging import DTYPES
from etrain_jupyter.trainer.state.transfer_plan import bytes_of

_ENTRY = re.compile(r"(\d+)\.([^.@]+)(?:@(\d+):(\d+))?")
_TYPES = {short: getattr(torch, name) for name, short in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""

Table = dict[str, list[Any]]
"""Entries of a file by name: the type, the offset of the first byte, and the offset of the byte
after the last. A scalar's entry has its value as the fourth item. A table can be sent as JSON."""


def read_table(file: PartBlocks) -> Table:
    """Return the entries of a file, with the values of its scalars.

    Raises:
        CheckpointError: If the file is missing, corrupt or malformed.
    """
    read = _Cached(file).read
    try:
        size = int.from_bytes(read(0, 8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has {size} bytes")
        header: dict[str, Any] = json.loads(read(8, 8 + size))
        table: Table = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, stop = (8 + size + offset for offset in entry["data_offsets"])
            dtype = _TYPES[entry["dtype"]]
            is_inside = 8 + size <= first <= stop <= file.part.size
            if not is_inside or (stop - first) % dtype.itemsize:
                raise ValueError(f"{name} is at {first}:{stop}")
            table[name] = [entry["dtype"], first, stop]
            if _parse(name)[1] in SCALARS:
                raw = bytearray(read(first, first + dtype.itemsize))
                table[name].append(torch.frombuffer(raw, dtype=dtype).item())
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{file.part.key} is not a valid safetensors file: {exc}") from exc
    return table


class _Cached:
    """Reads small, adjacent ranges; keeps the last block in memory."""

    def __init__(self, file: PartBlocks) -> None:
        self._file = file
        self._number = -1
        self._block = b""

    def read(self, first: int, stop: int) -> bytes:
        if stop > self._file.part.size:
            raise ValueError(f"it ends before byte {stop}")
        data = b""
        for number, (start, _, size) in self._file.find(first, stop):
            if number != self._number:
                self._block, self._number = self._file.read(number), number
            data += self._block[start : start + size]
        return data


class _Entry(NamedTuple):
    """Some elements of a vector, in a file."""

    span: Range
    """Elements of the parameter."""
    file: PartBlocks
    at: int
    """Offset of the first element."""
    dtype: torch.dtype


class _Copy(NamedTuple):
    """Bytes of a block, and their place in memory."""

    found: Overlap
    target: torch.Tensor
    """The memory of the whole range, as bytes."""


class ShardFiles:
    """The optimizer's state in the files of a checkpoint.

    Args:
        files: The files, each with its entries.
        layout: The parameters to which the state belongs.

    Raises:
        CheckpointError: If the state does not fit the parameters.
    """

    def __init__(self, files: Iterable[tuple[PartBlocks, Table]], layout: Layout) -> None:
        self._layout = layout
        self._vectors: dict[tuple[int, str], list[_Entry]] = {}
        self.forms: dict[int, Form] = {}
        """Form of each parameter's state, by index."""
        scalars: dict[int, Tensors] = {}
        for file, table in files:
            for name, (kind, at, stop, *value) in table.items():
                index, key, span = _parse(name)
                dtype = _TYPES[kind]
                first = span[0] if span is not None else 0
                if value:
                    scalars.setdefault(index, {})[key] = torch.tensor(value[0], dtype=dtype)
                else:
                    elements = first, first + (stop - at) // dtype.itemsize
                    entry = _Entry(elements, file, at, dtype)
                    self._vectors.setdefault((index, key), []).append(entry)
        kinds: dict[int, list[tuple[str, torch.dtype]]] = {index: [] for index in scalars}
        for (index, key), entries in sorted(self._vectors.items()):
            kinds.setdefault(index, []).append((key, entries[0].dtype))
        self._check(kinds)
        for index, vectors in sorted(kinds.items()):
            self.forms[index] = Form(vectors=tuple(vectors), scalars=scalars.get(index, {}))

    def _check(self, indices: Iterable[int]) -> None:
        if (index := max(indices, default=-1)) >= len(self._layout.parameters):
            raise CheckpointError(f"it has optimizer state of {index + 1} parameters or more")
        for (index, key), entries in self._vectors.items():
            entries.sort(key=lambda entry: entry.span)
            size, at = self._layout.shapes[index].numel(), 0
            for entry in entries:
                if entry.span[0] != at or entry.dtype != entries[0].dtype:
                    break
                at = entry.span[1]
            if at != size:
                raise CheckpointError(
                    f"its optimizer state {key!r} of {self._layout.names[index]} does not have "
                    f"all of the {size} elements"
                )

    def fill(self, shards: Sequence[NewShard], beat: Callable[[], None] = lambda: None) -> int:
        """Read the state of new shards; return the number of bytes that were read.

        Args:
            shards: Shards with the forms of these files.
            beat: Sends a heartbeat; called after each block.

        Raises:
            CheckpointError: If a block is missing or corrupt.
        """
        copies = self._plan(shards)

        def take(file: PartBlocks, number: int, data: bytes) -> None:
            block = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for (start, at, size), target in copies[file, number]:
                target[at : at + size].copy_(block[start : start + size])

        num_bytes = 0
        for size in read_blocks(copies, take):
            num_bytes += size
            beat()
        return num_bytes

    def _plan(self, shards: Sequence[NewShard]) -> dict[tuple[PartBlocks, int], list[_Copy]]:
        # Plan by block, so that each block is read once even if two shards need it.
        copies: dict[tuple[PartBlocks, int], list[_Copy]] = {}
        for shard in shards:
            for part in shard.parts:
                for name, _ in vectors_of(part, self.forms):
                    vector = shard.vectors[part.param, name]
                    for entry in self._vectors[part.param, name]:
                        self._add(copies, entry, part, vector)
        return copies

    def _add(
        self,
        copies: dict[tuple[PartBlocks, int], list[_Copy]],
        entry: _Entry,
        part: Slice,
        vector: torch.Tensor,
    ) -> None:
        common = overlap(entry.span, (part.first, part.stop))
        if common is None:
            return
        target = bytes_of(vector[common[0] - part.first : common[1] - part.first])
        first = entry.at + (common[0] - entry.span[0]) * entry.dtype.itemsize
        for number, found in entry.file.find(first, first + len(target)):
            copies.setdefault((entry.file, number), []).append(_Copy(found, target))


def _parse(name: str) -> tuple[int, str, Range | None]:
    match = _ENTRY.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f"its optimizer state {name!r} cannot be divided among the workers. Resume with "
            "shard: none"
        )
    index, key, first, stop = match.groups()
    return int(index), key, (int(first), int(stop)) if first is not None else None


def join_parts(tensors: Tensors, shapes: Sequence[torch.Size]) -> Tensors:
    """Join the entries that several ranks have written, for an optimizer that is not divided.

    Args:
        tensors: Entries by name, without a prefix.
        shapes: Shape of each parameter, by index.
    """
    whole: Tensors = {}
    pieces: dict[tuple[int, str], list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _ENTRY.fullmatch(name)
        if match is None or match[3] is None:
            whole[name] = tensor
        else:
            pieces.setdefault((int(match[1]), match[2]), []).append((int(match[3]), tensor))
    for (index, key), found in pieces.items():
        joined = torch.cat([tensor for _, tensor in sorted(found, key=lambda pair: pair[0])])
        if index >= len(shapes) or joined.numel() != shapes[index].numel():
            raise CheckpointError("the optimizer's state belongs to other parameters")
        whole[f"{index}.{key}"] = joined.view(shapes[index])
    return whole


def header_of_state(names: Iterable[str], prefix: str) -> list[list[Any]]:
    """Return the optimizer's state as in ``state.json``, from the names of its tensors.

    A checkpoint that several ranks have written has no such list, because no rank knows all of it.
    """
    state: dict[int, dict[str, Mapping[str, str]]] = {}
    for name in sorted(names):
        index, key, _ = _parse(name)
        state.setdefault(index, {})[key] = {TENSOR: prefix + name}
    return [[index, values] for index, values in sorted(state.items())]
