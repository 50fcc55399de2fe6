"""bf16 and fp16 reach the accuracy of fp32 although ranks join and leave during the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from etrain_jupyter.trainer.precision import Precision
from tests.capabilities import long
from tests.chaos.digits import Pair, digits, train
from tests.chaos.forks import Zygote

pytestmark = pytest.mark.timeout(300)

PHASES = ((1, 100), (3, 180), (2, 140))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


def images() -> tuple[Pair, Pair]:
    (x, y), (x_test, y_test) = digits()
    return (x.view(-1, 1, 8, 8), y), (x_test.view(-1, 1, 8, 8), y_test)


@pytest.fixture(scope="module")
def known() -> dict[str, float]:
    """Cache the accuracy of fp32 for both comparisons."""
    return {}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@long
async def test_accuracy_is_within_one_percent_of_fp32(
    zygote: Zygote, folder: Path, known: dict[str, float], precision: str
) -> None:
    keys = {
        "make": cnn,
        "data": images(),
        "batch": {"global": 64},
        "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
        # Decay to zero: at a constant rate the accuracy fluctuates from step to step.
        "schedule": {"decay": "cosine"},
        "steps": sum(length for _, length in PHASES),
        "eval": "1000000 steps",
    }
    if not known:
        known["fp32"] = (await train(zygote, folder, PHASES, **keys)).accuracy
    run = await train(zygote, folder, PHASES, precision=precision, **keys)
    assert [e.world_size for e in run.steps if e.step in (90, 270, 400)] == [1, 3, 2]
    assert run.accuracy == pytest.approx(known["fp32"], abs=0.01)
    assert run.accuracy > 0.95


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_control_forward_pass_differs_from_fp32(precision: str) -> None:
    """Control: autocast does compute with fewer bits."""
    model, x = cnn(), images()[0][0][:32]
    with torch.no_grad():
        exact = model(x)
        with Precision(precision).autocast():
            rounded = model(x)
    assert rounded.dtype != torch.float32
    assert not torch.equal(exact, rounded.float())
    torch.testing.assert_close(exact, rounded.float(), atol=0.05, rtol=0.05)
