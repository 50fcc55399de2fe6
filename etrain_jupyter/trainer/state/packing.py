"""Pack nested state as JSON and named tensors, without pickle: reading it runs no code.

The ``state_dict`` of an optimizer, a scheduler or a scaler consists of nested dicts, lists,
numbers, strings and tensors. A value that JSON cannot represent becomes an object with a single key
that starts with ``$``, for example ``{"$tuple": [0.9, 0.999]}``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]

TENSOR, ARRAY, TUPLE, ITEMS, COUNTER = "$tensor", "$array", "$tuple", "$items", "$counter"


class StateError(ValueError):
    """A part of the training state cannot be sent or saved; the message names it."""


def pack(value: Any, *, name: str, tensors: Tensors) -> Any:
    """Return ``value`` in a form that ``json`` can write, and collect its tensors without copying.

    Args:
        value: Nested dicts, lists and tuples of numbers, strings, tensors and arrays.
        name: The path of this value, used in tensor names and messages.
        tensors: Collects the tensors, without copying them.

    Raises:
        StateError: If the value contains anything else.
    """
    # ``bool`` comes before ``int`` because it is a subclass of it.
    if value is None or isinstance(value, bool | str):
        return value
    # Converted because a subclass (an IntEnum, a NumPy float) may be written differently in JSON.
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, np.generic):
        return pack(value.item(), name=name, tensors=tensors)
    if isinstance(value, torch.Tensor):
        return {TENSOR: _keep(value, name, tensors)}
    if isinstance(value, np.ndarray):
        return {ARRAY: _keep(torch.from_numpy(np.ascontiguousarray(value)), name, tensors)}
    if isinstance(value, list | tuple):
        items = [pack(v, name=f"{name}.{i}", tensors=tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {TUPLE: items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, name, tensors)
    raise StateError(
        f"{name} is a {type(value).__name__}, which cannot be sent to other ranks or saved without "
        f"running code on loading. Keep numbers, strings, tensors, lists and dicts in the state."
    )


def _pack_mapping(value: Mapping[Any, Any], name: str, tensors: Tensors) -> Any:
    pairs = [(k, pack(v, name=f"{name}.{k}", tensors=tensors)) for k, v in value.items()]
    # JSON turns other keys into strings (PyTorch's schedulers use integer keys), and a key that
    # starts with "$" would be read as a marker.
    is_plain = all(isinstance(k, str) and not k.startswith("$") for k, _ in pairs)
    if is_plain and not isinstance(value, Counter):
        return dict(pairs)
    items = [[pack(k, name=f"{name} (a key)", tensors=tensors), v] for k, v in pairs]
    return {COUNTER if isinstance(value, Counter) else ITEMS: items}


def _keep(tensor: torch.Tensor, name: str, tensors: Tensors) -> str:
    unique, number = name, 1
    while unique in tensors:  # a key that contains a dot can look like a path
        unique, number = f"{name}~{number}", number + 1
    tensors[unique] = tensor
    return unique


def unpack(packed: Any, find: Callable[[str], torch.Tensor]) -> Any:
    """Return the original value; ``find`` returns a tensor by name."""
    if isinstance(packed, list):
        return [unpack(v, find) for v in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) == 1:
        ((key, value),) = packed.items()
        if key == TENSOR:
            return find(value)
        if key == ARRAY:
            return find(value).cpu().numpy()
        if key == TUPLE:
            return tuple(unpack(v, find) for v in value)
        if key in (ITEMS, COUNTER):
            made = {_as_key(unpack(k, find)): unpack(v, find) for k, v in value}
            return Counter(made) if key == COUNTER else made
    return {k: unpack(v, find) for k, v in packed.items()}


def _as_key(value: Any) -> Any:
    # A list cannot be a key, so the key was a tuple.
    return tuple(value) if isinstance(value, list) else value
