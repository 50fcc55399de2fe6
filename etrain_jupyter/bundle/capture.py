"""Captures what a job names, by value, in one content-addressed payload.

::

    4 bytes   length of the header
    header    JSON: format, versions, references, names, text of the cells
    payload   one pickle a name, written by one pickler, so that what names share stays shared
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
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from etrain_jupyter.bundle.code_table import tabulate
from etrain_jupyter.bundle.culprit import (
    RefusedError,
    find_culprit,
    is_standard_stream,
    refusal_of,
)
from etrain_jupyter.bundle.restore import FORMAT_VERSION, HEADER, fill_module, make_module
from etrain_jupyter.bundle.sources import collect_sources, defining_cell, is_library
from etrain_jupyter.config.references import free_names, import_path
from etrain_jupyter.errors import BundleError

LARGE_BYTES = 64 * 1024 * 1024
"""From here on a captured object is worth a word: it travels to every worker."""

_PACKAGES = ("torch", "numpy", "cloudpickle", "etrain-jupyter")
_LEFT_OUT = ("__builtins__", "__loader__", "__spec__", "__cached__")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A job's references and everything that they need, as bytes."""

    digest: str
    """SHA-256 of ``data``, hexadecimal."""
    data: bytes
    sizes: dict[str, int]
    """Bytes that each captured name added; what it shares with an earlier one counts there."""
    warnings: tuple[str, ...] = ()
    """What works but will be slow, with the remedy."""


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
    """
    numbers = cell_numbers or {}

    def cell_of(name: str, value: Any) -> str:
        return (where(name) if where is not None else "") or defining_cell(name, value, numbers)

    objects = _objects_of(references, namespace)
    with _local_modules_by_value():
        pickler = _Pickler(stream := io.BytesIO())
        sizes, digests = {}, {}
        for name, value in objects.items():
            before, num_codes = stream.tell(), len(pickler.codes)
            try:
                pickler.dump(value)
            except Exception as exc:  # An object's own __reduce__ may raise anything.
                raise _not_shippable(name, value, exc, cell_of) from exc
            sizes[name] = stream.tell() - before
            if name in _names_of_data(references) and len(pickler.codes) == num_codes:
                digests[name] = _digest_alone(value)
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
    }
    text = json.dumps(header).encode()
    data = b"".join((HEADER.pack(len(text)), text, stream.getbuffer()))
    large = (_warn_of_size(name, size) for name, size in sizes.items() if size > LARGE_BYTES)
    return Bundle(
        digest=hashlib.sha256(data).hexdigest(), data=data, sizes=sizes, warnings=tuple(large)
    )


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
    stream = io.BytesIO()
    _DigestPickler(stream).dump(value)
    return hashlib.sha256(stream.getbuffer()).hexdigest()


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
        f"'{name}' is {size / 2**20:.0f} MB and travels to every worker. Name a function that "
        "builds or loads it "
        "there instead."
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, which besides refuses what must stay here and notes whose code travels."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
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
        return super().reducer_override(obj)


class _DigestPickler(_Pickler):
    """Writes what an object holds; torch would add where its tensors lie in memory."""

    def reducer_override(self, obj: Any) -> Any:
        """Write a tensor as the digest of its values."""
        if not (hasattr(type(obj), "__torch_function__") and hasattr(obj, "numpy")):
            return super().reducer_override(obj)
        try:
            values = obj.detach().cpu().contiguous().numpy().tobytes()
        except (TypeError, RuntimeError):  # a kind that NumPy does not have
            values = str(obj.detach().cpu().tolist()).encode()
        return str, (f"{obj.dtype} {tuple(obj.shape)} {hashlib.sha256(values).hexdigest()}",)


class _Probe(_Pickler):
    """Finds out whether one part can be pickled, passing over what holds it."""

    def __init__(self, passed_over: set[int]) -> None:
        super().__init__(io.BytesIO())
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
