"""``batch.split: auto`` on real ranks: a slow rank gets fewer samples, and nothing else changes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.wire.messages import TextLogged
from tests.unit.trainer.rank_processes import Generation, Job, Outcome, rank_processes

NUM_SAMPLES, BATCH = 274, 24
"""The last step of an epoch has 10 samples."""
SAMPLE_S = 2e-3
SLOWNESS = 8


@pytest.fixture(scope="module")
def ranks():
    with rank_processes(3) as processes:
        yield processes


def slow_on_rank_1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    is_slow = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
    if output.requires_grad:
        time.sleep(SAMPLE_S * len(target) * (SLOWNESS if is_slow else 1))
    return F.cross_entropy(output, target)


def names() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_SAMPLES, 4, generator=generator)
    return {
        # Neither dropout nor BatchNorm, whose results depend on the shares.
        "model": lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)),
        "loss": slow_on_rank_1,
        "data.train": (x, torch.arange(NUM_SAMPLES) % 3),
    }


def shares_of(outcome: Outcome) -> list[str]:
    """Return the shares that rank 0 has logged, one text per change."""
    texts = [m.text for m in outcome.sent if isinstance(m, TextLogged)]
    return [
        text.partition("train on ")[2].partition(" samples")[0]
        for text in texts
        if "samples each" in text
    ]


def job(history: list[Generation], **batch: Any) -> Job:
    config = {
        "model": "model",
        "data": {"train": "data.train"},
        "loss": "loss",
        "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
        "batch": {"global": BATCH, **batch},
        "epochs": 2,
    }
    return Job(config=config, names=names, history=history)


def steps_of(outcome: Outcome) -> list[tuple[Any, ...]]:
    names = ("step", "epoch", "first", "samples", "sample_checksum")
    return [tuple(record[name] for name in names) for record in outcome.records("step")]


@pytest.mark.parametrize("batch", [{}, {"micro": 4}, {"aggregation_frequency": 2}])
def test_slow_rank_gets_fewer_samples_and_the_weights_are_those_of_even_shares(ranks, batch):
    history = [Generation(members=(0, 1))]
    even = ranks.train(job(history, **batch))
    auto = ranks.train(job(history, split="auto", **batch))
    assert shares_of(even[0]) == []
    first, second = map(int, shares_of(auto[0])[-1].split(", "))
    assert first + second == BATCH
    assert first > second
    assert steps_of(auto[0]) == steps_of(even[0])
    assert auto[0].digest == auto[1].digest
    for name, value in auto[0].model.items():
        torch.testing.assert_close(value, even[0].model[name], rtol=1e-4, atol=1e-5)


def normed() -> dict[str, Any]:
    def model() -> nn.Module:
        norm = nn.BatchNorm1d(16)
        return nn.Sequential(nn.Linear(4, 16, bias=False), norm, nn.Tanh(), nn.Linear(16, 3))

    return {**names(), "model": model}


@pytest.mark.parametrize("batch", [{}, {"micro": 4}])
def test_synchronized_batchnorm_hides_no_slow_rank_and_does_not_depend_on_the_shares(ranks, batch):
    history = [Generation(members=(0, 1))]
    jobs = [job(history, **batch), job(history, split="auto", **batch)]
    even, auto = (
        ranks.train(replace(made, names=normed, config=made.config | {"sync_batchnorm": True}))
        for made in jobs
    )
    first, second = map(int, shares_of(auto[0])[-1].split(", "))
    assert first > second
    assert auto[0].digest == auto[1].digest
    # With several passes, the shares determine which samples are in a pass.
    if not batch:
        for name, value in auto[0].model.items():
            torch.testing.assert_close(value, even[0].model[name], rtol=1e-4, atol=1e-5)


def test_shares_follow_the_ranks_through_a_loss_and_a_join(ranks):
    history = [
        Generation(members=(0, 1), lost=1, until=12),
        Generation(members=(0, 2), until=20),
        Generation(members=(0, 2, 1)),
    ]
    outcomes = ranks.train(job(history, split="auto"))
    assert len({outcome.digest for outcome in outcomes}) == 1
    shares = shares_of(outcomes[0])
    assert len(shares[0].split(", ")) == 2
    assert len(shares[-1].split(", ")) == 3
    firsts = [record["first"] for record in outcomes[0].records("step")]
    even = ranks.train(job([Generation(members=(0,))]))
    assert firsts == [record["first"] for record in even[0].records("step")]
