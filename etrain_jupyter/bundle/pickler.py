"""Picklers for notebook objects, which refuse some objects, record the code, and store tensors."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from etrain_jupyter.bundle.local_modules import (
    is_class_by_value,
    is_module_by_value,
    reduce_module,
)
from etrain_jupyter.bundle.payload import MAX_BYTES
from etrain_jupyter.bundle.tensors import TensorRecorder
from etrain_jupyter.bundle.unpicklable import (
    RefusedError,
    is_standard_stream,
    refusal_of,
    refusal_of_dataset,
)
from etrain_jupyter.data.kinds import is_hugging_face
from etrain_jupyter.data.shards import Shards


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
        elif isinstance(obj, type) and is_class_by_value(obj):
            self.classes.append(obj)
        if isinstance(obj, ModuleType) and is_module_by_value(obj):
            return reduce_module(obj)
        if is_standard_stream(obj):
            # Replace the notebook's stream with the trainer's own stream of the same name.
            return getattr, (sys, "stderr" if obj in (sys.stderr, sys.__stderr__) else "stdout")
        refusal = refusal_of(obj)
        if refusal is not None:
            raise RefusedError(refusal)
        if is_hugging_face(obj):
            return self._reduce_dataset(obj)
        torch = sys.modules.get("torch")
        # A type with a registered reducer has its own format, even if it is a tensor.
        if torch is not None and isinstance(obj, torch.Tensor) and type(obj) not in _reducers():
            return self.tensors.reduce(obj)
        return super().reducer_override(obj)

    def _reduce_dataset(self, dataset: Any) -> tuple[Any, ...]:
        # The library that defines the object has already imported pyarrow.
        from etrain_jupyter.data.hugging_face import num_bytes_of, reduce_dataset

        # Checked first: its rows would be copied into memory.
        if (size := num_bytes_of(dataset)) > MAX_BYTES:
            raise RefusedError(refusal_of_dataset(size, MAX_BYTES))
        return reduce_dataset(dataset)


def _reducers() -> Mapping[type, Any]:
    # Reducers that are registered with ``copyreg`` or cloudpickle.
    return cloudpickle.Pickler.dispatch_table  # type: ignore[no-any-return]


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
