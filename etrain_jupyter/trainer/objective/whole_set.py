"""Metrics from torchmetrics over the whole of data.eval.

Such a metric accumulates a state and computes its value at the end, because a value such as F1 or
AUROC is not a mean over batches. Here each run of consecutive batches (the share of a rank or, with
``reproducible``, a shard) has its own state::

    every rank    update the states of its runs with its batches -> all ranks gather all states
                  -> merge them in the order of the runs -> compute

So all ranks compute the same value as a single process. With ``reproducible``, the value is
bit-identical, because the runs then do not depend on the number of ranks.

The synchronization built into torchmetrics is disabled, because it gathers by rank, in a collective
that cannot be aborted. torchmetrics objects are recognized by the names of their classes, because
the library may not be installed on the worker.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from etrain_jupyter.trainer.references import WorkloadError

State = dict[str, Any]
"""The states of a metric by name; each is a tensor or a list of tensors."""

_REDUCTIONS = "torchmetrics.utilities.data"
_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}
_COUNT = ""
"""Key for the number of batches in a state; no state can have this name."""


def is_torchmetric(value: Any) -> bool:
    """Return True for a torchmetrics metric or a collection of them."""
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__}
    return not names.isdisjoint({("torchmetrics", "Metric"), ("torchmetrics", "MetricCollection")})


class WholeSetMetric:
    """One torchmetrics metric from the notebook.

    Raises:
        WorkloadError: If its states cannot be merged exactly.
    """

    def __init__(self, name: str, metric: Any) -> None:
        kind = type(metric).__name__
        if not hasattr(metric, "_reductions"):
            raise WorkloadError(
                f"metric {name!r} is a {kind}, which holds several metrics. Name each under "
                "metrics: {a: ..., b: ...}."
            )
        if any(is_torchmetric(part) for part in metric.modules() if part is not metric):
            raise WorkloadError(
                f"metric {name!r} is a {kind}, which wraps other metrics: their states cannot be "
                "merged over the workers here. Name the metric that it wraps."
            )
        for state, reduction in metric._reductions.items():
            is_list = isinstance(metric._defaults[state], list)
            if not _can_merge(reduction, is_list=is_list):
                how = getattr(reduction, "__name__", repr(reduction))
                raise WorkloadError(
                    f"metric {name!r} is a {kind}, whose state {state!r} is merged by {how}, which "
                    "is not exact over the workers. Use a metric whose states are merged by sum, "
                    "mean, max, min or cat, or a function (output, target)."
                )
        self.name = name
        self._prototype = metric

    def new(self, device: torch.device | str) -> Any:
        """Return a copy that has an empty state and does not communicate with other ranks."""
        copy = self._prototype.clone().to(device)
        copy.reset()
        # Otherwise, torchmetrics would itself gather over torch's default group.
        copy.sync_on_compute = copy._to_sync = False
        return copy

    def try_on(self, output: Any, target: Any, device: torch.device) -> None:
        """Try the metric on one batch, before training.

        Raises:
            WorkloadError: If it computes several values.
            Exception: Any error that its ``update`` raises.
        """
        tried = self.new(device)
        tried.update(_tensor_in(output), target)
        value = None
        with warnings.catch_warnings(), contextlib.suppress(ValueError, RuntimeError):
            warnings.simplefilter("ignore")
            value = tried.compute()  # ignore errors: some metrics need more samples
        # In their first update, some metrics set attributes that are not states. ``compute`` needs
        # them, but runs on a copy that was never updated.
        self._prototype = tried
        if value is not None:
            self._number(value)

    def compute(self, states: Sequence[State]) -> float:
        """Merge the states in the given order, and return the value of the metric."""
        merged = self.new("cpu")
        for name, reduction in merged._reductions.items():
            setattr(merged, name, _merge(reduction, [state[name] for state in states]))
        # Otherwise, torchmetrics warns that ``compute`` was called before ``update``.
        merged._update_count = sum(int(state[_COUNT]) for state in states)
        return self._number(merged.compute())

    def _number(self, value: Any) -> float:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, int | float):
            return float(value)
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise WorkloadError(
            f"metric {self.name!r} computes a {type(value).__name__}{shape} instead of one "
            "number. Choose an average (for example average='macro'), or give one metric per "
            "value."
        )

    def kinds(self) -> dict[str, bool]:
        """Return, for each state by name, True if it is a list."""
        defaults = self._prototype._defaults
        return {name: isinstance(default, list) for name, default in defaults.items()}

    def state_of(self, metric: Any) -> State:
        """Return the state of a copy on the CPU.

        Raises:
            WorkloadError: If a state does not consist of tensors.
        """
        found: State = {}
        for name in metric._defaults:
            value = getattr(metric, name)
            parts = value if isinstance(value, list) else [value]
            if not all(isinstance(part, torch.Tensor) for part in parts):
                raise WorkloadError(
                    f"metric {self.name!r} stores values other than tensors in {name!r}, which "
                    "cannot be gathered from the workers. Use another metric, or a function "
                    "of (output, target)."
                )
            on_cpu = [part.detach().to("cpu", copy=True).contiguous() for part in parts]
            found[name] = on_cpu if isinstance(value, list) else on_cpu[0]
        found[_COUNT] = torch.tensor(metric._update_count)
        return found

    def restore(self, metric: Any, state: State) -> None:
        """Put a state into a copy; further updates continue from it."""
        for name in metric._defaults:
            value = state[name]
            # Copied, because some metrics update their states in place.
            is_list = isinstance(value, list)
            parts = [part.to(metric.device, copy=True) for part in (value if is_list else [value])]
            setattr(metric, name, parts if is_list else parts[0])
        metric._update_count = int(state[_COUNT])


class RunStates:
    """The states of all metrics over one run of batches.

    Args:
        metrics: The metrics, by name.
        device: Device of outputs and targets.
    """

    def __init__(self, metrics: Mapping[str, WholeSetMetric], device: torch.device) -> None:
        self._metrics = list(metrics.values())
        self._copies = [metric.new(device) for metric in self._metrics]

    def update(self, output: Any, target: Any) -> None:
        """Update the states with a batch."""
        for copy in self._copies:
            copy.update(_tensor_in(output), target)

    def pack(self) -> dict[str, torch.Tensor]:
        """Return the states as tensors on the CPU, by name."""
        tensors = {}
        for place, (metric, copy) in enumerate(zip(self._metrics, self._copies, strict=True)):
            for name, value in metric.state_of(copy).items():
                if isinstance(value, list):
                    tensors[f"{place}/{name}"] = torch.tensor(len(value))
                    tensors |= {f"{place}/{name}/{i}": part for i, part in enumerate(value)}
                else:
                    tensors[f"{place}/{name}"] = value
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from packed states."""
        states = _unpack(self._metrics, tensors)
        for metric, copy, state in zip(self._metrics, self._copies, states, strict=True):
            metric.restore(copy, state)


def compute_metrics(
    metrics: Mapping[str, WholeSetMetric], packed: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, float]:
    """Return the values over all runs, whose packed states are merged in the given order."""
    unpacked = [_unpack(list(metrics.values()), tensors) for tensors in packed]
    return {
        name: metric.compute([states[place] for states in unpacked])
        for place, (name, metric) in enumerate(metrics.items())
    }


def _unpack(metrics: Sequence[WholeSetMetric], tensors: Mapping[str, torch.Tensor]) -> list[State]:
    found: list[State] = []
    for place, metric in enumerate(metrics):
        state: State = {_COUNT: tensors[f"{place}/{_COUNT}"]}
        for name, is_list in metric.kinds().items():
            value: Any = tensors[f"{place}/{name}"]
            if is_list:
                value = [tensors[f"{place}/{name}/{i}"] for i in range(int(value))]
            state[name] = value
        found.append(state)
    return found


def _can_merge(reduction: Any, *, is_list: bool) -> bool:
    # With None, torchmetrics would only gather the states. Lists can be concatenated, but tensors
    # cannot.
    if reduction is None:
        return is_list
    if getattr(reduction, "__module__", "") != _REDUCTIONS:
        return False
    known = ("dim_zero_cat",) if is_list else ("dim_zero_cat", "dim_zero_mean", *_FOLDS)
    return reduction.__name__ in known


def _merge(reduction: Any, values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [part for value in values for part in value]
    # The mean of the slots' states, as torchmetrics computes it over ranks.
    if reduction.__name__ == "dim_zero_mean":
        return values[0] if len(values) == 1 else torch.stack(values).mean(dim=0)
    if reduction.__name__ == "dim_zero_cat":
        return torch.cat([value.reshape(1) if value.ndim == 0 else value for value in values])
    return functools.reduce(_FOLDS[reduction.__name__], values)


def _tensor_in(output: Any) -> Any:
    # torchmetrics needs tensors: use the logits of a Hugging Face output.
    if isinstance(output, Mapping):
        output = output.get("logits", output)
    elif not isinstance(output, torch.Tensor):
        output = getattr(output, "logits", output)
    return output.detach() if isinstance(output, torch.Tensor) else output
