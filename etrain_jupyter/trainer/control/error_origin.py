"""Find the origin of an exception: the notebook's code, the network, the machine, or a bug of ours.

An exception from the notebook fails the job. A bug in this package ends the trainer, as a segfault
would: the other ranks continue, and the job fails only if the bug recurs in the same step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.distributed import DistError

import etrain_jupyter
from etrain_jupyter.bundle.sources import CellSource, is_library, is_of_this_package
from etrain_jupyter.trainer.control.faults import InjectedError
from etrain_jupyter.trainer.micro_batch import is_out_of_memory

_PACKAGE = Path(etrain_jupyter.__file__).parent
_BORDER = frozenset(
    (
        *("workload.py", "optimizers.py", "data.py", "restore.py", "one_pass.py", "measures.py"),
        *("weight.py", "whole_set.py"),
    )
)
"""Modules that call the notebook's objects. If such an object is built-in code (``torch.dot``), or
the call does not fit its parameters, the exception is raised in a frame of these modules."""

_UNREACHABLE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
"""Errors that huggingface_hub raises if neither the hub nor its cache has a file."""

HINT_FOR_HUB = (
    "This worker has no access to the hub, and the files are not in its cache. Call "
    "from_pretrained(...).save_pretrained('FOLDER') on a machine with access, copy the folder to "
    "the same path on every worker, and give this path in place of the name. If the workers can "
    "reach a mirror, set HF_ENDPOINT in their environment"
)
"""Remedy for a hub that cannot be reached."""

_CUDA = "CUDA error:"
_NOT_STICKY = ("out of memory", "CUBLAS_STATUS_", "CUSOLVER_STATUS_", "CUSPARSE_STATUS_")
"""Errors that torch raises synchronously and after which the device is still usable."""

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


HINT_WITHOUT_GPU = (
    "This worker has no GPU. Remove .to('cuda') and .cuda() from the code: each worker moves the "
    "model and the batches to its own device"
)
"""Remedy for code that uses CUDA on a worker without a GPU."""


def chain_of(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, newest first."""
    # User code may create a cycle with ``raise ... from``.
    seen: set[int] = set()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def is_our_defect(exc: BaseException) -> bool:
    """Return True if a bug in this package raised the exception."""
    # exception                                  its innermost frame    a bug in this package
    # injected                                   any                    yes, that is its purpose
    # out of memory                              any                    no: the cell decides how
    #                                                                   much memory is needed
    # a class of this package (WorkloadError)    any                    no: raised on purpose
    # anything else                              this package           yes, except in _BORDER
    # anything else                              notebook, a library    no
    if isinstance(exc, InjectedError):
        return True
    if is_out_of_memory(exc):
        return False
    trace = exc.__traceback__
    if type(exc).__module__.partition(".")[0] == _PACKAGE.name or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    path = Path(trace.tb_frame.f_code.co_filename)
    return path.is_relative_to(_PACKAGE) and path.name not in _BORDER


def is_broken_exchange(exc: BaseException) -> bool:
    """Return True if a collective that torch itself started has failed."""
    # In the second step of each generation, DDP synchronizes its buckets with the other ranks, and
    # blocks inside gloo. If a peer dies at that moment, this rank gets a bare RuntimeError before
    # the generation is aborted.
    if isinstance(exc, DistError):
        return True
    return isinstance(exc, RuntimeError) and "gloo/transport" in str(exc)


def is_hub_unreachable(exc: BaseException) -> bool:
    """Return True if the hub could not be reached; False, for example, for a misspelled name."""
    # Compare names, because importing the library would take seconds, and the job may not use it.
    return any(
        type(link).__name__ in _UNREACHABLE
        and type(link).__module__.partition(".")[0] == "huggingface_hub"
        for link in chain_of(exc)
    )


def needs_missing_gpu(exc: BaseException) -> bool:
    """Return True if the notebook's code has used CUDA on a worker that should have no GPU."""
    texts = ["Torch not compiled with CUDA enabled", "Found no NVIDIA driver"]
    # Without this variable, the GPU may have been lost, which is a machine error.
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        texts.append("No CUDA GPUs are available")
    return any(text in str(link) for link in chain_of(exc) for text in texts)


def device_error_in(exc: BaseException) -> BaseException | None:
    """Return the CUDA error that led to this exception; None if there is none."""
    # Return the oldest error, because every cleanup call after it raises another CUDA error.
    found = [link for link in chain_of(exc) if _is_device_error(link)]
    return found[-1] if found else None


def is_of_machine(error: BaseException, *, has_peers: bool) -> bool:
    """Return True if a CUDA error is attributed to the machine, so that only this trainer ends.

    Kernels run asynchronously. A CUDA error is raised at the next synchronization, which is usually
    in this package, so the innermost frame does not identify the cause. Most errors are sticky:
    every later CUDA call in the process fails, and the process must be replaced.

    ==============================  ===========================================================
    notebook                        device-side asserts (a label out of range), launch errors,
                                    no kernel image for the GPU
    notebook for a single rank,     illegal memory access, misaligned address, illegal
    else machine                    instruction, invalid program counter: a peer that dies
                                    during an NVLink transfer causes them, too
    machine                         uncorrectable ECC or NVLink errors, a GPU that is busy, lost
                                    or not found, driver errors, "unknown error", "unspecified
                                    launch failure", "hardware stack error", a launch that timed
                                    out
    ==============================  ===========================================================

    A machine error ends the trainer but not the job. If the notebook turns out to be the cause, the
    error recurs in the same step, and the third occurrence fails the job.

    Args:
        error: From ``device_error_in``.
        has_peers: True if other ranks may have caused it.
    """
    text = str(error).lower()
    # Checked first, because an assert is the notebook's error, whatever else the message contains.
    if _ASSERT in text:
        return False
    words = (*_OF_MACHINE, *(_OF_NOTEBOOK_OR_PEER if has_peers else ()))
    # An unknown error is attributed to the notebook, so that it fails the job and the user sees it.
    return any(word.lower() in text for word in words)


def hint_for_device(error: BaseException) -> str:
    """Return the remedy for a CUDA error in the notebook's code."""
    return f"{_OUT_OF_RANGE}. {_EXACT}" if _ASSERT in str(error) else _EXACT


def code_of_pass(functions: Iterable[Any], cells: Mapping[str, CellSource]) -> str:
    """Return the first lines of the user's functions in a pass, formatted as a traceback.

    Args:
        functions: Functions that the pass calls: ``step``, or the model's ``forward`` and the loss.
        cells: The notebook's cells by file name.
    """
    lines = []
    for function in functions:
        function = getattr(function, "__func__", function)
        # A callable object or a C function has no code to show.
        code = getattr(function, "__code__", None)
        if not isinstance(code, CodeType):
            continue
        name = code.co_filename
        if name in cells or not (is_library(name) or is_of_this_package(name)):
            label = cells[name].label if name in cells else f'File "{name}"'
            lines.append(f"  {label}, line {code.co_firstlineno}, in {code.co_name}")
    # If all functions are library code, such as F.cross_entropy, show the config line in the cell
    # that refers to one of them.
    for key in ("step", "loss", "model"):
        cell = None if lines else cells.get(f"<etrain {key}>")
        if cell is not None:
            lines.append(f"  {cell.label}: {cell.text}")
    return "\n".join(lines)


def _is_device_error(exc: BaseException) -> bool:
    if not isinstance(exc, RuntimeError) or isinstance(exc, torch.OutOfMemoryError):
        return False
    if needs_missing_gpu(exc):
        return False
    text = str(exc)
    if any(words in text for words in _NOT_STICKY):
        return False
    kind = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    is_raised_by_cuda = kind is not None and isinstance(exc, kind)
    # NCCL raises its own error class, and quotes the earlier error from the failed kernel.
    is_seen = _CUDA in text or f"{_ASSERT} triggered" in text
    return is_raised_by_cuda or is_seen or "No CUDA GPUs are available" in text
