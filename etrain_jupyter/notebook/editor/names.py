"""Select the notebook's names that fit a key, without running user code.

The checks before a submit (``config.references``) are stricter, but may run user code, such as a
data set's ``__len__``. This module inspects types and signatures only. It does not use
``isinstance``, which reads the object's ``__class__`` and could cause a lazy proxy to load its
object.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from etrain_jupyter.config.keys import KeyPath
from etrain_jupyter.config.yaml_nodes import visible_names
from etrain_jupyter.notebook.editor.offers import Completion

_DATA = (("data", "train"), ("data", "eval"))
_ROUTINES = (FunctionType, BuiltinFunctionType, MethodType)
_SCALARS = (str, bytes, int, float, complex)
_NUM_ARGUMENTS = {"loss": 2, "metrics": 2, "step": 2, "weight": 1, "optimizer": 1, "data": 1}
"""Number of arguments passed to the function of a key; ``data`` stands for ``data.collate``."""
_PREDICT = ("eval", "predict")


def names_for(path: KeyPath, names: Mapping[str, Any]) -> list[Completion]:
    """Return the notebook's names that fit a key, most likely first.

    A name that must be called with arguments ends with ``(``, a module with ``.``.
    """
    ranked = []
    for name in visible_names(names):
        offer = _offer(path, name, names[name])
        if offer is not None:
            ranked.append((_rank(path, names[name]), offer))
    # Among equally likely names, the most recently defined one comes first.
    return [offer for _, offer in sorted(reversed(ranked), key=lambda pair: pair[0])]


def is_module(value: Any) -> bool:
    """Return True if an object is a module."""
    return issubclass(type(value), ModuleType)


def fits(path: KeyPath, value: Any) -> bool:
    """Return True if an object can be a key's value, judged by its type and signature."""
    kind = type(value)
    # These types fit no key, although a str has a length and items, as a data set does.
    if value is None or issubclass(kind, (*_SCALARS, ModuleType)):
        return False
    if path == ("model",):
        return _is_model(kind) or issubclass(kind, (type, *_ROUTINES))
    if path in _DATA:
        return _is_data(value)
    # Check the methods of a class, because its instance will be the data set.
    if issubclass(kind, type):
        return True
    num_arguments = 2 if path == _PREDICT else _NUM_ARGUMENTS.get(path[0], 1)
    return callable(value) and _takes(value, num_arguments)


def _is_data(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, type):
        return _looks_like_data(value)
    if issubclass(kind, list | tuple | dict):
        # len() of a built-in container runs no user code; a subclass may define its own.
        return len(value) > 0 if kind.__module__ == "builtins" else True
    return issubclass(kind, _ROUTINES) or _looks_like_data(kind)


def _is_model(kind: type) -> bool:
    return hasattr(kind, "state_dict") and hasattr(kind, "forward")


def _looks_like_data(kind: type) -> bool:
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not _is_model(kind)


def _offer(path: KeyPath, name: str, value: Any) -> Completion | None:
    if is_module(value):
        return Completion(f"{name}.", "module")
    if not fits(path, value):
        return None
    return Completion(f"{name}(" if _must_be_called(path, value) else name, kind_of(value))


def kind_of(value: Any) -> str:
    """Return the kind of an object for IPython's completions."""
    if is_module(value):
        return "module"
    if issubclass(type(value), type):
        return "class"
    return "function" if callable(value) else "instance"


def _must_be_called(path: KeyPath, value: Any) -> bool:
    """Return True if the plain name would be rejected because the object needs arguments."""
    is_built = path == ("model",) or path in _DATA
    kind = type(value)
    if not (issubclass(kind, type) or (is_built and issubclass(kind, FunctionType))):
        return False
    # For these keys, the trainer calls a class itself and passes the arguments.
    if path in (("optimizer",), ("data", "collate")):
        return False
    return not _takes(value, 0)


def _takes(function: Any, count: int) -> bool:
    """Return True if a function accepts ``count`` positional arguments, or if that is unknown."""
    kind = type(function)
    is_plain = issubclass(kind, (type, *_ROUTINES))
    try:
        # For an object with __call__, read the class: reading the object's attributes may run user
        # code.
        signature = inspect.signature(function if is_plain else kind.__call__)
        signature.bind(*[None] * (count if is_plain else count + 1))
    except TypeError:
        return False
    except Exception:  # __signature__ may be any user object.
        return True
    return True


def _rank(path: KeyPath, value: Any) -> int:
    # 0: likely, for example an instance of nn.Module for `model`. 1: possible. 2: a module, whose
    # attributes may fit.
    if is_module(value):
        return 2
    kind = value if issubclass(type(value), type) else type(value)
    if path == ("model",):
        return 0 if _is_model(kind) else 1
    if path in _DATA:
        is_plain = kind.__module__ == "builtins"
        return 0 if _looks_like_data(kind) and not is_plain else 1
    return 1 if kind is value else 0


def fitting_attributes(
    path: KeyPath, owner: ModuleType, offers: Sequence[Completion]
) -> list[Completion]:
    """Return the attributes of a module that fit a key, and its submodules."""
    known = vars(owner)
    found = []
    for offer in offers:
        value = known.get(offer.text.rpartition(".")[2], offer)
        if value is offer:  # Not in the module's dict: reading a lazy attribute would import it.
            found.append(offer)
        elif is_module(value) or fits(path, value):
            end = "(" if _must_be_called(path, value) else ""
            found.append(Completion(f"{offer.text}{end}", kind_of(value)))
    return found
