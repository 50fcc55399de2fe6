"""Picklers for notebook objects, which refuse some objects, record the code, and store tensors.

The user's own modules next to the notebook are pickled by value. The workers must get such a module
as it is in the notebook's memory, including recent edits: a module in the working folder is not
installed on the workers, or only in an older version.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from etrain_jupyter.bundle.payload import MAX_BYTES
from etrain_jupyter.bundle.restore import fill_module, make_module
from etrain_jupyter.bundle.sources import is_library
from etrain_jupyter.bundle.tensors import TensorRecorder
from etrain_jupyter.bundle.unpicklable import (
    RefusedError,
    is_standard_stream,
    refusal_of,
    refusal_of_dataset,
)
from etrain_jupyter.data.kinds import is_hugging_face
from etrain_jupyter.data.shards import Shards

_EXCLUDED = ("__builtins__", "__loader__", "__spec__", "__cached__")
"""Module attributes that the import system sets."""


class BundlePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickle notebook objects, refuse unpicklable ones, and record the code that is captured."""

    def __init__(
        self, file: Any, keep_out_of_band: Callable[[pickle.PickleBuffer], bool] | None = None
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep_out_of_band)
        self.tensors = TensorRecorder()
        self.filenames: set[str] = set()
        self.codes: list[CodeType] = []
        self.functions: list[FunctionType] = []
        self.classes: list[type] = []
        """Classes that are pickled by value."""

    def reducer_override(self, obj: Any) -> Any:
        """Choose how to pickle one object; called for all but the simplest built-in types."""
        # Code objects occur only in functions that are pickled by value.
        if isinstance(obj, CodeType):
            self.filenames.add(obj.co_filename)
            self.codes.append(obj)
            return NotImplemented
        if isinstance(obj, FunctionType):
            self.functions.append(obj)
        elif isinstance(obj, type) and obj.__module__ in ("__main__", *_by_value()):
            self.classes.append(obj)
        if isinstance(obj, ModuleType) and obj.__name__ in _by_value():
            return _reduce_module(obj)
        if is_standard_stream(obj):
            # Replace the notebook's stream with the trainer's own stream of the same name.
            return getattr, (sys, "stderr" if obj in (sys.stderr, sys.__stderr__) else "stdout")
        refusal = refusal_of(obj)
        if refusal is not None:
            raise RefusedError(refusal)
        if is_hugging_face(obj):
            return self._reduce_dataset(obj)
        torch = sys.modules.get("torch")
        # A type whose reducer is registered with ``copyreg`` or cloudpickle has its own format,
        # even if it is a tensor.
        registered = cloudpickle.Pickler.dispatch_table
        if torch is not None and isinstance(obj, torch.Tensor) and type(obj) not in registered:
            return self.tensors.reduce(obj)
        return super().reducer_override(obj)

    def _reduce_dataset(self, dataset: Any) -> tuple[Any, ...]:
        # The library that defines the object has already imported pyarrow.
        from etrain_jupyter.data.hugging_face import num_bytes_of, reduce_dataset

        # Check the size first, because pickling copies the rows into memory.
        if (size := num_bytes_of(dataset)) > MAX_BYTES:
            raise RefusedError(refusal_of_dataset(size, MAX_BYTES))
        return reduce_dataset(dataset)


class DigestPickler(BundlePickler):
    """Pickle an object's values only, for a digest that does not depend on memory layout."""

    def _reduce_dataset(self, dataset: Any) -> tuple[Any, ...]:
        from etrain_jupyter.data.hugging_face import digest_of_dataset

        return str, (digest_of_dataset(dataset),)

    def reducer_override(self, obj: Any) -> Any:
        """Pickle a tensor or data set as the digest of its values."""
        if isinstance(obj, Shards):
            return tuple, (obj.identity,)
        # BundlePickler writes a reference to the storage, with strides, instead of the values.
        # Both differ between equal tensors.
        if not (hasattr(type(obj), "__torch_function__") and hasattr(obj, "numpy")):
            return super().reducer_override(obj)
        values: Any
        try:
            flat = obj.detach().cpu().contiguous().reshape(-1)
            values = flat.view(sys.modules["torch"].uint8).numpy()
        except (TypeError, RuntimeError):  # sparse or quantized: no plain bytes
            values = str(obj.detach().cpu().tolist()).encode()
        return str, (f"{obj.dtype} {tuple(obj.shape)} {hashlib.sha256(values).hexdigest()}",)


class ProbePickler(BundlePickler):
    """Check whether one part of an object can be pickled, skipping the objects that contain it.

    Its output, including out-of-band arrays, is discarded.
    """

    def __init__(self, skipped_ids: set[int]) -> None:
        super().__init__(CallbackFile(lambda data: None), lambda buffer: False)
        self._skipped_ids = skipped_ids

    def persistent_id(self, obj: Any) -> str | None:
        """Replace a skipped object by a placeholder."""
        return "skipped" if id(obj) in self._skipped_ids else None


class CallbackFile:
    """A write-only file that passes its bytes to a callback instead of storing them."""

    def __init__(self, update: Callable[[Any], None]) -> None:
        self._update = update

    def write(self, data: Any) -> int:
        """Call the callback; return the number of bytes."""
        self._update(data)
        return memoryview(data).nbytes


def digest_of_value(value: Any) -> str:
    """Return the SHA-256 of an object's own pickle, independent of other captured names."""
    digest = hashlib.sha256()
    DigestPickler(CallbackFile(digest.update)).dump(value)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------ local modules


def _by_value() -> set[str]:
    modules: set[str] = cloudpickle.list_registry_pickle_by_value()
    return modules


@contextmanager
def pickling_local_modules_by_value() -> Iterator[None]:
    """Register the loaded local modules with cloudpickle while the context is active."""
    # The registry is global. Keep the user's own registrations.
    known = _by_value()
    local = [m for m in list(sys.modules.values()) if _is_local(m) and m.__name__ not in known]
    for module in local:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)


def _reduce_module(module: ModuleType) -> tuple[Any, ...]:
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
