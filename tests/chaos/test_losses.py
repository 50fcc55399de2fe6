"""Losses of a model with its own loss, dict batches and weights, when a worker is lost."""

from __future__ import annotations

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from etrain_jupyter.log.events import EvalCompleted, GenerationFormed, StepCompleted, WorkerLost
from etrain_jupyter.testing import FaultPlan
from etrain_jupyter.testing.invariants import assert_invariants
from tests.chaos.rig import Rig
from tests.unit.trainer.token_jobs import (
    BATCH,
    IGNORED,
    WORDS,
    Tagger,
    by_hand,
    empty_share,
    make_tokens,
    num_tokens,
    token_accuracy,
)

NUM_STEPS = 12


class TaggedRight(MulticlassAccuracy):
    """Share of correct tokens, by torchmetrics."""

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        super().update(output.transpose(1, 2), target)


@pytest.mark.forked
async def test_losses_are_means_over_all_tokens_although_a_worker_is_lost(rig: Rig) -> None:
    plan = FaultPlan().kill(rank=1, step=5, at="all_reduce")
    keys = {
        "model": Tagger,
        "data": {"train": make_tokens, "eval": make_tokens},
        "weight": num_tokens,
        "metrics": {
            "token_accuracy": token_accuracy,
            "empty_share": empty_share,
            "tagged_right": TaggedRight(WORDS, average="micro", ignore_index=IGNORED),
        },
        "optimizer": {"name": "SGD", "lr": 0.5},
        "batch": {"global": BATCH, "micro": 3},
        "steps": NUM_STEPS,
        "workers": {"min": 2, "max": 2},
    }

    job = await rig.submit(keys, faults=plan.to_list())
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert len(job.found(WorkerLost)) == 1
    assert {e.world_size for e in job.found(GenerationFormed)} == {2}
    _, numbers = by_hand(NUM_STEPS)
    steps = job.found(StepCompleted)
    for event, expected in zip(steps, numbers[:NUM_STEPS], strict=True):
        assert {"loss": event.loss, **event.metrics} == pytest.approx(expected, abs=1e-5)
    last = job.found(EvalCompleted)[-1]
    values = {"loss": last.loss, **last.metrics}
    assert values.pop("tagged_right") == pytest.approx(values["token_accuracy"], abs=1e-6)
    assert values == pytest.approx(numbers[-1], abs=1e-5)
