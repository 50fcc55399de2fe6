"""Classify CUDA errors: the notebook's, or the machine's.

Kernels run after Python has passed them. So a CUDA error shows at the next synchronization, which
is mostly in this package, and the innermost frame says nothing about its origin. Afterwards most of
them stay: every call of CUDA in the process fails, and only its end helps.

==============================  ==============================================================
the notebook's                  device-side asserts (a label out of range), launch errors, no
                                kernel image for the GPU
the notebook's if alone, else   illegal memory access, misaligned address, illegal instruction,
the machine's                   invalid program counter: a peer that dies in the middle of a
                                transfer over NVLink causes them, too
the machine's                   uncorrectable ECC or NVLink errors, a GPU that is busy, lost or
                                not found, driver errors, "unknown error", "unspecified launch
                                failure", "hardware stack error", a launch that timed out
==============================  ==============================================================

What counts as the machine's ends the trainer and not the job. If it is the notebook's all the same,
it returns in the same step, and the job fails at the third time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch

from etrain_jupyter.bundle.sources import CellSource, is_library, is_of_this_package

_CUDA = "CUDA error:"
_NOT_STICKY = ("out of memory", "CUBLAS_STATUS_", "CUSOLVER_STATUS_", "CUSPARSE_STATUS_")
"""Errors that torch raises where they arise, and that leave the device usable."""

_ASSERT = "device-side assert"
_OF_NOTEBOOK_OR_PEER = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "operation not supported on global/shared address space",
)
_OF_MACHINE = (
    "uncorrectable ECC",
    "uncorrectable NVLink",
    "peer GPU memory over nvlink",
    "fallen off the bus",
    "GPU is lost",
    "busy or unavailable",
    "no CUDA-capable device",
    "No CUDA GPUs are available",
    "invalid device ordinal",
    "driver shutting down",
    "driver initialization failed",
    "initialization error",
    "system not yet initialized",
    "unsupported display driver",
    "unknown error",
    "unspecified launch failure",
    "hardware stack error",
    "launch timed out",
)

_EXACT = (
    "Kernels run asynchronously, so the failing line may be an earlier one. To get the exact line, "
    "set CUDA_LAUNCH_BLOCKING=1 in the workers' environment (pool local: %env "
    "CUDA_LAUNCH_BLOCKING=1 before it starts) and run the cell again"
)
_OUT_OF_RANGE = (
    "The usual cause is an index out of range: targets of CrossEntropyLoss must be 0 to classes - "
    "1, and indices of an Embedding 0 to num_embeddings - 1; the log shows the failed assertion"
)


def device_error_in(exc: BaseException) -> BaseException | None:
    """Return the CUDA error that led to this exception, the first one if cleaning up raised more.

    Memory that ran out is none: the device stays usable.
    """
    found = [link for link in _chain_of(exc) if _is_device_error(link)]
    return found[-1] if found else None


def is_of_machine(error: BaseException, *, has_peers: bool) -> bool:
    """Whether a CUDA error counts as the machine's, so that only this trainer ends.

    Args:
        error: What ``device_error_in`` found.
        has_peers: Whether other ranks may have caused it.
    """
    text = str(error).lower()
    if _ASSERT in text:
        return False
    words = (*_OF_MACHINE, *(_OF_NOTEBOOK_OR_PEER if has_peers else ()))
    return any(word.lower() in text for word in words)


def hint_for_device(error: BaseException) -> str:
    """Return what to look for and what to type after a CUDA error of the notebook's code."""
    return f"{_OUT_OF_RANGE}. {_EXACT}" if _ASSERT in str(error) else _EXACT


def code_of_pass(functions: Iterable[Any], cells: Mapping[str, CellSource]) -> str:
    """Return where the user's code of a pass begins, as the lines of a traceback.

    A traceback that ends in a synchronization has no frame of the user's.

    Args:
        functions: What the pass calls: the step, or the model's ``forward`` and the loss.
        cells: The notebook's cells by file name.
    """
    lines = []
    for function in functions:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if not isinstance(code, CodeType):
            continue
        name = code.co_filename
        if name in cells or not (is_library(name) or is_of_this_package(name)):
            label = cells[name].label if name in cells else f'File "{name}"'
            lines.append(f"  {label}, line {code.co_firstlineno}, in {code.co_name}")
    for key in ("step", "loss", "model"):
        cell = None if lines else cells.get(f"<etrain {key}>")
        if cell is not None:
            lines.append(f"  {cell.label}: {cell.text}")
    return "\n".join(lines)


def _is_device_error(exc: BaseException) -> bool:
    if not isinstance(exc, RuntimeError) or isinstance(exc, torch.OutOfMemoryError):
        return False
    text = str(exc)
    if any(words in text for words in _NOT_STICKY):
        return False
    kind = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    is_raised_by_cuda = kind is not None and isinstance(exc, kind)
    # NCCL's message quotes the error of the notebook's kernel that it stumbled over.
    is_seen = _CUDA in text or f"{_ASSERT} triggered" in text
    return is_raised_by_cuda or is_seen or "No CUDA GPUs are available" in text


def _chain_of(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what was raised before it, newest first."""
    seen: set[int] = set()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
