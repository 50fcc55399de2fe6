"""Optimizers by name: their updates, weight decay, and invalid options."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from etrain_jupyter.config.schema import OptimizerConfig
from etrain_jupyter.trainer.optimizers import build_optimizer
from etrain_jupyter.trainer.references import WorkloadError


class Nothing:
    """A bundle without expressions."""

    def evaluate(self, key: str):
        raise KeyError(key)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def optimizer_of(model: nn.Module, **keys) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerConfig.model_validate(keys), Nothing(), model)


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_lamb_matches_the_paper():
    model = make_model()
    expected = [p.detach().clone() for p in model.parameters()]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in expected]
    optimizer = optimizer_of(model, name="lamb", lr=0.01, weight_decay=0.1)
    for step in range(5):
        gradients(model, step)
        for w, p, (m, v) in zip(expected, model.parameters(), moments, strict=True):
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            r = m / (v.sqrt() + 1e-6) + 0.1 * w
            norms = w.norm(), r.norm()
            trust = norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0
            w.sub_(0.01 * trust * r)
        optimizer.step()
    for w, p in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), w)


def test_lars_matches_the_paper():
    model = make_model()
    expected = [p.detach().clone() for p in model.parameters()]
    buffers = [torch.zeros_like(p) for p in expected]
    optimizer = optimizer_of(model, name="LARS", lr=0.5, momentum=0.9, weight_decay=0.01)
    for step in range(5):
        gradients(model, step)
        for w, p, buffer in zip(expected, model.parameters(), buffers, strict=True):
            g = p.grad.clone()
            if w.ndim > 1:  # in the paper, biases and norms are neither decayed nor scaled
                trust = 1e-3 * w.norm() / (g.norm() + 0.01 * w.norm())
                g = trust * (g + 0.01 * w)
            buffer.mul_(0.9).add_(g)
            w.sub_(0.5 * buffer)
        optimizer.step()
    for w, p in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), w)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_is_fused_and_updates_as_torch_does_by_default(name):
    ours, theirs = make_model(), make_model()
    optimizers = (
        optimizer_of(ours, name=name, lr=0.01, weight_decay=0.1),
        getattr(torch.optim, name)(theirs.parameters(), lr=0.01, weight_decay=0.1),
    )
    for step in range(5):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            gradients(model, step)
            optimizer.step()
    assert optimizers[0].param_groups[0]["fused"]
    for p, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, expected)


def test_fused_update_does_not_depend_on_the_number_of_threads():
    # Ranks on machines of different sizes must make the same update, bit for bit.
    results = []
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            torch.manual_seed(0)
            model = nn.Linear(1001, 77)
            optimizer = optimizer_of(model, name="AdamW", lr=0.01, weight_decay=0.1)
            for step in range(3):
                gradients(model, step)
                optimizer.step()
            results.append(model.weight.detach())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


@pytest.mark.parametrize("option", ["fused", "foreach", "differentiable"])
def test_chosen_implementation_of_adam_is_kept(option):
    optimizer = optimizer_of(make_model(), name="AdamW", lr=0.01, **{option: False})
    assert not optimizer.param_groups[0]["fused"]


def test_adam_of_complex_weights_is_not_fused():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    assert not optimizer_of(model, name="Adam", lr=0.01).param_groups[0]["fused"]


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_error_for_a_missing_package_contains_the_install_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(WorkloadError, match=r"pip install 'etrain-jupyter\[optim\]'"):
        optimizer_of(make_model(), name=name)


def test_optimizer_missing_in_this_torch_is_refused(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(WorkloadError, match="has no optimizer Muon"):
        optimizer_of(make_model(), name="Muon")


def test_error_of_muon_names_the_parameters_that_are_not_matrices():
    with pytest.raises(WorkloadError, match=r"4 of 6 parameters are not: 0.bias \(3,\), 1"):
        optimizer_of(make_model(), name="Muon")


def test_muon_trains_matrices():
    model = nn.Linear(4, 3, bias=False)
    before = model.weight.detach().clone()
    optimizer = optimizer_of(model, name="Muon", lr=0.1)
    gradients(model, 0)
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "LAMB"])
def test_no_decay_excludes_biases_and_norms(name):
    model = make_model()
    nn.init.ones_(model[0].bias)
    options = {"lr": 0.1, "weight_decay": 0.5}
    optimizer = optimizer_of(model, name=name, no_decay="auto", **options)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"0.weight", "2.weight"}
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]


def test_no_decay_makes_one_group_if_no_parameter_is_excluded():
    model = nn.Linear(4, 3, bias=False)
    optimizer = optimizer_of(model, name="AdamW", no_decay="auto")
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_error_names_options_that_the_optimizer_refuses():
    with pytest.raises(WorkloadError, match=r"optimizer Adam does not take .*'betas'"):
        optimizer_of(make_model(), name="Adam", betas=[2.0, 0.9])


def of_model(model):
    return torch.optim.SGD(model[0].parameters(), lr=0.1)


def of_self(self):
    return of_model(self)


def of_names(named_parameters):
    return torch.optim.SGD([p for name, p in named_parameters if name.startswith("0.")], lr=0.1)


def of_parameters(params, lr=0.1):
    return torch.optim.SGD(params[:2], lr=lr)


def build_with(function):
    names = SimpleNamespace(evaluate=lambda key: function)
    return build_optimizer(OptimizerConfig(name=None, reference="f"), names, make_model())


@pytest.mark.parametrize("function", [of_model, of_self, of_names, of_parameters])
def test_function_gets_what_its_parameter_is_named_after(function):
    [group] = build_with(function).param_groups
    assert [tuple(p.shape) for p in group["params"]] == [(3, 4), (3,)]


def test_optimizer_of_another_models_parameters_is_refused():
    """Otherwise, the job would finish with the initial weights."""
    other = nn.Linear(2, 2)
    message = r"2 of 2 tensors .*shapes \(2, 2\), \(2,\).* are 0.weight, 0.bias, 1.weight and 3"
    with pytest.raises(WorkloadError, match=message):
        build_with(lambda params: torch.optim.SGD(other.parameters(), lr=0.1))
