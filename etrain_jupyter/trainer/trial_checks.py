"""Check in the trial pass that a job trains its model and only this package updates the weights.

Also warn about dependence on the number of workers: a loss that depends on how a batch is cut, and
buffers that carry state from one batch to the next.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import register_optimizer_step_pre_hook

from etrain_jupyter.trainer.references import WorkloadError, listed
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.state.weight_fingerprint import fingerprints

MAX_CUT = 16
"""Maximum number of samples of the batch that is cut into halves."""
CUT_TOLERANCE = 0.01
"""Relative difference below which two losses count as equal."""
_NUM_SEEDS = 3

_REPLACED = (
    (torch.autograd, "backward"),
    (torch.optim.Optimizer, "zero_grad"),
    (nn.Module, "zero_grad"),
)
"""Functions that a forward pass must not call; ``Tensor.backward`` calls the first one."""


class UpdateInPassError(WorkloadError):
    """The notebook's code computes gradients or updates weights in a forward pass."""

    def __init__(self, what: str, source: str) -> None:
        super().__init__(
            f"{source} {what}. It computes the loss; this package then calls backward(), sums the "
            "gradients over the workers and updates the weights. Remove backward(), "
            "optimizer.step() and zero_grad() from it. To differentiate something else, use "
            "torch.autograd.grad(). To keep a value from one pass to the next, use a buffer."
        )


@contextlib.contextmanager
def forward_only(model: nn.Module, source: str) -> Iterator[None]:
    """Refuse a forward pass that computes gradients for ``p.grad``, or changes a parameter.

    Args:
        model: The model.
        source: Origin of the loss, for messages.

    Raises:
        UpdateInPassError: If the pass does so.
    """
    named = dict(model.named_parameters())
    model.zero_grad(set_to_none=True)
    before = fingerprints(named.values())
    with _refused_calls(source):
        yield
    if graded := [name for name, p in named.items() if p.grad is not None]:
        raise UpdateInPassError(f"computed the gradients of {listed(graded)}", source)
    after = zip(named, before, fingerprints(named.values()), strict=True)
    if changed := [name for name, old, new in after if old != new]:
        raise UpdateInPassError(f"changed the weights {listed(changed)}", source)


@contextlib.contextmanager
def _refused_calls(source: str) -> Iterator[None]:
    def refusing(call: str) -> Callable[..., NoReturn]:
        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise UpdateInPassError(f"called {call}", source)

        return refuse

    replaced = [(owner, name, getattr(owner, name)) for owner, name in _REPLACED]
    hook = register_optimizer_step_pre_hook(refusing("optimizer.step()"))
    try:
        for owner, name, _ in replaced:
            setattr(owner, name, refusing(f"{name}()"))
        yield
    finally:
        hook.remove()
        for owner, name, function in replaced:
            setattr(owner, name, function)


def check_trained(model: nn.Module, optimizer: torch.optim.Optimizer, *, source: str) -> None:
    """Check the gradients of a pass.

    Raises:
        WorkloadError: If no parameter that the optimizer updates has a gradient.
    """
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in updated):
        ids = {id(p) for p in updated}
        names = listed([name for name, p in model.named_parameters() if id(p) in ids])
        raise WorkloadError(
            f"{source} does not depend on any parameter that the optimizer updates ({names}), so "
            "nothing would be trained. Compute the loss with the model that step receives, and "
            "give the optimizer the parameters to train."
        )


def parameters_left_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a warning about trainable parameters that the optimizer does not have, or nothing."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, p in trained if id(p) not in updated]
    if not missing:
        return ""
    return (
        f"optimizer does not update {len(missing)} of the {len(trained)} parameters of the model "
        f"that require a gradient ({listed(missing)}): they keep their initial values. Add them to "
        "the optimizer, or freeze them with requires_grad_(False)."
    )


def half_precision_weights(model: nn.Module) -> str:
    """Return a warning about trained weights in bfloat16 or float16, or nothing."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    half = [(name, p) for name, p in trained if p.dtype in (torch.bfloat16, torch.float16)]
    if not half:
        return ""
    name, first = half[0]
    return (
        f"{len(half)} of the {len(trained)} trained tensors have {str(first.dtype)[6:]} weights "
        f"(the first is {name!r}), and small updates are rounded away. To keep them in fp32, call "
        ".float() where the model is built; with precision: bf16, the forward pass then still "
        "computes in bf16."
    )


def parameters_outside(
    loss: torch.Tensor, model: nn.Module, functions: Sequence[Callable[..., Any]], *, source: str
) -> str:
    """Return a warning about parameters of other modules that get a gradient, or nothing.

    Args:
        loss: The loss of a pass, before its backward pass.
        model: The model.
        functions: The notebook's functions that compute the loss; they may hold the parameters.
        source: Origin of the loss, for messages.
    """
    own = {id(p) for p in model.parameters()}
    names = {id(p): name for function in functions for name, p in _tensors_in(function, source)}
    # A leaf without a name and of another class is part of the batch.
    outside = [
        names.get(id(leaf), f"a parameter of shape {tuple(leaf.shape)}")
        for leaf in _leaves(loss)
        if id(leaf) not in own and (id(leaf) in names or isinstance(leaf, nn.Parameter))
    ]
    if not outside:
        return ""
    count = "1 parameter is" if len(outside) == 1 else f"{len(outside)} parameters are"
    return (
        f"{source} uses tensors outside the model ({listed(outside)}): {count} not trained. To "
        "train a module, make it part of the model. Otherwise, use torch.no_grad() or "
        "requires_grad_(False)."
    )


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        todo += [before for before, _ in node.next_functions]


def _tensors_in(function: Any, source: str) -> Iterator[tuple[str, torch.Tensor]]:
    held = {source: function}
    if not isinstance(function, nn.Module):
        held = {"self": getattr(function, "__self__", None)}
        with contextlib.suppress(TypeError, ValueError):  # not a function, or not fully defined
            variables = inspect.getclosurevars(getattr(function, "__func__", function))
            held |= {**variables.globals, **variables.nonlocals}
    for name, value in held.items():
        if isinstance(value, nn.Module):
            yield from value.named_parameters(prefix=name)
        elif isinstance(value, torch.Tensor):
            yield name, value


def carried_buffers(model: nn.Module, moving: RunningBuffers) -> str:
    """Return a warning about buffers, except BatchNorm's, that a pass changes, or nothing."""
    ids = {id(buffer) for buffer in moving}
    names = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if not isinstance(module, _NormBase)  # BatchNorm and InstanceNorm
        for name, buffer in module.named_buffers(recurse=False)
        if id(buffer) in ids
    ]
    if not names:
        return ""
    return (
        f"a forward pass changes the {'buffer' if len(names) == 1 else 'buffers'} {listed(names)}. "
        "In each step, the changes are averaged over the samples of all workers. That is right for "
        "running statistics, but not for a state that is carried from one batch to the next: with "
        "more than one worker, each sees only a part of the batches."
    )


class Cut(NamedTuple):
    """Losses of the same samples in one pass and in two."""

    whole: float
    """Loss of one pass over all samples."""
    halves: float
    """Mean of the losses of two passes, each weighted by ``weight`` or by its samples."""

    def differs(self, spread: float = 0.0) -> bool:
        """Return True if the losses differ; False if one of them is NaN."""
        limit = CUT_TOLERANCE * max(abs(self.whole), abs(self.halves)) + 1e-6
        return abs(self.whole - self.halves) > limit + spread


def dependence_on_cut(measure: Callable[[int], Cut], *, source: str, size: int) -> str:
    """Return a warning if the loss depends on how a batch is cut, or nothing.

    Args:
        measure: Computes both losses; its argument is the seed of their random numbers.
        source: Origin of the loss, for messages.
        size: Number of samples.
    """
    cuts = [measure(0)]
    if not cuts[0].differs():
        return ""
    # The second half gets other random numbers (noise, augmentations) than in the whole batch. So
    # the difference must be larger than the differences between several seeds.
    cuts += [measure(seed) for seed in range(1, _NUM_SEEDS)]
    columns = list(zip(*cuts, strict=True))
    mean = Cut(*(math.fsum(column) / _NUM_SEEDS for column in columns))
    if not mean.differs(sum(max(column) - min(column) for column in columns)):
        return ""
    remedy = (
        "If it is a mean over tokens or boxes, set weight. If it compares the samples of a batch "
        "with each other (in-batch negatives, a normalization over the batch), make each sample of "
        "data.train a group of samples, which is never cut (Hugging Face: dataset.batch(8))."
    )
    if mean.halves and 1.9 < mean.whole / mean.halves < 2.1:
        remedy = "It is probably a sum: return the mean over the batch, or one value per sample."
    return (
        f"{source} depends on how a batch is cut: {size} samples give {mean.whole:.5g} in one "
        f"pass, but {mean.halves:.5g} on average in two passes of {size // 2} (evaluation mode). "
        "Each worker gets a part of the batch, so the loss and the gradient depend on the number "
        f"of workers and on batch.micro. {remedy}"
    )
