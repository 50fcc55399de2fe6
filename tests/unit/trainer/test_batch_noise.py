"""AdaScale on real ranks: measured noise, gains, and state across generations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from etrain_jupyter.rules.learning_rate import GradientNoise
from etrain_jupyter.rules.samples.ledger import epoch_order
from etrain_jupyter.trainer.seeds import seed_all
from tests.unit.trainer.batch_noise_jobs import NUM_SAMPLES, PER_WORKER, Net, keys, make_data, names
from tests.unit.trainer.rank_processes import Generation, Job, rank_processes

WORLD = 3


@pytest.fixture(scope="module")
def ranks():
    with rank_processes(4) as processes:
        yield processes


def gains_of(outcome, lr: float = 0.05) -> list[float]:
    return [record["lr"] / lr for record in outcome.records("step")]


def plain_gains(num_steps: int, passes: int = 1) -> list[float]:
    """Plain reference in one process: the gradient of each rank, and their mean."""
    seed_all(0, step=0, rank=0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = make_data()
    batch, noise, gains = WORLD * PER_WORKER, GradientNoise(), []
    order = epoch_order(seed=0, epoch=0, num_samples=NUM_SAMPLES)
    for step in range(num_steps):
        rows = torch.as_tensor(order[step * batch : (step + 1) * batch])
        own = []
        for rank in range(WORLD):
            mine = rows[rank * PER_WORKER : (rank + 1) * PER_WORKER]
            parameters = list(model.parameters())
            loss = F.cross_entropy(model(x[mine]), y[mine])
            own.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        mean = torch.stack(own).mean(dim=0)
        noise = noise.take(
            mean_of_squares=float(torch.stack([(g**2).sum() for g in own]).mean()),
            square_of_mean=float((mean**2).sum()),
            world_size=WORLD,
        )
        gains.append(noise.gain(world_size=WORLD, base_workers=1))
        optimizer.param_groups[0]["lr"] = 0.05 * gains[-1]
        for parameter, gradient in zip(
            model.parameters(), mean.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
    return gains


@pytest.mark.parametrize("more", [{}, {"batch": {"per_worker": 8, "aggregation_frequency": 2}}])
def test_gains_equal_those_of_a_plain_loop(ranks, more):
    config = keys(scaling={"rule": "adascale", "ramp": 0}, steps=12, epochs=None, **more)
    history = [Generation(members=(0, 1, 2))]
    outcomes = ranks.train(Job(config=config, names=names, history=history))
    assert len({o.digest for o in outcomes}) == 1
    assert gains_of(outcomes[0]) == pytest.approx(plain_gains(4), rel=1e-4)
    assert min(gains_of(outcomes[0])) > 1.0
    assert max(gains_of(outcomes[0])) < WORLD


def test_gain_never_exceeds_the_ramp_and_is_sent_to_new_ranks(ranks):
    config = keys(scaling={"rule": "adascale", "ramp": 6}, epochs=6)
    history = [
        Generation(members=(0,), until=4),
        Generation(members=(0, 1, 2), until=8),
        Generation(members=(0, 1, 2, 3), lost=1, until=11),
        Generation(members=(0, 2, 3)),
    ]
    outcomes = ranks.train(Job(config=config, names=names, history=history))
    assert len({o.digest for o in outcomes}) == 1
    gains = gains_of(outcomes[0])
    assert gains[:5] == [1.0] * 5  # a single rank, and the start of the ramp
    ramp = [1 + 2 * since / 6 for since in range(4)]
    assert all(gain <= most + 1e-9 for gain, most in zip(gains[4:8], ramp, strict=True))
    assert max(gains) > 1.0


def test_fp16_and_adam_measure_the_same_noise(ranks):
    """The loss scale is divided out, and Adam's rate follows the square root."""
    history = [Generation(members=(0, 1, 2))]
    scaling = {"rule": "adascale", "ramp": 0}
    found = {}
    for name, more in {
        "fp32": {},
        "fp16": {"precision": "fp16"},
        "adam": {"optimizer": {"name": "Adam", "lr": 0.05}},
    }.items():
        config = keys(scaling=scaling, steps=6, epochs=None, **more)
        outcomes = ranks.train(Job(config=config, names=names, history=history))
        assert len({o.digest for o in outcomes}) == 1
        found[name] = gains_of(outcomes[0])
    assert found["fp16"] == pytest.approx(found["fp32"], rel=0.02)
    assert found["adam"][0] == pytest.approx(found["fp32"][0] ** 0.5, rel=1e-4)
