"""Golden losses: for every family of optimizers, an elastic run equals a manual loop bit for bit.

The run is ``reproducible``, on real trainer processes that join, leave and are killed during the
run. The loop is plain PyTorch in one process (``tests/unit/trainer/plain_loop.py``). The losses of
all steps and the SHA-256 of the final weights must be equal. A change in the arithmetic of a step,
of a sum, or of the optimizer state that joining ranks receive fails these tests.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.log.events import StepCompleted, WeightsHashed, WorkerLost
from etrain_jupyter.testing import FaultPlan
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import LONG
from tests.chaos.digits import found, gated
from tests.chaos.forks import Zygote
from tests.chaos.gates import Gates, Keeper
from tests.chaos.rig import make_rig
from tests.chaos.workload import make_data
from tests.unit.trainer.plain_loop import PlainJob, train_plainly

BATCH, SHARDS, NUM_STEPS = 16, 4, 45  # three epochs; the last step of each epoch has 6 samples
GATES = (12, 20)
FAULTS = FaultPlan().kill(rank=1, step=6, at="all_reduce").kill(rank=3, step=30)
"""Between these faults, the job scales from three ranks to one and from one to four."""


def layers() -> nn.Module:
    """Return a model with buffers and with a layer that uses random numbers."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)
    )


def matrices() -> nn.Module:
    """Return a model whose parameters are all matrices, as Muon requires."""
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2, bias=False)
    )


def lamb(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Return LAMB as in the paper: decay inside the trust ratio, no bias correction."""
    package = pytest.importorskip("pytorch_optimizer")
    return package.Lamb(parameters, weight_decouple=False, adam_debias=True, **options)


def lars(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("pytorch_optimizer").LARS(parameters, **options)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One optimizer: its name in the cell, and its class for the manual loop."""

    name: str
    by_hand: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    model: Callable[[], nn.Module] = layers


TABLE = (
    Row(name="SGD", by_hand=torch.optim.SGD, options={"lr": 0.05, "momentum": 0.9}),
    Row(name="Adam", by_hand=functools.partial(torch.optim.Adam, fused=True), options={"lr": 0.01}),
    Row(
        name="AdamW",
        by_hand=functools.partial(torch.optim.AdamW, fused=True),
        options={"lr": 0.01, "weight_decay": 0.1},
    ),
    Row(name="RAdam", by_hand=torch.optim.RAdam, options={"lr": 0.01}),
    Row(name="NAdam", by_hand=torch.optim.NAdam, options={"lr": 0.01}),
    Row(name="Adafactor", by_hand=torch.optim.Adafactor, options={"lr": 0.05}),
    Row(name="Muon", by_hand=torch.optim.Muon, options={"lr": 0.02}, model=matrices),
    Row(name="LAMB", by_hand=lamb, options={"lr": 0.01, "weight_decay": 0.1}),
    Row(name="LARS", by_hand=lars, options={"lr": 0.5, "momentum": 0.9}),
)


IN_SUITE = ("SGD", "AdamW", "NAdam", "Adafactor", "Muon", "LAMB")
"""Each has another kind of state. The state of the others has the layout of one of these."""
ROWS = [pytest.param(row, id=row.name, marks=() if row.name in IN_SUITE else LONG) for row in TABLE]


@pytest.mark.parametrize("row", ROWS)
async def test_elastic_run_equals_the_manual_loop_bit_for_bit(
    zygote: Zygote, folder: Path, row: Row
) -> None:
    by_hand = train_plainly(
        PlainJob(
            model=row.model,
            data=make_data(),
            batch_size=BATCH,
            num_steps=NUM_STEPS,
            num_shards=SHARDS,
            optimizer=functools.partial(row.by_hand, **row.options),
        )
    )
    gates = Gates(str(folder), GATES)
    body = {
        "model": functools.partial(gated, row.model, gates),
        "data": {"train": make_data},
        "loss": F.cross_entropy,
        "optimizer": {"name": row.name, **row.options},
        "batch": {"global": BATCH},
        "steps": NUM_STEPS,
        "reproducible": {"shards": SHARDS},
        "workers": {"min": 3, "max": 3},  # it waits for the replacement of the killed rank
    }
    async with make_rig(zygote, folder) as rig:
        with Keeper(gates).at_work() as keeper:
            job = await rig.submit(body, faults=FAULTS.to_list())
            await keeper.scale(job, GATES[0], 1)
            await keeper.scale(job, GATES[1], 4)
            log = await job.end()
        assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert len(found(log, WorkerLost)) == len(FAULTS.faults)

    steps = {e.step: e for e in found(log, StepCompleted)}
    assert {e.world_size for e in steps.values()} == {3, 1, 4}
    assert [steps[step].loss for step in range(1, NUM_STEPS + 1)] == by_hand.losses
    digests = {e.digest for e in found(log, WeightsHashed) if e.step == NUM_STEPS}
    assert digests == {digest(by_hand.model)}


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of the names and values of a model as wrapped by ``Gated``."""
    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        sha.update(f"model.{name}".encode())
        sha.update(value.numpy().tobytes())
    return sha.hexdigest()
