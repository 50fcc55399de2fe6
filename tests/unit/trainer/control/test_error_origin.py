"""A defect of ours is told from the notebook's, by where it was raised."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import DistBackendError

from etrain_jupyter.bundle.sources import CellSource
from etrain_jupyter.config.schema import OptimizerConfig
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.rules.samples.shard_plan import plan_shards
from etrain_jupyter.trainer.control.error_origin import (
    code_of_pass,
    device_error_in,
    hint_for_device,
    is_broken_exchange,
    is_hub_unreachable,
    is_of_machine,
    is_our_defect,
)
from etrain_jupyter.trainer.control.faults import InjectedError, inject_fault
from etrain_jupyter.trainer.data import open_samples
from etrain_jupyter.trainer.group.process_group import CommunicationError
from etrain_jupyter.trainer.objective.measures import Measures, Portion
from etrain_jupyter.trainer.objective.one_pass import LossOfOutput, Passed, StepFunction
from etrain_jupyter.trainer.objective.weight import Weight
from etrain_jupyter.trainer.optimizers import build_optimizer
from etrain_jupyter.trainer.references import DataError, WorkloadError
from etrain_jupyter.trainer.state.capture import digest_of
from etrain_jupyter.trainer.state.train_state import Every
from etrain_jupyter.wire import messages as m
from tests.unit.trainer.trainer_rig import CELL, TrainerRig


def raised(call) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return caught.value


def test_exception_raised_in_our_own_code_is_our_defect():
    assert is_our_defect(raised(lambda: digest_of(None)))
    assert is_our_defect(raised(lambda: Every(None, None, now=0.0)))


def test_injected_error_counts_as_our_defect():
    assert is_our_defect(raised(lambda: inject_fault("error")))
    assert is_our_defect(InjectedError("never raised"))


def test_exception_raised_by_the_notebook_or_torch_is_not_our_defect():
    assert not is_our_defect(raised(lambda: 1 / 0))
    assert not is_our_defect(raised(lambda: torch.zeros(2) @ torch.zeros(3)))
    # Raised in its own line, called from ours.
    assert not is_our_defect(
        raised(lambda: open_samples(_broken, name="data.train", collate=None, num_workers=0))
    )


def test_notebook_function_with_wrong_arguments_is_not_our_defect():
    assert not is_our_defect(
        raised(lambda: open_samples(_needs_one, name="data.train", collate=None, num_workers=0))
    )


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: LossOfOutput(torch.dot)(torch.nn.Linear(1, 1), PAIR), id="loss"),
        pytest.param(lambda: StepFunction(_needs_one)(torch.nn.Linear(1, 1), PAIR), id="step"),
        pytest.param(lambda: Weight(_needs_two, torch.nn.Linear(1, 1)).of(PAIR, 2), id="weight"),
        pytest.param(
            lambda: Measures({"f1": torch.dot}, is_weighted=False).shares(
                Passed(None, *PAIR), Portion(2, 2, None)
            ),
            id="metric",
        ),
    ],
)
def test_call_of_a_notebook_function_that_never_began_is_not_our_defect(call):
    assert not is_our_defect(raised(call))


def test_data_error_is_not_a_defect():
    error = raised(
        lambda: open_samples(np.zeros(0), name="data.train", collate=None, num_workers=0)
    )
    assert isinstance(error, DataError)
    assert not is_our_defect(error)


def test_config_error_is_not_a_defect():
    error = raised(lambda: plan_shards(num_shards=1, world_size=2))
    assert isinstance(error, ConfigError)
    assert not is_our_defect(error)


def test_failing_optimizer_function_is_not_our_defect():
    config = OptimizerConfig(name=None, reference="make")
    names = SimpleNamespace(evaluate=lambda key: _needs_two)
    error = raised(lambda: build_optimizer(config, names, torch.nn.Linear(1, 1)))
    assert isinstance(error, WorkloadError)
    assert not is_our_defect(error)


def test_broken_connection_in_torch_is_distinguished_from_a_notebook_error():
    reset = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: reset by peer"

    assert is_broken_exchange(RuntimeError(reset))
    assert is_broken_exchange(DistBackendError("NCCL error"))
    assert not is_broken_exchange(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_broken_exchange(ValueError(reset))


PAIR = (torch.zeros(2, 1), torch.zeros(2, 1))


def _broken():
    raise KeyError("x")


def _needs_one(path):
    return path


def _needs_two(parameters, more):
    raise AssertionError("never called")


constants: Any = pytest.importorskip("huggingface_hub.constants")
errors: Any = pytest.importorskip("huggingface_hub.errors")

pytest.importorskip("transformers")

FROM_HUB = """
from transformers import AutoModelForQuestionAnswering

class Net:
    def __new__(cls):
        return AutoModelForQuestionAnswering.from_pretrained("someone/small-albert")
"""


def test_unreachable_hub_fails_the_job_with_the_commands_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a network, the library raises the same error, but only after several retries.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rig = TrainerRig(tmp_path, cell=CELL + FROM_HUB).start()

    told = rig.wait_for(m.UserCodeFailed)

    rig.close()
    assert told.error.startswith("OSError: We couldn't connect to 'https://huggingface.co'")
    assert "This worker has no access to the hub" in told.error
    assert "save_pretrained('FOLDER')" in told.error
    assert "Cell In[3], line" in told.traceback
    assert ".from_pretrained(" in told.traceback


def test_unreachable_hub_is_recognized_by_the_cause_and_a_misspelled_name_is_not() -> None:
    def caused_by(cause: Exception) -> OSError:
        try:
            raise OSError("no such model") from cause
        except OSError as exc:
            return exc

    assert is_hub_unreachable(caused_by(errors.LocalEntryNotFoundError("not in the cache")))
    assert is_hub_unreachable(errors.OfflineModeIsEnabled("offline"))
    assert not is_hub_unreachable(caused_by(FileNotFoundError("someone/misspelled")))
    assert not is_hub_unreachable(OSError("We couldn't connect to the data base"))


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


@pytest.mark.parametrize(
    ("error", "visible"),
    [
        ("AssertionError('Torch not compiled with CUDA enabled')", "0"),
        ("RuntimeError('Found no NVIDIA driver on your system. Please check ...')", "0"),
        ("RuntimeError('No CUDA GPUs are available')", ""),
    ],
)
def test_cuda_on_a_worker_without_a_gpu_fails_the_job_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, visible: str
) -> None:
    # Raised here, because the message depends on how torch was built.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cell = CELL.replace("self.layer = nn.Linear(4, 3)", f"raise {error}")
    rig = TrainerRig(tmp_path, cell=cell).start()

    told = rig.wait_for(m.UserCodeFailed)

    rig.close()
    assert "This worker has no GPU. Remove .to('cuda') and .cuda() from the code" in told.error
    assert "Cell In[3], line" in told.traceback
