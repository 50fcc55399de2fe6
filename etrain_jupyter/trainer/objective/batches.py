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


def explain_call(exc: Exception, forward: Callable[..., Any], split: Split, has_loss: bool) -> None:
    """Add to an exception of the model's call how the batch may have caused it.

    Raises:
        WorkloadError: Instead of it, if ``forward`` does not accept the parts of a tuple.
    """
    inputs = dict(enumerate(split.args)) | split.kwargs
    shown = ", ".join(f"{name}: {_described(value)}" for name, value in inputs.items())
    signature = inspect.signature(forward)
    try:
        signature.bind(*split.args, **split.kwargs)
    except TypeError:
        takes = ", ".join(signature.parameters) or "no argument"
        if split.args and not has_loss:
            raise WorkloadError(
                "key 'loss' is missing, so the model must compute its loss from the whole batch "
                f"({shown}), but its forward takes {takes}. Add a line such as 'loss: "
                "F.cross_entropy', or 'step: a function (model, batch)'."
            ) from None
        if split.args:
            raise WorkloadError(
                f"the model's forward takes {takes}, but a batch has these parts in front of its "
                f"target: {shown}. Change the data set or data.collate, or set step to a function "
                "of (model, batch)."
            ) from None
    exc.add_note(f"The model was called with {shown}. {label_hint(forward, split.kwargs)}".strip())
    lists = [repr(name) for name, value in inputs.items() if isinstance(value, list | tuple)]
    if lists:
        exc.add_note(
            f"{', '.join(lists)}: text, and rows of different lengths, reach the model as lists. "
            "Make tensors of them in data.collate (for a tokenizer's output: "
            "'data: {train: train_set, collate: DataCollatorWithPadding(tokenizer)}' of "
            "transformers), or remove the columns from the data set."
        )


def label_hint(forward: Callable[..., Any], batch: Any) -> str:
    """Return what to rename if the model takes ``labels``, but the batch has another target."""
    if not isinstance(batch, Mapping) or "labels" in batch:
        return ""
    found = next((key for key in TARGET_KEYS if key in batch), None)
    if found is None or "labels" not in inspect.signature(forward).parameters:
        return ""
    return (
        f"The model computes its loss from 'labels', but the target in the batch is {found!r}. "
        f"Rename it: train_set = train_set.rename_column({found!r}, 'labels')."
    )


def _described(value: Any) -> str:
    if isinstance(value, list | tuple):
        kinds = sorted({type(item).__name__ for item in value})
        return f"{type(value).__name__} of {len(value)} {' or '.join(kinds) or 'items'}"
    kind = type(value).__name__
    return f"{kind} {tuple(value.shape)}" if hasattr(value, "shape") else kind


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"
