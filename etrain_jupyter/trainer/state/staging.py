"""The copy of a state that is written: laid out in memory as the files will be.

A state is copied once, at the step boundary, straight to its place in the file. What is written and
hashed afterwards is that memory: a second copy would keep the interpreter from the training thread.
The format is that of safetensors (https://huggingface.co/docs/safetensors): eight bytes for the
length of a JSON header, the header, and the tensors' bytes one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from etrain_jupyter.trainer.compiled import signs_of_life
from etrain_jupyter.trainer.state.packing import StateError, Tensors
from etrain_jupyter.trainer.state.pieces import copy_in_pieces

_ALIGNMENT = 8
"""Of the first tensor; larger element types come first, so that all are aligned."""

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_NO_METADATA: Mapping[str, str] = MappingProxyType({})


class StagedFile:
    """One safetensors file in memory, for tensors of these names, shapes and types.

    Args:
        tensors: What it is for; ``take`` copies them.
        metadata: For the header.
    """

    def __init__(self, tensors: Tensors, metadata: Mapping[str, str] = _NO_METADATA) -> None:
        self._form = _form_of(tensors)
        self._is_pinned = any(value.is_cuda for value in tensors.values())
        header, starts = _layout(self._form, metadata)
        size = len(header) + sum(_num_bytes(*form) for form in self._form.values())
        # Pinned, so that a device copies all of them while this thread goes on to the next.
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        self._buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._views = {
            name: self._view(len(header) + start, *self._form[name])
            for name, start in starts.items()
        }

    def _view(self, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        raw = self._buffer[start : start + _num_bytes(shape, dtype)]
        return raw.view(dtype).view(shape)

    def fits(self, tensors: Tensors) -> bool:
        """Whether they can be copied here: new memory takes several times as long as the copy."""
        is_pinned = any(value.is_cuda for value in tensors.values())
        return self._form == _form_of(tensors) and self._is_pinned == is_pinned

    def take(self, tensors: Tensors, beat: Callable[[], None] = lambda: None) -> None:
        """Copy the tensors here; those of a device are there once it was synchronized."""
        for name, value in tensors.items():
            copy_in_pieces(self._views[name], value.detach(), beat, non_blocking=True)

    @property
    def data(self) -> memoryview:
        """The bytes of the file, which ``take`` writes over."""
        array: Any = self._buffer.numpy()
        return memoryview(array)


def stage(
    tensors_of: Mapping[str, Tensors],
    spare: Mapping[str, StagedFile],
    metadata_of: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    *,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, StagedFile]:
    """Return copies of tensors, file by file, which training does not touch any more.

    Args:
        tensors_of: What goes into each file.
        spare: Files of an earlier copy that nobody needs: those that fit are written over.
        metadata_of: For the headers.
        beat: Sends a heartbeat; called after each piece, since new memory is slow.

    Raises:
        StateError: If a tensor's type is none that a file can have.
    """
    files = {}
    for name, tensors in tensors_of.items():
        file = spare.get(name)
        if file is None or not file.fits(tensors):
            with signs_of_life(beat):  # a device's counterpart is allocated in one long call
                file = StagedFile(tensors, metadata_of.get(name, _NO_METADATA))
        file.take(tensors, beat)
        files[name] = file
    if any(value.is_cuda for tensors in tensors_of.values() for value in tensors.values()):
        torch.cuda.synchronize()
    return files


def _form_of(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


def _num_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _layout(
    form: Mapping[str, tuple[torch.Size, torch.dtype]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the file's first bytes, and where each tensor begins after them."""
    starts: dict[str, int] = {}
    end = 0
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for name in sorted(form, key=lambda name: (-form[name][1].itemsize, name)):
        shape, dtype = form[name]
        starts[name], start = end, end
        end += _num_bytes(shape, dtype)
        word = _word_of(name, dtype)
        entries[name] = {"dtype": word, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, starts


def _word_of(name: str, dtype: torch.dtype) -> str:
    word = _DTYPES.get(str(dtype).removeprefix("torch."))
    if word is None:
        raise StateError(
            f"{name} is of type {dtype}, which a checkpoint cannot have. Convert it in the "
            "function that builds the model."
        )
    return word
