"""Optimizer state in the files of a checkpoint, read in ranges.

The files have one entry ``INDEX.NAME`` for each tensor of the state, or several entries
``INDEX.NAME@FIRST:STOP`` if ranks wrote parts of it. So they do not depend on the number of ranks
that wrote them or that read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.rules.sharding.optimizer_shards import Range
from etrain_jupyter.trainer.sharding.held_state import SCALARS, Form, Layout, Slice
from etrain_jupyter.trainer.state.packing import TENSOR, Tensors
from etrain_jupyter.trainer.state.staging import DTYPES

_ENTRY = re.compile(r"(\d+)\.([^.@]+)(?:@(\d+):(\d+))?")
_TYPES = {short: getattr(torch, name) for name, short in DTYPES.items()}


class _Entry(NamedTuple):
    """One entry of a file, whose bytes are not in memory until they are read."""

    first: int
    """First element of the tensor."""
    values: torch.Tensor
    """The elements, flat; mapped from the file."""


class ShardFiles:
    """The optimizer's state in the verified files of a checkpoint.

    Args:
        files: The files; they must exist as long as this object is used.
        layout: The parameters to which the state belongs.

    Raises:
        CheckpointError: If the state does not fit the parameters.
    """

    def __init__(self, files: Iterable[Path], layout: Layout) -> None:
        self._layout = layout
        self._entries: dict[tuple[int, str], list[_Entry]] = {}
        for file in files:
            for name, values in map_tensors(file).items():
                index, key, span = _parse(name)
                first = span[0] if span is not None else 0
                self._entries.setdefault((index, key), []).append(_Entry(first, values))
        for entries in self._entries.values():
            entries.sort(key=lambda entry: entry.first)
        self._check()

    def _check(self) -> None:
        for (index, key), entries in self._entries.items():
            if index >= len(self._layout.parameters):
                raise CheckpointError(f"it has optimizer state of {index + 1} parameters or more")
            size, at = self._layout.parameters[index].numel(), 0
            if key in SCALARS:
                continue
            for entry in entries:
                if entry.first != at:
                    break
                at += entry.values.numel()
            if at != size:
                raise CheckpointError(
                    f"its optimizer state {key!r} of {self._layout.names[index]} does not have "
                    f"all of the {size} elements"
                )

    @property
    def spans(self) -> list[Range]:
        """Everything."""
        return [(0, self._layout.size)]

    def form(self, index: int) -> Form | None:
        """Return the form of a parameter's state; None if it has no state."""
        found = {k: entries[0].values for (i, k), entries in self._entries.items() if i == index}
        if not found:
            return None
        state = {k: v.view(()).clone() if k in SCALARS else v for k, v in found.items()}
        return Form.of(self._layout.names[index], state)

    def read(self, name: str, part: Slice) -> torch.Tensor:
        """Return a part of a vector, in host memory."""
        pieces = []
        for entry in self._entries[part.param, name]:
            first = max(part.first, entry.first)
            stop = min(part.stop, entry.first + entry.values.numel())
            if first < stop:
                pieces.append(entry.values[first - entry.first : stop - entry.first])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def map_tensors(file: Path) -> Tensors:
    """Return the tensors of a safetensors file, flat, without reading them into memory.

    Raises:
        CheckpointError: If the file is malformed.
    """
    try:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        # Pages are read when they are used, and the kernel may drop them again.
        data = np.memmap(file, dtype=np.uint8, mode="c", offset=8 + size) if header else None
        found: Tensors = {}
        for name, entry in header.items():
            first, stop = entry["data_offsets"]
            dtype = _TYPES[entry["dtype"]]
            raw = torch.from_numpy(data[first:stop])  # type: ignore[index]
            found[name] = raw.view(dtype) if stop > first else torch.empty(0, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise CheckpointError(f"{file.name} cannot be read: {exc}") from exc
    return found


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
