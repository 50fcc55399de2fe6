"""Captures what a job names, by value, in one content-addressed payload.

::

    4 bytes   length of the header
    header    JSON: format, versions, references, names, text of the cells
    payload   one pickle a name, written by one pickler, so that what names share stays shared
              the bytes of large arrays and of tensors, at multiples of 64 bytes
              a table of where these are

Large arrays and tensors are not copied: the bundle refers to the notebook's own memory until it is
written to a file, and a rank maps that file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pickle
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from etrain_jupyter.bundle.code_table import tabulate
from etrain_jupyter.bundle.restore import FORMAT_VERSION, HEADER, fill_module, make_module
from etrain_jupyter.bundle.sources import collect_sources, defining_cell, is_library
from etrain_jupyter.bundle.tensors import ALIGNMENT, TensorRecorder, align
from etrain_jupyter.bundle.unpicklable import (
    RefusedError,
    find_culprit,
    is_standard_stream,
    refusal_of,
)
from etrain_jupyter.config.references import free_names, import_path
from etrain_jupyter.errors import BundleError

LARGE_BYTES = 64 * 1024 * 1024
"""A captured object of this size is worth a warning: it is sent to every machine."""

MAX_BYTES = 1 << 30
"""Largest bundle that is accepted."""

NUM_LARGEST = 5
"""Names that the refusal of a larger one lists."""

_APART_BYTES = 16 * 1024
"""Arrays of this size and more are not copied into the pickle."""

_IN_MEMORY_BYTES = 16 << 20
"""Pickles up to this size are kept in memory, larger ones in a temporary file."""

_CHUNK_BYTES = 1 << 20

_PACKAGES = ("torch", "numpy", "cloudpickle", "etrain-jupyter")
_LEFT_OUT = ("__builtins__", "__loader__", "__spec__", "__cached__")


class _Pickles:
    """Bytes that are kept in memory while they are few, else in a temporary file."""

    def __init__(self) -> None:
        self._file: Any = io.BytesIO()

    def __del__(self) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        """Take the next bytes."""
        is_in_memory = isinstance(self._file, io.BytesIO)
        if is_in_memory and self._file.tell() + memoryview(data).nbytes > _IN_MEMORY_BYTES:
            file = tempfile.TemporaryFile()  # noqa: SIM115
            file.write(self._file.getbuffer())
            self._file = file
        return int(self._file.write(data))

    def chunks(self) -> Iterator[bytes]:
        """Yield all of it."""
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK_BYTES):
            yield chunk


Part = memoryview | _Pickles
"""A stretch of a bundle."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A job's references and everything that they need, as bytes."""

    digest: str
    """SHA-256 of all of it, hexadecimal."""
    parts: tuple[Part, ...]
    """Its bytes. Those of arrays and tensors are the notebook's own memory."""
    sizes: dict[str, int]
    """Bytes that each captured name added; what it shares with an earlier one counts there."""
    warnings: tuple[str, ...] = ()
    """What works but will be slow, with the remedy."""

    @property
    def data(self) -> bytes:
        """All of it, as one copy; for small ones."""
        return b"".join(self.chunks())

    @property
    def header(self) -> bytes:
        """The beginning, which ``open_bundle`` accepts where nothing is evaluated."""
        return b"".join(_chunks_of(self.parts[:1]))

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes in order, in bounded pieces."""
        return _chunks_of(self.parts)


def capture_bundle(
    references: Mapping[str, str],
    namespace: Mapping[str, Any],
    *,
    cell_numbers: Mapping[str, int] | None = None,
    where: Callable[[str], str] | None = None,
) -> Bundle:
    """Capture the free names of all references.

    Objects of the notebook and of modules that lie beside it travel by value; objects of installed
    packages by name.

    Args:
        references: Key to expression, from ``TrainConfig.references()``.
        namespace: The notebook's names.
        cell_numbers: File name that the kernel compiled a cell under to its execution count.
        where: Names the cell that defines a name; without it the cells' text is searched.

    Raises:
        BundleError: If something cannot travel; names it, the cell that defines it and the remedy.
            Also if all of it exceeds ``MAX_BYTES``.
    """
    numbers = cell_numbers or {}

    def cell_of(name: str, value: Any) -> str:
        return (where(name) if where is not None else "") or defining_cell(name, value, numbers)

    objects = _objects_of(references, namespace)
    with _local_modules_by_value():
        pickler = _Pickler(stream := _Stream(), stream.take_apart)
        without_code = []
        for name, value in objects.items():
            pickler.tensors.owner = stream.owner = name
            num_codes = len(pickler.codes)
            try:
                pickler.dump(value)
            except _TooLargeError:
                break
            except Exception as exc:  # An object's own __reduce__ may raise anything.
                raise _not_shippable(name, value, exc, cell_of) from exc
            if len(pickler.codes) == num_codes:
                without_code.append(name)
        payload = _Payload(pickler, stream)
        sizes = {name: stream.sizes[name] + pickler.tensors.sizes[name] for name in objects}
        if sum(sizes.values()) > MAX_BYTES:
            raise _too_large(sizes, objects, cell_of)
        of_data = _names_of_data(references)
        digests = {n: _digest_alone(objects[n]) for n in without_code if n in of_data}
    cells = collect_sources(pickler.filenames, numbers)
    header = {
        "format": FORMAT_VERSION,
        "python": list(sys.version_info[:3]),
        "packages": {name: _version_of(name) for name in _PACKAGES},
        "references": dict(references),
        "names": list(objects),
        "cells": {name: asdict(cell) for name, cell in cells.items()},
        "code": tabulate(
            pickler.codes, pickler.functions, pickler.classes, objects, digests
        ).to_dict(),
        "table": payload.table_position,
    }
    parts = (memoryview(_header_bytes(header)), *payload.parts)
    digest = hashlib.sha256()
    for chunk in _chunks_of(parts):
        digest.update(chunk)
    large = (_warn_of_size(name, size) for name, size in sizes.items() if size > LARGE_BYTES)
    return Bundle(digest=digest.hexdigest(), parts=parts, sizes=sizes, warnings=tuple(large))


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    """Return the length and the header, filled up so that the payload begins where it shall."""
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + HEADER.size) % ALIGNMENT)
    return HEADER.pack(len(text)) + text


def _chunks_of(parts: Sequence[Part]) -> Iterator[bytes | memoryview]:
    for part in parts:
        if isinstance(part, memoryview):
            for first in range(0, len(part), _CHUNK_BYTES):
                yield part[first : first + _CHUNK_BYTES]
        else:
            yield from part.chunks()


class _TooLargeError(Exception):
    """Ends pickling when the pickles alone are larger than a bundle may be."""


class _Stream:
    """What a pickler writes to, and the memory that it leaves apart."""

    def __init__(self) -> None:
        self.owner = ""
        """The captured name that is being pickled."""
        self.sizes: dict[str, int] = defaultdict(int)
        """Bytes by captured name."""
        self.num_bytes = 0
        """Of the pickles."""
        self.pickles = _Pickles()
        self.apart: list[memoryview] = []

    def write(self, data: Any) -> int:
        """Take the next bytes of the pickles."""
        size = memoryview(data).nbytes
        self.num_bytes += size
        self.sizes[self.owner] += size
        if self.num_bytes > MAX_BYTES:
            raise _TooLargeError
        return self.pickles.write(data)

    def take_apart(self, buffer: pickle.PickleBuffer) -> bool:
        """Take an array's memory; return whether it is to be pickled instead."""
        memory = buffer.raw()
        if memory.nbytes < _APART_BYTES:
            return True
        self.sizes[self.owner] += memory.nbytes
        self.apart.append(memory)
        return False


class _Payload:
    """The pickles, and behind them what they refer to."""

    def __init__(self, pickler: _Pickler, stream: _Stream) -> None:
        self.parts: list[Part] = [stream.pickles]
        self._end = stream.num_bytes
        places = []
        for memory in stream.apart:
            places.append((align(self._end), len(memory)))
            self._put(align(self._end), memory)
        table, pieces = pickler.tensors.collect(self._end)
        for position, memory in pieces:
            self._put(position, memory)
        values = {"arrays": places, "ranges": table.ranges, "packed": table.packed}
        self.table_position = self._end
        self._put(self._end, memoryview(pickle.dumps(values, protocol=5)))

    def _put(self, position: int, memory: memoryview) -> None:
        self.parts += [memoryview(bytes(position - self._end)), memory]
        self._end = position + len(memory)


def _names_of_data(references: Mapping[str, str]) -> set[str]:
    """Return the names whose values count: a model's weights come from its checkpoint."""
    return {
        name
        for key, text in references.items()
        if key.startswith("data.")
        for name in (text.strip(), *free_names(text))
    }


def _digest_alone(value: Any) -> str:
    """Return the SHA-256 of an object's own pickle, which no other name has a part in."""
    digest = hashlib.sha256()
    _DigestPickler(_Digesting(digest.update)).dump(value)
    return digest.hexdigest()


def _objects_of(references: Mapping[str, str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must travel by name; an attribute of a local module by its path."""
    wanted = {name for text in references.values() for name in free_names(text)}
    objects = {name: namespace[name] for name in sorted(wanted & namespace.keys())}
    for key, text in references.items():
        path = import_path(text)
        if path is not None and _is_local_module(path[0]):
            objects[text.strip()] = _imported(key, *path)
    return objects


def _is_local_module(name: str) -> bool:
    try:
        spec = getattr(sys.modules.get(name), "__spec__", None) or importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and _is_local_file(spec.origin)


def _imported(key: str, module: str, attribute: str) -> Any:
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as exc:  # The module is the user's: it may raise anything.
        raise BundleError(
            f"{key}: {module}:{attribute} cannot be imported here ({type(exc).__name__}: {exc}). "
            "Nothing was "
            f"submitted. 'import {module}' in a cell shows where it fails."
        ) from exc
    return value


def _not_shippable(
    name: str, value: Any, exc: Exception, where: Callable[[str, Any], str]
) -> BundleError:
    def dump(part: Any, passed_over: set[int]) -> None:
        _Probe(passed_over).dump(part)

    culprit = find_culprit(name, value, exc, dump=dump, where=where)
    cell = where(name, value)
    defined = f" (defined in {cell})" if cell else ""
    return BundleError(
        f"'{name}'{defined} cannot be sent to the workers: {culprit.story}. Nothing was submitted. "
        f"{culprit.remedy}"
    )


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _warn_of_size(name: str, size: int) -> str:
    return (
        f"'{name}' ({size / 2**20:.0f} MB) will be sent to every machine that trains. To avoid "
        f"that, {_INSTEAD}."
    )


_INSTEAD = "name a function that builds or loads it there"


def _too_large(
    sizes: Mapping[str, int], objects: Mapping[str, Any], where: Callable[[str, Any], str]
) -> BundleError:
    def shown(name: str) -> str:
        cell = where(name, objects[name])
        return f"'{name}' {_in_mib(sizes[name])}" + (f" ({cell})" if cell else "")

    largest = sorted(objects, key=lambda name: -sizes[name])[:NUM_LARGEST]
    of_more = [name for name in largest if sizes[name] >= LARGE_BYTES] or largest[:1]
    return BundleError(
        f"the notebook's objects that this job uses take {_in_mib(sum(sizes.values()))} or more; "
        f"at most {_in_mib(MAX_BYTES)} can be sent to the workers. The largest: "
        f"{', '.join(map(shown, of_more))}. Nothing was submitted. Instead of a large object, "
        f"{_INSTEAD}, for example data: {{train: load_train_set}}."
    )


def _in_mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MB"


class _Digesting:
    """A file that nobody reads: what is written is hashed, or only tried."""

    def __init__(self, update: Callable[[Any], None]) -> None:
        self._update = update

    def write(self, data: Any) -> int:
        self._update(data)
        return memoryview(data).nbytes


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, which besides refuses what must stay here and notes whose code travels."""

    def __init__(
        self, file: Any, take_apart: Callable[[pickle.PickleBuffer], bool] | None = None
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=take_apart)
        self.tensors = TensorRecorder()
        self.filenames: set[str] = set()
        self.codes: list[CodeType] = []
        self.functions: list[FunctionType] = []
        self.classes: list[type] = []
        """Those that travel by value."""

    def reducer_override(self, obj: Any) -> Any:
        """Decide how one object is pickled; called for all but the plainest types."""
        if isinstance(obj, CodeType):
            self.filenames.add(obj.co_filename)
            self.codes.append(obj)
            return NotImplemented
        if isinstance(obj, FunctionType):
            self.functions.append(obj)
        elif isinstance(obj, type) and _is_class_by_value(obj):
            self.classes.append(obj)
        if isinstance(obj, ModuleType) and _is_by_value(obj):
            return _reduce_module(obj)
        if is_standard_stream(obj):
            # The notebook's own stream here is the trainer's there.
            return getattr, (sys, "stderr" if obj in (sys.stderr, sys.__stderr__) else "stdout")
        refusal = refusal_of(obj)
        if refusal is not None:
            raise RefusedError(refusal)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and type(obj) not in _reducers():
            return self.tensors.reduce(obj)
        return super().reducer_override(obj)


def _reducers() -> Mapping[type, Any]:
    """Return the types for which somebody has registered how they are pickled."""
    return cloudpickle.Pickler.dispatch_table  # type: ignore[no-any-return]


class _DigestPickler(_Pickler):
    """Writes what an object holds; torch would add where its tensors lie in memory."""

    def reducer_override(self, obj: Any) -> Any:
        """Write a tensor as the digest of its values."""
        if not (hasattr(type(obj), "__torch_function__") and hasattr(obj, "numpy")):
            return super().reducer_override(obj)
        values: Any
        try:
            flat = obj.detach().cpu().contiguous().reshape(-1)
            values = flat.view(sys.modules["torch"].uint8).numpy()
        except (TypeError, RuntimeError):  # a kind that has no plain bytes
            values = str(obj.detach().cpu().tolist()).encode()
        return str, (f"{obj.dtype} {tuple(obj.shape)} {hashlib.sha256(values).hexdigest()}",)


class _Probe(_Pickler):
    """Finds out whether one part can be pickled, passing over what holds it."""

    def __init__(self, passed_over: set[int]) -> None:
        super().__init__(_Digesting(lambda data: None), lambda buffer: False)
        self._passed_over = passed_over

    def persistent_id(self, obj: Any) -> str | None:
        """Write a mark in the place of what is passed over."""
        return "passed over" if id(obj) in self._passed_over else None


def _reduce_module(module: ModuleType) -> tuple[Any, ...]:
    """Make the module first and fill it afterwards: modules that import each other are cycles."""
    state = {name: held for name, held in vars(module).items() if name not in _LEFT_OUT}
    return make_module, (module.__name__,), state, None, None, fill_module


def _is_class_by_value(owner: type) -> bool:
    return owner.__module__ in ("__main__", *cloudpickle.list_registry_pickle_by_value())


def _is_by_value(module: ModuleType) -> bool:
    return module.__name__ in cloudpickle.list_registry_pickle_by_value()


@contextmanager
def _local_modules_by_value() -> Iterator[None]:
    """Send modules that lie beside the notebook by value, so that the workers get today's edits."""
    known = cloudpickle.list_registry_pickle_by_value()
    local = [m for m in list(sys.modules.values()) if _is_local(m) and m.__name__ not in known]
    for module in local:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)


def _is_local(module: Any) -> bool:
    if not isinstance(module, ModuleType) or sys.modules.get(module.__name__) is not module:
        return False
    ours = __name__.split(".")[0]
    if module.__name__ == "__main__" or module.__name__.split(".")[0] == ours:
        return False
    return _is_local_file(getattr(module, "__file__", None))


def _is_local_file(file: str | None) -> bool:
    """Tell whether a file is Python source under the working folder and not installed there."""
    if not isinstance(file, str) or not file.endswith(".py"):
        return False
    return _is_source_under(file, os.getcwd())


@functools.cache  # thousands of modules are asked about each time, once torch.compile was used
def _is_source_under(file: str, folder: str) -> bool:
    path = os.path.realpath(file)
    installed = any(_is_under(path, prefix) for prefix in (sys.prefix, sys.base_prefix))
    return _is_under(path, folder) and not installed and not is_library(path)


def _is_under(path: str, folder: str) -> bool:
    return path.startswith(os.path.realpath(folder).rstrip(os.sep) + os.sep)
