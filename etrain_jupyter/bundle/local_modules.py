"""Find the modules that are pickled by value: the user's own files next to the notebook.

The workers must get the module as it is in the notebook's memory, including recent edits. A
module in the working folder is not installed on the workers, or only in an older version.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cloudpickle

from etrain_jupyter.bundle.restore import fill_module, make_module
from etrain_jupyter.bundle.sources import is_library

_EXCLUDED = ("__builtins__", "__loader__", "__spec__", "__cached__")
"""Module attributes that the import system sets."""


@contextmanager
def pickling_local_modules_by_value() -> Iterator[None]:
    """Register the loaded local modules with cloudpickle while the context is active."""
    # The registry is global. Keep the user's own registrations.
    known = cloudpickle.list_registry_pickle_by_value()
    local = [m for m in list(sys.modules.values()) if _is_local(m) and m.__name__ not in known]
    for module in local:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)


def is_class_by_value(owner: type) -> bool:
    """Return True if a class is pickled by value."""
    return owner.__module__ in ("__main__", *cloudpickle.list_registry_pickle_by_value())


def is_module_by_value(module: ModuleType) -> bool:
    """Return True if a module is pickled by value."""
    return module.__name__ in cloudpickle.list_registry_pickle_by_value()


def reduce_module(module: ModuleType) -> tuple[Any, ...]:
    """Pickle a module as an empty module that is filled afterwards."""
    # Two steps, because modules may import each other:
    #
    #   make_module("a")          -> memo: a, still empty
    #     state of a refers to b:
    #     make_module("b")        -> memo: b
    #       state of b refers to a: from the memo
    #     fill_module(b, ...)
    #   fill_module(a, ...)
    state = {name: value for name, value in vars(module).items() if name not in _EXCLUDED}
    return make_module, (module.__name__,), state, None, None, fill_module


def is_local_module(name: str) -> bool:
    """Return True if the module with this name is a file under the working folder."""
    try:
        spec = getattr(sys.modules.get(name), "__spec__", None) or importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and _is_local_file(spec.origin)


def _is_local(module: Any) -> bool:
    if not isinstance(module, ModuleType) or sys.modules.get(module.__name__) is not module:
        return False
    # cloudpickle handles __main__ itself. This package is installed on every worker, even if it is
    # a source tree in the working folder here.
    own_package = __name__.split(".")[0]
    if module.__name__ == "__main__" or module.__name__.split(".")[0] == own_package:
        return False
    return _is_local_file(getattr(module, "__file__", None))


def _is_local_file(file: str | None) -> bool:
    """Return True for Python source under the working folder that is not an installed package."""
    if not isinstance(file, str) or not file.endswith(".py"):
        return False
    return _is_source_under(file, os.getcwd())


# Cached, because every capture checks all loaded modules, of which there are thousands once
# torch.compile was used.
@functools.cache
def _is_source_under(file: str, folder: str) -> bool:
    path = os.path.realpath(file)
    # A virtual environment is often in the working folder.
    installed = any(_is_under(path, prefix) for prefix in (sys.prefix, sys.base_prefix))
    return _is_under(path, folder) and not installed and not is_library(path)


def _is_under(path: str, folder: str) -> bool:
    return path.startswith(os.path.realpath(folder).rstrip(os.sep) + os.sep)
