"""Compressed gradients: ranks agree, results are close, and a lost rank is survived."""

from __future__ import annotations

import pytest
import torch

from tests.unit.trainer.batch_noise_jobs import keys, names
from tests.unit.trainer.rank_processes import Generation, Job, rank_processes

HISTORY = [
    Generation(members=(0, 1), until=14),
    Generation(members=(0, 1, 2), lost=2, until=30),
    Generation(members=(0, 1)),
]


@pytest.fixture(scope="module")
def ranks():
    with rank_processes(3) as processes:
        yield processes


def train(ranks, compression: str, **more):
    config = keys(
        compression=compression, batch={"global": 24}, epochs=12, **{"clip_grad_norm": 1.0, **more}
    )
    return ranks.train(Job(config=config, names=names, history=HISTORY))


def distance(one, other) -> float:
    return max(float((v - other.model[k]).abs().max()) for k, v in one.model.items())


@pytest.mark.parametrize(
    ("compression", "near"), [("bf16", 5e-2), ("fp16", 5e-3), ("powersgd", 0.5)]
)
def test_compressed_job_survives_changes_and_stays_near_the_uncompressed_one(
    ranks, compression, near
):
    [whole, *_] = train(ranks, "none")
    outcomes = train(ranks, compression)
    assert len({o.digest for o in outcomes}) == 1
    assert all(r["ranks_agree"] for r in outcomes[0].records("step"))
    assert 0 < distance(outcomes[0], whole) < near
    losses = [r["loss"] for r in outcomes[0].records("step")]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])


def test_overflow_of_the_compressed_sum_skips_the_step_on_all_ranks(ranks):
    outcomes = train(ranks, "fp16", precision="fp16", clip_grad_norm=None)
    assert len({o.digest for o in outcomes}) == 1
    assert all(torch.isfinite(v).all() for v in outcomes[0].model.values())
