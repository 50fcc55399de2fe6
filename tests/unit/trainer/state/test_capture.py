"""The state of a trainer is captured and loaded without loss."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from etrain_jupyter.trainer.state.capture import digest_of, put_state, take_state
from etrain_jupyter.trainer.state.packing import StateError

OPTIMIZERS = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adafactor"]


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def copied(tensors: dict) -> dict:
    return {name: value.detach().clone() for name, value in tensors.items()}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_new_rank_continues_exactly_like_the_survivor(name):
    model = build()
    optimizer = make_optimizer(name, model)
    for seed in range(3):
        step(model, optimizer, seed)
    optimizer.param_groups[0]["lr"] = 0.005
    header, tensors = take_state(model, optimizer)
    tensors = copied(tensors)

    newcomer = build()
    its_optimizer = make_optimizer(name, newcomer)
    put_state(newcomer, its_optimizer, copy.deepcopy(header), tensors)
    assert digest_of(newcomer) == digest_of(model)
    assert its_optimizer.param_groups[0]["lr"] == 0.005

    for both in ((model, optimizer), (newcomer, its_optimizer)):
        step(*both, seed=9)
    assert digest_of(newcomer) == digest_of(model)


def test_digest_detects_a_single_changed_bit():
    model = build()
    before = digest_of(model)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nextafter(model[0].weight[0, 0], torch.tensor(9.0))
    assert digest_of(model) != before


def through_json(header: dict) -> dict:
    return json.loads(json.dumps(header))


def test_scaler_and_scheduler_are_part_of_the_state():
    def make_parts(optimizer):
        return {
            "scaler": torch.amp.GradScaler("cpu", init_scale=512.0),
            "multistep": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        }

    model, newcomer = build(), build()
    optimizer, its_optimizer = (make_optimizer("Adam", m) for m in (model, newcomer))
    extras, its_extras = make_parts(optimizer), make_parts(its_optimizer)
    step(model, optimizer, seed=1)
    extras["multistep"].step()
    extras["plateau"].step(0.25)
    extras["scaler"].load_state_dict({**extras["scaler"].state_dict(), "scale": 64.0})

    header, tensors = take_state(model, optimizer, extras)
    put_state(newcomer, its_optimizer, through_json(header), copied(tensors), its_extras)
    assert its_extras["scaler"].get_scale() == 64.0
    assert its_extras["multistep"].last_epoch == 1
    assert its_extras["multistep"].milestones == extras["multistep"].milestones
    assert its_extras["plateau"].state_dict() == extras["plateau"].state_dict()
    for part in (extras, its_extras):
        part["multistep"].step()
    assert its_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_learning_rate_that_is_a_tensor_and_a_key_of_ones_own_arrive():
    model, newcomer = build(), build()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25))
    optimizer.param_groups[0]["layer"] = {"depth": 3, 7: (1, None)}
    its_optimizer = torch.optim.Adam(newcomer.parameters(), lr=torch.tensor(0.5))
    header, tensors = take_state(model, optimizer)
    put_state(newcomer, its_optimizer, through_json(header), copied(tensors))
    (group,) = its_optimizer.param_groups
    assert torch.equal(group["lr"], torch.tensor(0.25))
    assert group["betas"] == (0.9, 0.999)
    assert group["layer"] == {"depth": 3, 7: (1, None)}
    assert group["params"] == list(newcomer.parameters())


def test_optimizer_with_nested_state_continues_exactly():
    def closure_of(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 4)).square().sum()
            loss.backward()
            return loss

        return closure

    pairs = []
    for _ in range(2):
        model = build()
        pairs.append((model, torch.optim.LBFGS(model.parameters(), max_iter=3)))
    (model, optimizer), (newcomer, its_optimizer) = pairs
    optimizer.step(closure_of(model, optimizer))
    header, tensors = take_state(model, optimizer)
    put_state(newcomer, its_optimizer, through_json(header), copied(tensors))
    for each, its in pairs:
        its.step(closure_of(each, its))
    assert digest_of(newcomer) == digest_of(model)


def test_state_keeps_its_type_for_any_type_of_parameters():
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["master"] = torch.full((3, 3), 1 / 3)
    newcomer = nn.Linear(3, 3).bfloat16()
    its_optimizer = torch.optim.SGD(newcomer.parameters(), lr=0.1)
    put_state(newcomer, its_optimizer, *take_state(model, optimizer))
    master = its_optimizer.state[newcomer.weight]["master"]
    assert master.dtype == torch.float32
    assert torch.equal(master, torch.full((3, 3), 1 / 3))


def test_extra_state_of_a_module_is_captured():
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen, "histogram": torch.tensor([1, 2])}

        def set_extra_state(self, state):
            self.seen, self.histogram = state["seen"], state["histogram"]

    model, newcomer = Counting(2, 2), Counting(2, 2)
    model.seen = 5
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, newcomer)]
    header, tensors = take_state(model, optimizers[0])
    put_state(newcomer, optimizers[1], through_json(header), tensors)
    assert newcomer.seen == 5
    assert newcomer.histogram.tolist() == [1, 2]
    assert torch.equal(newcomer.weight, model.weight)


def test_own_state_dict_of_an_optimizer_is_used():
    class Wrapped(torch.optim.SGD):
        inner = 0

        def state_dict(self):
            return {"base": super().state_dict(), "inner": self.inner}

        def load_state_dict(self, state):
            super().load_state_dict(state["base"])
            self.inner = state["inner"]

    model, newcomer = build(), build()
    optimizer, its_optimizer = (
        Wrapped(m.parameters(), lr=0.1, momentum=0.9) for m in (model, newcomer)
    )
    step(model, optimizer, seed=1)
    optimizer.inner = 7
    header, tensors = take_state(model, optimizer)
    put_state(newcomer, its_optimizer, through_json(header), copied(tensors))
    assert its_optimizer.inner == 7
    for both in ((model, optimizer), (newcomer, its_optimizer)):
        step(*both, seed=9)
    assert digest_of(newcomer) == digest_of(model)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "without data"),
    ],
)
def test_tensor_that_is_not_dense_is_refused_by_name(value, words):
    model = build()
    model.register_buffer("odd", value)
    with pytest.raises(StateError, match=rf"model\.odd is a .*{words}"):
        take_state(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_state_that_only_pickle_could_write_is_refused_by_name():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["rule"] = object()
    with pytest.raises(StateError, match=r"optimizer\.param_groups\.0\.rule is a object"):
        take_state(model, optimizer)


def test_optimizer_of_other_groups_is_refused():
    model = build()
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    part = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(StateError, match=r"groups of \[2\] tensors, .* \[6\]"):
        put_state(model, part, *take_state(model, whole))
