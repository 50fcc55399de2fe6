"""One forward pass: the model and its loss as one module.

``DistributedDataParallel`` wraps this module, not the model alone. So everything that the
notebook's ``step`` calls (``model(x)``, ``model.encode(x)``, ``model.training_step(batch)``, the
model twice) happens within the one forward pass that DDP sees, regardless of the number of ranks.
The loss is computed within the pass, so the model's output may be any object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from etrain_jupyter.config.schema import RESERVED_METRICS
from etrain_jupyter.trainer.objective.batches import explain_call, label_hint, split_batch
from etrain_jupyter.trainer.references import WorkloadError


class Passed(NamedTuple):
    """Result of one pass, as the notebook's code returned it."""

    loss: Any
    output: Any = None
    target: Any = None
    """Second argument of a metric: the target, or the batch if it has no single target."""
    values: Mapping[str, Any] = {}
    """Other values that ``step`` returned, by name."""


class Objective(Protocol):
    """Computes the loss of a batch."""

    functions: Sequence[Callable[..., Any]]
    """The notebook's functions that it calls, in addition to the model."""

    def __call__(self, model: nn.Module, batch: Any) -> Passed:
        """Run the forward pass of a batch."""
        ...


class LossOfOutput:
    """Objective for ``loss`` (a function of output and target), or for a model with its own loss.

    Args:
        loss: The notebook's function; None if the model's output contains the loss.
    """

    def __init__(self, loss: Callable[[Any, Any], Any] | None) -> None:
        self._loss = loss
        self.functions: Sequence[Callable[..., Any]] = [loss] if loss is not None else []

    def __call__(self, model: nn.Module, batch: Any) -> Passed:
        """Call the model with the parts of the batch that it accepts."""
        split = split_batch(batch, model.forward, has_loss=self._loss is not None)
        try:
            output = model(*split.args, **split.kwargs)
        except (TypeError, ValueError, AttributeError) as exc:
            explain_call(exc, model.forward, split, self._loss is not None)
            raise
        # If a dict has no single target, each metric gets the whole batch and finds its own target.
        has_none = split.target is None and isinstance(batch, Mapping)
        target = batch if has_none else split.target
        # If the notebook defines a loss, the model's own loss is ignored.
        if self._loss is not None:
            try:
                return Passed(self._loss(output, split.target), output, target)
            except (TypeError, ValueError, AttributeError) as exc:
                _explain_output(exc, output)
                raise
        if (terms := _loss_terms(output)) is not None:
            return Passed(sum(terms.values()), output, target, terms)
        return Passed(_loss_in(output, batch, model), output, target)


def _loss_terms(output: Any) -> Mapping[str, Any] | None:
    """Return the losses of a model that returns only losses, by name; None for another model."""
    # Detection models of torchvision return such a dict in training, and detections in evaluation.
    if not isinstance(output, Mapping) or "loss" in output or not output:
        return None
    is_scalar = all(isinstance(term, torch.Tensor) and not term.ndim for term in output.values())
    if not is_scalar or not all(term.is_floating_point() for term in output.values()):
        return None
    for name in output:
        _check_name(name, "the model")
    return output


def _explain_output(exc: Exception, output: Any) -> None:
    """Add a note to a ``loss`` exception: the part of a Hugging Face output that it may need."""
    parts = (
        list(output)
        if isinstance(output, Mapping)
        else [*vars(output)]
        if hasattr(output, "__dict__")
        else []
    )
    if isinstance(output, torch.Tensor) or "logits" not in parts:
        return
    part = "output['logits']" if type(output) is dict else "output.logits"
    exc.add_note(
        f"The model returned a {type(output).__name__} with {', '.join(map(str, parts))}. Pass the "
        f'part that the loss needs: loss: "lambda output, target: F.cross_entropy({part}, '
        "target)\". Or remove the key 'loss': given 'labels', the model computes its own."
    )


def _loss_in(output: Any, batch: Any, model: nn.Module) -> Any:
    # Hugging Face models return an object with .loss, or a dict.
    is_dict = isinstance(output, Mapping)
    loss = output.get("loss") if is_dict else getattr(output, "loss", None)
    if loss is not None:
        return loss
    kind = f"a {type(output).__name__}"
    if hint := label_hint(model.forward, batch):
        raise WorkloadError(f"the model returned no loss. {hint}")
    if not model.training and not is_dict:
        raise WorkloadError(
            f"key 'loss' is missing, and in evaluation mode the model returned {kind} without "
            ".loss. If it returns its losses in training only, add for example 'eval: {loss: "
            "false, predict: predict, score: score}'. Otherwise, add a line such as 'loss: "
            "F.cross_entropy', or 'step: a function (model, batch)'."
        )
    given = (
        f" It was called with a batch of the keys {', '.join(map(repr, batch))}: a Hugging Face "
        "model computes one from 'labels'."
        if isinstance(batch, Mapping)
        else ""
    )
    place = "key 'loss'" if is_dict else ".loss"
    raise WorkloadError(
        f"key 'loss' is missing, and the model's output, {kind}, has no "
        f"{place}.{given} Add a line such as "
        "'loss: F.cross_entropy', or 'step: a function (model, batch)'."
    )


def _check_name(name: Any, source: str) -> None:
    if not isinstance(name, str) or not name.strip() or name in RESERVED_METRICS:
        raise WorkloadError(
            f"{source} returned a value named {name!r}, which is an invalid metric name: "
            f"{', '.join(sorted(RESERVED_METRICS))} are columns of the history. "
            f"Return it under another name, for example '{name}_metric'."
        )


class StepFunction:
    """Objective for ``step``, the notebook's function of the model and the batch."""

    def __init__(self, step: Callable[[nn.Module, Any], Any]) -> None:
        self._step = step
        self.functions: Sequence[Callable[..., Any]] = [step]

    def __call__(self, model: nn.Module, batch: Any) -> Passed:
        """Call the function with the model itself, so that it can use all methods of the model."""
        returned = self._step(model, batch)
        if not isinstance(returned, Mapping):
            return Passed(returned)
        values = {name: value for name, value in returned.items() if name != "loss"}
        if "loss" not in returned:
            raise WorkloadError(
                f"step returned a dict with the keys {', '.join(map(repr, returned)) or 'none'} "
                "but without 'loss'. Return {\"loss\": loss, ...}, or the loss alone."
            )
        for name in values:
            _check_name(name, "step")
        return Passed(returned["loss"], values=values)


class OnePass(nn.Module):
    """The model and the objective as one module; the model's parameters keep their order."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, batch: Any) -> Passed:
        """Run the forward pass of a batch."""
        return self._objective(self.model, batch)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of every module afterwards."""
    # Do not call model.train() at the end, because the notebook may have frozen some layers in
    # evaluation mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
