"""What goes through the model at once: the model and the loss, as one module.

It is the module that ``DistributedDataParallel`` wraps, and not the model alone. So whatever the
notebook's ``step`` calls (``model(x)``, ``model.encode(x)``, ``model.training_step(batch)``, the
model twice) happens within the one forward pass that has to see it, on one rank and on many alike;
and the loss is found there whatever kind of object the model's output is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

from etrain_jupyter.config.schema import RESERVED_METRICS
from etrain_jupyter.trainer.objective.batches import split_batch
from etrain_jupyter.trainer.references import WorkloadError


class Passed(NamedTuple):
    """What one pass gave, as the notebook's code returned it."""

    loss: Any
    output: Any = None
    target: Any = None
    values: Mapping[str, Any] = {}
    """What ``step`` returned beside the loss."""


class Objective(Protocol):
    """A way to come from a batch to a loss."""

    functions: Sequence[Callable[..., Any]]
    """The notebook's functions that it calls, apart from the model."""

    def __call__(self, model: nn.Module, batch: Any) -> Passed:
        """Put a batch through the model."""
        ...


class LossOfOutput:
    """``loss``: a function of the output and the target; or None, and the output has it.

    Args:
        loss: The notebook's function.
    """

    def __init__(self, loss: Callable[[Any, Any], Any] | None) -> None:
        self._loss = loss
        self.functions: Sequence[Callable[..., Any]] = [loss] if loss is not None else []

    def __call__(self, model: nn.Module, batch: Any) -> Passed:
        """Call the model with what it takes of the batch."""
        split = split_batch(batch, model.forward, has_loss=self._loss is not None)
        output = model(*split.args, **split.kwargs)
        if self._loss is not None:
            return Passed(self._loss(output, split.target), output, split.target)
        return Passed(_loss_in(output, batch), output, split.target)


def _loss_in(output: Any, batch: Any) -> Any:
    is_dict = isinstance(output, Mapping)
    loss = output.get("loss") if is_dict else getattr(output, "loss", None)
    if loss is not None:
        return loss
    given = (
        f" It was called with a batch of the keys {', '.join(map(repr, batch))}: a Hugging Face "
        "model computes one from 'labels'."
        if isinstance(batch, Mapping)
        else ""
    )
    place = "key 'loss'" if is_dict else ".loss"
    raise WorkloadError(
        f"key 'loss' is missing, and the model's output, a {type(output).__name__}, has no "
        f"{place}.{given} Add a line such as "
        "'loss: F.cross_entropy', or 'step: a function (model, batch)'."
    )


class StepFunction:
    """``step``: the notebook's function of the model and the batch.

    Args:
        step: The notebook's function.
    """

    def __init__(self, step: Callable[[nn.Module, Any], Any]) -> None:
        self._step = step
        self.functions: Sequence[Callable[..., Any]] = [step]

    def __call__(self, model: nn.Module, batch: Any) -> Passed:
        """Call it with the model itself, all of whose methods it may use."""
        returned = self._step(model, batch)
        if not isinstance(returned, Mapping):
            return Passed(returned)
        values = {name: value for name, value in returned.items() if name != "loss"}
        if "loss" not in returned:
            raise WorkloadError(
                f"step returned a dict with the keys {', '.join(map(repr, returned)) or 'none'} "
                "and no 'loss'. Return {\"loss\": loss, ...}, or the loss alone."
            )
        for name in values:
            if not isinstance(name, str) or not name.strip() or name in RESERVED_METRICS:
                raise WorkloadError(
                    f"step returned a value called {name!r}, and a metric cannot be called so: "
                    f"the history has columns of the names {', '.join(sorted(RESERVED_METRICS))}. "
                    f"Return it by another name, for example '{name}_metric'."
                )
        return Passed(returned["loss"], values=values)


class OnePass(nn.Module):
    """The model and the objective as one module, with the model's parameters in their order.

    Args:
        model: The notebook's.
        objective: What is done with it.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, batch: Any) -> Passed:
        """Put a batch through the model."""
        return self._objective(self.model, batch)
