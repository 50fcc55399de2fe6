"""Staged copy of a state, with the tensors laid out in memory as in the files to be written.

At the step boundary, a state is copied once, directly to its place in the file. That memory is then
hashed and written directly, because a second copy would hold the GIL and stall training. The format
is safetensors (https://huggingface.co/docs/safetensors): eight bytes for the length of a JSON
header, the header, and the bytes of the tensors one after another.
"""

from __future__ import annotations

import json
import logging
import math
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from etrain_jupyter.trainer.compiled import heartbeats
from etrain_jupyter.trainer.state.packing import StateError, Tensors
from etrain_jupyter.trainer.state.pieces import copy_in_pieces

_ALIGNMENT = 8
"""Alignment of the first tensor. Larger element types come first, so that all tensors are
aligned."""

DTYPES = {
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
"""Names of the element types in safetensors files, by torch's names."""
_NO_METADATA: Mapping[str, str] = MappingProxyType({})

logger = logging.getLogger(__name__)


class StagedFile:
    """One safetensors file in memory, for tensors with fixed names, shapes and types."""

    def __init__(self, tensors: Tensors, metadata: Mapping[str, str] = _NO_METADATA) -> None:
        self._form = _form_of(tensors)
        self._is_pinned = any(value.is_cuda for value in tensors.values())
        header, starts = _layout(self._form, metadata)
        size = len(header) + sum(_num_bytes(*form) for form in self._form.values())
        self._buffer = torch.empty(size, dtype=torch.uint8)
        # Pinned, so that device copies are asynchronous while this thread issues the next copy.
        if self._is_pinned:
            pin_buffer(self._buffer, owner=self)
        self._buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._views = {
            name: self._view(len(header) + start, *self._form[name])
            for name, start in starts.items()
        }

    def _view(self, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        raw = self._buffer[start : start + _num_bytes(shape, dtype)]
        return raw.view(dtype).view(shape)

    def fits(self, tensors: Tensors) -> bool:
        """Return True if the tensors fit here: reusing memory is faster than allocating it."""
        is_pinned = any(value.is_cuda for value in tensors.values())
        return self._form == _form_of(tensors) and self._is_pinned == is_pinned

    def take(self, tensors: Tensors, beat: Callable[[], None] = lambda: None) -> None:
        """Copy the tensors here; copies from a device complete when the device is synchronized."""
        # non_blocking only has an effect with pinned memory. ``stage`` synchronizes once at the
        # end.
        for name, value in tensors.items():
            copy_in_pieces(self._views[name], value.detach(), beat, non_blocking=True)

    @property
    def data(self) -> memoryview:
        """The bytes of the file; overwritten by ``take``."""
        array: Any = self._buffer.numpy()
        return memoryview(array)


def stage(
    tensors_of: Mapping[str, Tensors],
    spare: Mapping[str, StagedFile],
    metadata_of: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    *,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, StagedFile]:
    """Return copies of tensors, one per file, that training no longer changes.

    Args:
        tensors_of: The tensors of each file.
        spare: Files of an earlier copy that is no longer needed; those that fit are reused.
        metadata_of: Metadata for the header of each file.
        beat: Sends a heartbeat; called after each piece, since new memory is slow.

    Raises:
        StateError: If a tensor has a type that safetensors does not support.
    """
    files = {}
    for name, tensors in tensors_of.items():
        file = spare.get(name)
        if file is None or not file.fits(tensors):
            with heartbeats(beat):  # pinned memory is allocated in one long call
                file = StagedFile(tensors, metadata_of.get(name, _NO_METADATA))
        file.take(tensors, beat)
        files[name] = file
    # Synchronize before training changes the tensors and before a thread reads the copy.
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
    # | length: 8 bytes | JSON header, padded | float64 tensors | float32 tensors | ... | uint8 |
    #
    # Returns everything before the tensors, and the offset of each tensor after it.
    starts: dict[str, int] = {}
    end = 0
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    # Scalars come before larger tensors of the same element size, so that a reader that needs all
    # of them finds them next to each other.
    for name in sorted(
        form, key=lambda name: (-form[name][1].itemsize, form[name][0].numel() > 1, name)
    ):
        shape, dtype = form[name]
        starts[name], start = end, end
        end += _num_bytes(shape, dtype)
        type_name = _dtype_name(name, dtype)
        entries[name] = {"dtype": type_name, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The format requires that the tensors start at a multiple of eight bytes.
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, starts


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    type_name = DTYPES.get(str(dtype).removeprefix("torch."))
    if type_name is None:
        raise StateError(
            f"{name} is of type {dtype}, which a checkpoint cannot store. Convert it in the "
            "function that builds the model."
        )
    return type_name


def pin_buffer(buffer: torch.Tensor, *, owner: object) -> bool:
    """Register the memory of ``buffer`` with CUDA, so that copies from a GPU are asynchronous.

    torch's own pinned allocator rounds each block up to a power of two and keeps freed blocks: the
    copy of a state of 9 GB would hold 16 GB, and a copy with another layout would add its own
    blocks. The memory stays registered until ``owner`` is freed.

    Args:
        buffer: A tensor in host memory, shape ``(B,)``.
        owner: An object that holds the only lasting reference to ``buffer``.

    Returns:
        True if the memory is pinned. If not, for example because the user's limit for locked memory
        is reached, copies still work, but are synchronous.
    """
    if buffer.numel() == 0:
        return False
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    start = buffer.data_ptr()
    error = cuda.cudaHostRegister(start, buffer.nbytes, 0)
    if int(error) != 0:
        logger.warning(
            "cannot pin %d bytes of host memory (CUDA error %d): checkpoints stall training "
            "longer. Raise the limit of locked memory (ulimit -l).",
            buffer.nbytes,
            int(error),
        )
        return False
    # The finalizer runs before the attributes of ``owner`` are freed, but not at exit, when the
    # process no longer has a CUDA context.
    weakref.finalize(owner, cuda.cudaHostUnregister, start).atexit = False
    return True
