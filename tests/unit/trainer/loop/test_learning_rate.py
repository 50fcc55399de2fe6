"""The schedule sets the learning rate of every group from the samples trained."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from etrain_jupyter.config.schema import ScalingConfig
from etrain_jupyter.rules.learning_rate import LrSchedule, Ramp
from etrain_jupyter.trainer.loop.learning_rate import LearningRate, momentum_of
from etrain_jupyter.wire import messages
from tests.unit.trainer.loop.test_train_loop import BATCH, NUM_SAMPLES, PLAIN, make_loop
from tests.unit.trainer.loop.test_train_loop import run as run_loop
from tests.unit.trainer.plain_loop import train_plainly

WARM = 3


def rate_by_hand(position: int, count: int) -> float:
    """A linear warm-up of ``WARM`` steps, then a straight line to 0 at the end of the job."""
    warm, end = WARM * BATCH, 2 * NUM_SAMPLES
    if position < warm:
        return 0.01 * min(1.0, (position + count) / warm)
    return 0.01 * (1.0 - (position - warm) / (end - warm))


def test_loop_with_a_schedule_equals_the_plain_one_bit_for_bit():
    loop, sent = make_loop(schedule={"warmup": f"{WARM} steps", "decay": "linear"})
    run_loop(loop)
    theirs = train_plainly(replace(PLAIN, lr_at=rate_by_hand)).model.state_dict()
    assert all(torch.equal(v, theirs[k]) for k, v in loop.workload.model.state_dict().items())
    rates = [m["lr"] for m in sent if isinstance(m, dict)]
    assert rates[:WARM] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    assert rates[-1] < rates[WARM] == pytest.approx(0.01)


def test_warm_up_in_epochs_counts_samples():
    loop, sent = make_loop(schedule={"warmup": "0.5 epochs"})
    run_loop(loop)
    rates = [m["lr"] for m in sent if isinstance(m, dict)]
    assert rates[0] == pytest.approx(0.01 * BATCH / (NUM_SAMPLES / 2))
    assert rates[-1] == 0.01


def test_every_group_keeps_its_own_rate():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": 0.4}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    rate = LearningRate(optimizer, LrSchedule(decay="linear", end=10))
    rate.prepare(position=5, count=1, world_size=1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.2]


def test_rate_that_is_a_tensor_stays_one():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = LrSchedule(decay="linear", end=10)
    LearningRate(optimizer, schedule).prepare(position=5, count=1, world_size=1)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)


def rates(optimizer: torch.optim.Optimizer, rate: LearningRate, *world_sizes: int) -> list[float]:
    """Return the rate of each of these committed steps."""
    found = []
    for world_size in world_sizes:
        rate.prepare(position=0, count=1, world_size=world_size)
        found.append(optimizer.param_groups[0]["lr"])
        rate.commit()
    return found


def sgd(momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=momentum)


def test_growing_batch_ramps_the_rate_and_a_shrinking_one_cuts_it():
    optimizer = sgd()
    rate = LearningRate(optimizer, scaling=ScalingConfig(rule="linear", ramp=2))
    found = rates(optimizer, rate, 1, 3, 3, 3, 3, 1)
    assert found == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.3, 0.1])


def test_generation_without_a_step_does_not_change_the_state():
    """Ranks of a generation that fails before its first step agree with ranks outside of it."""
    one, other = sgd(), sgd()
    formed = LearningRate(one, scaling=ScalingConfig(rule="linear", ramp=4))
    not_formed = LearningRate(other, scaling=ScalingConfig(rule="linear", ramp=4))
    formed.prepare(position=0, count=1, world_size=8)  # the step is undone
    assert formed.state_dict() == not_formed.state_dict()
    assert rates(one, formed, 2, 2, 2) == rates(other, not_formed, 2, 2, 2)


def test_new_rank_continues_the_ramp_of_the_other_ranks():
    optimizer, theirs = sgd(), sgd()
    rate = LearningRate(optimizer, scaling=ScalingConfig(rule="linear", ramp=4))
    rates(optimizer, rate, 4, 4)
    newcomer = LearningRate(theirs, scaling=ScalingConfig(rule="linear", ramp=4))
    newcomer.load_state_dict(json.loads(json.dumps(rate.state_dict())))
    assert rates(theirs, newcomer, 4, 4, 4) == rates(optimizer, rate, 4, 4, 4)


@pytest.mark.parametrize(
    ("kind", "options", "momentum", "rule"),
    [
        (torch.optim.SGD, {"momentum": 0.8}, 0.8, "linear"),
        (torch.optim.SGD, {}, 0.0, "linear"),
        (torch.optim.AdamW, {"betas": (0.7, 0.9)}, 0.7, "sqrt"),
        (torch.optim.Adagrad, {}, 0.0, "sqrt"),
    ],
)
def test_rule_and_ramp_follow_from_the_optimizer(kind, options, momentum, rule):
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **options)
    assert momentum_of(optimizer) == momentum
    rate = LearningRate(optimizer, scaling=ScalingConfig())
    rate.prepare(position=0, count=1, world_size=4)
    target = 4.0 if rule == "linear" else 2.0
    expected = Ramp().aim(target, momentum)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * expected.factor)
    rate.commit()
    assert rate.state_dict().items() >= asdict(expected.advance()).items()


def test_rate_is_meant_for_the_base_workers_and_capped():
    optimizer = sgd(momentum=0.0)
    config = ScalingConfig(rule="linear", base_workers=2, max_scale=1.5)
    assert rates(optimizer, LearningRate(optimizer, scaling=config), 1, 2, 4) == pytest.approx(
        [0.05, 0.1, 0.15]
    )


def test_known_bad_rule_is_reported_once():
    keys = {"optimizer": "LAMB", "batch": {"per_worker": 16}, "steps": 2}
    loop, sent = make_loop(scaling={"rule": "linear"}, **keys)
    run_loop(loop)
    [told] = [m.text for m in sent if isinstance(m, messages.TextLogged)]
    assert told.startswith("LAMB should not be scaled linearly")
    loop, sent = make_loop(**keys)
    run_loop(loop)
    assert not [m for m in sent if isinstance(m, messages.TextLogged)]


def test_batch_per_worker_trains_each_sample_once_and_scales_its_step():
    loop, sent = make_loop(batch={"per_worker": 16}, scaling={"rule": "none"})
    run_loop(loop)
    steps = [m for m in sent if isinstance(m, dict)]
    assert [(s["epoch"], s["first"], s["samples"]) for s in steps[:5]] == [
        (0, 0, 16),
        (0, 16, 16),
        (0, 32, 16),
        (0, 48, 2),
        (1, 0, 16),
    ]
    assert loop.state.position == 2 * NUM_SAMPLES


def test_optimizer_is_unchanged_without_a_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    LearningRate(optimizer, None).prepare(position=5, count=1, world_size=1)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert "initial_lr" not in optimizer.param_groups[0]
