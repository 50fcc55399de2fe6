"""Split a batch into the model's arguments and the target."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etrain_jupyter.trainer.references import DataError, WorkloadError

TARGET_KEYS = ("labels", "label", "target", "targets")
"""Keys that may hold the target if the batch is a dict."""


class Split(NamedTuple):
    """A batch as arguments of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    """The target; None if the batch has none."""


def split_batch(batch: Any, forward: Callable[..., Any], *, has_loss: bool) -> Split:
    """Split a batch into the model's arguments and the target.

    The target of ``(input, ..., target)`` is the last element. A dict must have exactly one of the
    ``TARGET_KEYS``, which holds its target. If the notebook defines no loss, the model computes it,
    and so gets the target, too.

    Args:
        batch: A batch from the data set or from ``data.collate``.
        forward: The model's ``forward``. Dict keys that it does not accept are left out.
        has_loss: True if ``loss`` is given, which needs a target.

    Raises:
        DataError: If the batch has an unsupported type.
        WorkloadError: If a dict has no target or several, or the model cannot be called with it.
    """
    if isinstance(batch, Mapping):
        return _split_dict(batch, forward, has_loss=has_loss)
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        inputs = batch[:-1] if has_loss else batch
        return Split(tuple(inputs), {}, batch[-1])
    raise DataError(
        f"a batch is a {type(batch).__name__}, not (input, ..., target) or a dict. Change the "
        "data set so that it returns a tuple whose last element is the target, or a dict. Or set "
        "data.collate, or set step to a function of (model, batch)."
    )


def _split_dict(batch: Mapping[str, Any], forward: Callable[..., Any], *, has_loss: bool) -> Split:
    found = [key for key in TARGET_KEYS if key in batch]
    if has_loss and len(found) != 1:
        what = "more than one target" if found else "no target"
        raise WorkloadError(
            f"a batch has {what}: its keys are {_listed(batch)}, and loss needs exactly one of "
            f"{', '.join(TARGET_KEYS)}. Rename the key in the data set or in data.collate, or "
            "set step to a function of (model, batch)."
        )
    # If the notebook defines no loss, the model needs the target to compute one, and gets all keys.
    target_key = found[0] if len(found) == 1 else None
    inputs = {k: v for k, v in batch.items() if not has_loss or k != target_key}
    kwargs = _accepted(inputs, forward)
    return Split((), kwargs, batch[target_key] if target_key is not None else None)


def _accepted(inputs: dict[str, Any], forward: Callable[..., Any]) -> dict[str, Any]:
    # As in the Hugging Face trainer: a data set may have columns that the model does not accept.
    parameters = inspect.signature(forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return inputs
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    kwargs = {p.name: inputs[p.name] for p in named if p.name in inputs}
    missing = [p.name for p in named if p.default is p.empty and p.name not in kwargs]
    if missing or not kwargs:
        takes = ", ".join(p.name for p in named) or "no argument by name"
        raise WorkloadError(
            f"the model's forward takes {takes}, but a batch has the keys {_listed(inputs)} for "
            f"it{f' (missing: {_listed(missing)})' if missing else ''}. Use the same names in the "
            "data set or in data.collate, or set step to a function of (model, batch)."
        )
    return kwargs


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"
