"""Gradients are views of DDP's buckets, in every step and after a lost rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.trainer import batch_noise_jobs
from tests.unit.trainer.batch_noise_jobs import keys
from tests.unit.trainer.rank_processes import Generation, Job, rank_processes


class CheckedSGD(torch.optim.SGD):
    """Raises an error unless all gradients are in the same bucket."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        buckets = {g.untyped_storage().data_ptr() for g in gradients if g is not None}
        assert len(gradients) == 4
        assert len(buckets) == 1
        return super().step(closure)


def names() -> dict[str, Any]:
    return {**batch_noise_jobs.names(), "optimizer": lambda ps: CheckedSGD(ps, lr=0.05)}


def plain_names() -> dict[str, Any]:
    return {**batch_noise_jobs.names(), "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.05)}


@pytest.fixture(scope="module")
def ranks():
    with rank_processes(3) as processes:
        yield processes


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_are_views_of_the_bucket_in_every_generation(ranks, passes):
    history = [
        Generation(members=(0, 1, 2), lost=2, until=6),
        Generation(members=(0, 1)),
    ]
    config = keys(optimizer="f", batch={"global": 24, "aggregation_frequency": passes})
    outcomes = ranks.train(Job(config=config, names=names, history=history))
    assert len({o.digest for o in outcomes}) == 1
    [alone, *_] = ranks.train(
        Job(config=config, names=plain_names, history=[Generation(members=(0,))])
    )
    for name, value in outcomes[0].model.items():
        torch.testing.assert_close(value, alone.model[name])
