"""Trial pass: jobs that would train nothing, or something else, are refused or warned about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.wire.messages import TextLogged
from tests.unit.trainer.loop.test_train_loop import Names, make_loop

net = nn.Linear(4, 3)
own = torch.optim.SGD(net.parameters(), lr=0.1)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def warnings_of(*, names: dict[str, Any], **keys: Any) -> list[str]:
    if "step" in names:
        keys = {"loss": None, "metrics": {}, "step": "s", **keys}
    names = {"model": lambda: nn.Linear(4, 3), **names}
    _, sent = make_loop(names=Names(**names), is_first=True, **keys)
    return [m.text for m in sent if isinstance(m, TextLogged) and m.level == "warning"]


def test_usual_jobs_are_not_warned_about() -> None:
    """BatchNorm, dropout, a loss per sample, and one with a weight."""
    assert make_loop(is_first=True)[1] == []
    assert warnings_of(names={"step": loss_of}) == []
    assert warnings_of(names={"loss": nn.CrossEntropyLoss(reduction="none")}) == []
    weights = torch.tensor([1.0, 5.0, 50.0])
    assert not warnings_of(
        names={"loss": nn.CrossEntropyLoss(weights), "weight": lambda b: weights[b[1]].sum()},
        weight="w",
    )


def loss_in_bf16(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


def test_half_precision_weights_are_trained_with_a_warning() -> None:
    def build() -> nn.Module:
        return nn.Linear(4, 3).bfloat16()

    [text] = warnings_of(names={"model": build, "step": loss_in_bf16})
    assert text.startswith(
        "2 of the 2 trained tensors have bfloat16 weights (the first is 'weight'"
    )
    assert "call .float() where the model is built" in text


# --- updates inside the pass ---


def backward(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    return loss


def update(model: nn.Module, batch: Any) -> torch.Tensor:
    own.step()
    return loss_of(model, batch)


def clear(model: nn.Module, batch: Any) -> torch.Tensor:
    own.zero_grad()
    return loss_of(model, batch)


def clear_model(model: nn.Module, batch: Any) -> torch.Tensor:
    model.zero_grad()
    return loss_of(model, batch)


def assign_gradient(model: nn.Module, batch: Any) -> torch.Tensor:
    model.weight.grad = torch.ones_like(model.weight)
    return loss_of(model, batch)


def decay(model: nn.Module, batch: Any) -> torch.Tensor:
    model.weight.data.mul_(0.5)
    return loss_of(model, batch)


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (backward, r"called backward\(\)"),
        (update, r"called optimizer.step\(\)"),
        (clear, r"called zero_grad\(\)"),
        (clear_model, r"called zero_grad\(\)"),
        (assign_gradient, "computed the gradients of weight"),
        (decay, "changed the weights weight"),
    ],
)
def test_step_that_updates_is_refused(step: Callable[..., Any], what: str) -> None:
    """Otherwise, the ranks train different weights, or gradients count twice."""
    with pytest.raises(WorkloadError, match=f"^step {what}. It computes the loss"):
        warnings_of(names={"step": step})


def test_functions_work_again_after_the_trial_pass() -> None:
    make_loop()
    loss_of(net, (torch.ones(2, 4), torch.zeros(2, dtype=torch.long))).backward()
    assert net.weight.grad is not None
    own.step()
    own.zero_grad()
    net.zero_grad()


def test_step_may_differentiate_with_autograd_grad() -> None:
    def penalized(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():
            [g] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return F.cross_entropy(model(x), batch[1]) + g.square().sum(1).mean()

    assert warnings_of(names={"step": penalized}) == []


# --- parameters that are not trained ---


def test_step_that_uses_another_model_is_refused() -> None:
    other = nn.Linear(4, 3)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(other, batch)

    with pytest.raises(WorkloadError, match=r"^step does not depend on any .*\(weight, bias\)"):
        warnings_of(names={"step": step})


def test_parameters_missing_in_the_optimizer_are_named() -> None:
    [warning] = warnings_of(
        names={"optimizer": lambda params: torch.optim.SGD(params[:1], lr=0.1)},
        optimizer="make_optimizer",
    )
    assert warning.startswith("optimizer does not update 1 of the 2 parameters of the model")
    assert "(bias)" in warning


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output * self.scale, target)


def test_parameters_of_a_loss_are_named() -> None:
    [warning] = warnings_of(names={"loss": Learned()})
    start = "loss uses tensors outside the model (loss.scale): 1 parameter is not trained."
    assert warning.startswith(start)


def test_parameters_in_the_closure_of_step_are_named_unless_they_are_frozen() -> None:
    head = nn.Linear(3, 3)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(head(model(batch[0])), batch[1])

    [warning] = warnings_of(names={"step": step})
    assert "(head.weight, head.bias): 2 parameters are not trained." in warning
    head.requires_grad_(requires_grad=False)
    assert warnings_of(names={"step": step}) == []


# --- dependence on the cut ---


def test_summed_loss_is_warned_about() -> None:
    [warning] = warnings_of(names={"loss": nn.CrossEntropyLoss(reduction="sum")})
    assert warning.startswith("loss depends on how a batch is cut: 16 samples give ")
    assert warning.endswith("It is probably a sum: return the mean over the batch, or one value "
    "per sample.")  # fmt: skip


def contrast(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def normalized(model: nn.Module, batch: Any) -> torch.Tensor:
    x = 3 * batch[0] ** 3
    return F.cross_entropy(model((x - x.mean(0)) / x.std(0)), batch[1])


@pytest.mark.parametrize("step", [contrast, normalized])
def test_loss_that_compares_samples_is_warned_about(step: Callable[..., Any]) -> None:
    [warning] = warnings_of(names={"step": step})
    assert "step depends on how a batch is cut" in warning
    assert "make each sample of data.train a group of samples" in warning


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_noise_is_not_taken_for_a_dependence_on_the_cut(scale: float) -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0] + scale * torch.randn_like(batch[0]))
        return F.cross_entropy(out, batch[1])

    assert warnings_of(names={"step": noisy}) == []


def test_model_without_a_loss_in_evaluation_mode_is_accepted() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        assert model.training
        return loss_of(model, batch)

    assert warnings_of(names={"step": step}) == []


# --- buffers ---


class Carrying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.layer(x)) + self.hidden
        self.hidden.copy_(out.detach().mean(0))
        return out


class Assigning(Carrying):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.layer(x)) + self.hidden
        self.hidden = out.detach().mean(0)
        return out


@pytest.mark.parametrize("model", [Carrying, Assigning])
def test_buffers_that_carry_a_state_are_named_once(model: type[nn.Module]) -> None:
    [warning] = warnings_of(names={"model": model})
    assert warning.startswith("a forward pass changes the buffer hidden. In each step, the changes")
