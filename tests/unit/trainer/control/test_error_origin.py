"""A defect of ours is told from the notebook's, by where it was raised."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import DistBackendError

from etrain_jupyter.config.schema import OptimizerConfig
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.rules.samples.shard_plan import plan_shards
from etrain_jupyter.trainer.control.error_origin import is_broken_exchange, is_our_defect
from etrain_jupyter.trainer.control.faults import InjectedError, inject_fault
from etrain_jupyter.trainer.data import open_samples
from etrain_jupyter.trainer.objective.measures import Measures, Portion
from etrain_jupyter.trainer.objective.one_pass import LossOfOutput, Passed, StepFunction
from etrain_jupyter.trainer.objective.weight import Weight
from etrain_jupyter.trainer.optimizers import build_optimizer
from etrain_jupyter.trainer.references import DataError, WorkloadError
from etrain_jupyter.trainer.schedule import Every
from etrain_jupyter.trainer.state.capture import digest_of


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
