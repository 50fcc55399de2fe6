"""``ema`` in training: evaluated, the same on all ranks, unaffected by lost ranks and joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from etrain_jupyter.wire.messages import WeightsFingerprinted
from tests.unit.trainer.loop.test_train_loop import PLAIN, make_loop, run
from tests.unit.trainer.rank_processes import Generation, Job, RankProcesses
from tests.unit.trainer.reproducible_jobs import keys, plain
from tests.unit.trainer.test_sync_batchnorm import HISTORIES as CHANGES
from tests.unit.trainer.test_sync_batchnorm import normed

HISTORIES = {
    "joins and leaves": CHANGES["joins and leaves"],
    "losses": CHANGES["losses"],
    "lost in an evaluation": [
        Generation(members=(0, 1), until=4, lost=1, lost_at="eval"),
        Generation(members=(1, 0)),
    ],
}


def train(
    ranks: RankProcesses, history: Sequence[Generation], names: Any = plain, **more: Any
) -> list[Any]:
    return ranks.train(Job(config=keys(ema=0.9, **more), names=names, history=history))


def digests(outcome: Any) -> dict[int, str]:
    found = [message for message in outcome.sent if isinstance(message, WeightsFingerprinted)]
    return {message.step: message.digest for message in found}


@pytest.mark.parametrize("name", HISTORIES)
def test_reproducible_averages_are_equal_under_any_history(ranks, name):
    [expected] = train(ranks, [Generation(members=(0,))])

    for outcome in train(ranks, HISTORIES[name]):
        assert outcome.digest == expected.digest
        # The digests include the averages. A process that joined later has fewer.
        assert digests(outcome).items() <= digests(expected).items()
        # Evaluated with the averaged weights.
        for record in outcome.records("eval"):
            assert record in expected.records("eval")
    assert digests(expected)


@pytest.mark.parametrize("name", HISTORIES)
def test_all_ranks_have_the_same_averages(ranks, name):
    outcomes = train(ranks, HISTORIES[name], normed, reproducible=None)

    last = [max(digests(outcome).items()) for outcome in outcomes]
    assert len(set(last)) == 1


def averages(loop: TrainLoop) -> dict[str, torch.Tensor]:
    assert loop.workload.average is not None
    return loop.workload.average.tensors


@pytest.mark.parametrize("more", [{}, {"batch": {"global": 16, "aggregation_frequency": 4}}])
def test_one_update_per_step_whatever_the_passes(more):
    loop, _ = make_loop(ema={"decay": 0.9, "warmup": False}, **more)
    peer = AveragedModel(loop.workload.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    peer.update_parameters(loop.workload.model)

    run(loop, after_step=lambda: peer.update_parameters(loop.workload.model))

    for name, expected in peer.module.named_parameters():
        torch.testing.assert_close(averages(loop)[name], expected)


def test_training_does_not_change_and_evaluations_do():
    plainly, sent_plainly = make_loop(steps=PLAIN.num_steps)
    averaged, sent = make_loop(steps=PLAIN.num_steps, ema=0.99)
    run(plainly)
    run(averaged)

    for name, value in plainly.workload.model.state_dict().items():
        assert torch.equal(averaged.workload.model.state_dict()[name], value)
    losses = [
        [m.record["loss"] for m in messages if type(m).__name__ == "EvalFinished"]
        for messages in (sent_plainly, sent)
    ]
    assert losses[0]
    assert losses[0] != losses[1]


def test_skipped_update_does_not_move_the_average():
    loop, sent = make_loop(steps=1, precision="fp16", ema=0.9)
    before = {name: value.clone() for name, value in averages(loop).items()}
    # The scaled loss overflows, so the update is skipped.
    loop.workload.precision._scaler._init_scale = 2.0**40

    run(loop)

    records = [message for message in sent if isinstance(message, dict)]
    assert records[-1]["step"] == 1
    for name, value in averages(loop).items():
        if not name.startswith("layers.1.running"):
            assert torch.equal(value, before[name])
