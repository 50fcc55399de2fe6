"""Classify CUDA errors: caused by the notebook or by the machine."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistBackendError

from etrain_jupyter.bundle.sources import CellSource
from etrain_jupyter.trainer.control.device_errors import (
    code_of_pass,
    device_error_in,
    hint_for_device,
    is_of_machine,
)
from etrain_jupyter.trainer.group.process_group import CommunicationError

# Review G4

ASSERT = "CUDA error: device-side assert triggered"
ILLEGAL = "CUDA error: an illegal memory access was encountered"


# In a fixed order: the processes of pytest-xdist must collect the same tests.
ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", RuntimeError)


@pytest.mark.parametrize("kind", list(dict.fromkeys((RuntimeError, ACCELERATOR_ERROR))))
@pytest.mark.parametrize(
    ("text", "alone", "with_peers"),
    [
        (ASSERT, False, False),
        ("CUDA error: no kernel image is available for execution on the device", False, False),
        ("CUDA error: invalid configuration argument", False, False),
        (ILLEGAL, False, True),
        ("CUDA error: misaligned address", False, True),
        ("CUDA error: uncorrectable ECC error encountered", True, True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", True, True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True, True),
        ("CUDA error: no CUDA-capable device is detected", True, True),
        ("CUDA error: unspecified launch failure", True, True),
        ("CUDA error: unknown error", True, True),
        ("No CUDA GPUs are available", True, True),
    ],
)
def test_device_error_is_attributed_to_the_machine_or_to_the_notebook(
    kind, text, alone, with_peers
):
    error = kind(text)
    assert device_error_in(error) is error
    assert is_of_machine(error, has_peers=False) == alone
    assert is_of_machine(error, has_peers=True) == with_peers


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        CommunicationError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
        DistBackendError("NCCL error in: a.cpp:1, unhandled system error\nncclSystemError: x"),
        ValueError(ASSERT),
    ],
)
def test_memory_connection_and_ordinary_errors_are_not_device_errors(error):
    assert device_error_in(error) is None


def test_first_error_counts_even_if_the_clean_up_raises_another():
    first = RuntimeError(ASSERT)

    def fail_twice() -> None:
        try:
            raise first
        finally:
            raise RuntimeError(ASSERT)

    with pytest.raises(RuntimeError) as caught:
        fail_twice()
    assert device_error_in(caught.value) is first


def test_device_error_behind_a_failed_collective_is_found():
    first = RuntimeError(ASSERT)
    with pytest.raises(CommunicationError) as caught:
        raise CommunicationError("device-side assert") from first
    assert device_error_in(caught.value) is first
    text = "NCCL error in: a.cpp:1\nLast error:\nCuda failure 'device-side assert triggered'"
    assert device_error_in(DistBackendError(text)) is not None


def test_hint_names_indices_only_after_an_assert():
    assert "CrossEntropyLoss" in hint_for_device(RuntimeError(ASSERT))
    assert "CrossEntropyLoss" not in hint_for_device(RuntimeError(ILLEGAL))
    assert "CUDA_LAUNCH_BLOCKING=1" in hint_for_device(RuntimeError(ILLEGAL))


def test_code_of_a_pass_without_functions_of_the_user_is_the_line_of_the_cell():
    cells = {"<etrain loss>": CellSource(label="loss of the cell", text="F.cross_entropy")}
    functions = [torch.nn.functional.cross_entropy, torch.nn.Linear.forward]
    assert code_of_pass(functions, cells) == "  loss of the cell: F.cross_entropy"
