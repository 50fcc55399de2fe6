"""Captures what a job names, by value, in one content-addressed payload."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import pickle
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from etrain_jupyter.bundle.sources import CellSource, cell_of, collect_sources
from etrain_jupyter.config.references import free_names
from etrain_jupyter.errors import BundleError

FORMAT_VERSION = 1
LARGE_BYTES = 64 * 1024 * 1024
"""From here on a captured object is worth a word: it travels to every worker."""

MAX_DEPTH = 5
"""How deep to look for what makes an object unpicklable."""

HEADER = struct.Struct("!I")
_PACKAGES = ("torch", "numpy", "cloudpickle")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A job's references and everything that they need, as bytes."""

    digest: str
    """SHA-256 of ``data``, hexadecimal."""
    data: bytes
    sizes: dict[str, int]
    """Bytes of each captured name on its own; shared parts count in each."""
    warnings: tuple[str, ...] = ()
    """What works but will be slow, with the remedy."""


def capture_bundle(
    references: Mapping[str, str],
    namespace: Mapping[str, Any],
    *,
    cell_numbers: Mapping[str, int] | None = None,
) -> Bundle:
    """Capture the free names of all references.

    Objects of the notebook and of modules that lie beside it travel by value; objects of installed
    packages by name.

    Args:
        references: Key to expression, from ``TrainConfig.references()``.
        namespace: The notebook's names.
        cell_numbers: File name that the kernel compiled a cell under to its execution count.

    Returns:
        The bundle. All names are pickled at once, so that what they share stays shared.

    Raises:
        BundleError: If something cannot travel; names it, the cell that defines it and the remedy.
    """
    numbers = cell_numbers or {}
    wanted = sorted({n for e in references.values() for n in free_names(e)} & namespace.keys())
    names = {name: namespace[name] for name in wanted}
    for name, value in names.items():
        _refuse_cuda(name, value)
    with _local_modules_by_value():
        sizes = {name: len(_dump(name, value, numbers)) for name, value in names.items()}
        payload = _dump_all(names)
    cells = collect_sources(names.values(), numbers)
    data = _pack(references, cells, payload)
    return Bundle(
        digest=hashlib.sha256(data).hexdigest(),
        data=data,
        sizes=sizes,
        warnings=tuple(
            _warn_of_size(name, size) for name, size in sizes.items() if size > LARGE_BYTES
        ),
    )


def _pack(references: Mapping[str, str], cells: Mapping[str, CellSource], payload: bytes) -> bytes:
    header = {
        "format": FORMAT_VERSION,
        "python": list(sys.version_info[:3]),
        "packages": {name: _version_of(name) for name in _PACKAGES},
        "references": dict(references),
        "cells": {name: asdict(cell) for name, cell in cells.items()},
    }
    text = json.dumps(header).encode()
    return HEADER.pack(len(text)) + text + payload


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _warn_of_size(name: str, size: int) -> str:
    return (
        f"{name!r} is {size / 2**20:.0f} MB and travels to every worker. Name a function that "
        "builds "
        f"or loads it there instead."
    )


def _dump_all(names: Mapping[str, Any]) -> bytes:
    data: bytes = cloudpickle.dumps(dict(names))
    return data


def _dump(name: str, value: Any, numbers: Mapping[str, int]) -> bytes:
    try:
        return _dump_all({name: value})
    except Exception as exc:
        culprit, reason = _find_culprit(value, exc)
        cell = cell_of(value, numbers)
        where = f" (defined in {cell})" if cell else ""
        raise BundleError(
            f"{name!r}{where} cannot be sent to the workers: {culprit}{reason}. Nothing was "
            "submitted. "
            f"Create it inside a function or class that runs on the worker, or leave it out."
        ) from exc


def _find_culprit(value: Any, exc: Exception, part: str = "it", depth: int = 0) -> tuple[str, str]:
    """Look into functions' globals and closures and objects' attributes for what cannot travel."""
    for inner_part, held in _parts_of(value) if depth < MAX_DEPTH else ():
        try:
            cloudpickle.dumps(held)
        except Exception as inner:
            return _find_culprit(held, inner, inner_part, depth + 1)
    return f"{part} is a {_kind(value)}; ", _reason(exc)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    code = getattr(value, "__code__", None)
    if code is not None:
        for used in code.co_names:
            if used in value.__globals__ and not isinstance(value.__globals__[used], ModuleType):
                yield f"{used!r}, which it uses,", value.__globals__[used]
        for free, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            yield f"{free!r}, which it encloses,", cell.cell_contents
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, tuple | list):
        yield from ((f"[{i}]", held) for i, held in enumerate(value))
    elif isinstance(value, type):
        yield from ((f".{n}", held) for n, held in vars(value).items() if not n.startswith("__"))
    else:
        yield from ((f".{n}", held) for n, held in getattr(value, "__dict__", {}).items())


def _kind(value: Any) -> str:
    if isinstance(value, io.IOBase):
        return f"{type(value).__name__}, an open file"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _reason(exc: Exception) -> str:
    if isinstance(exc, RecursionError | pickle.PicklingError) and not str(exc):
        return type(exc).__name__
    return str(exc).splitlines()[0] if str(exc) else type(exc).__name__


def _refuse_cuda(name: str, value: Any) -> None:
    """Refuse tensors on a GPU of the notebook's machine, without importing torch for it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    tensors = [held for held in _flat(value) if isinstance(held, torch.Tensor)]
    if isinstance(value, torch.nn.Module):
        tensors += [*value.parameters(), *value.buffers()]
    devices = sorted({str(t.device) for t in tensors if t.device.type not in ("cpu", "meta")})
    if devices:
        raise BundleError(
            f"{name!r} has tensors on {', '.join(devices)} of this machine, which the workers do "
            "not "
            f"have. Nothing was submitted. Ship {name}.cpu(), or a function that builds it."
        )


def _flat(value: Any) -> Iterator[Any]:
    held = value.values() if isinstance(value, dict) else value
    if isinstance(held, tuple | list) or isinstance(value, dict):
        yield from held
    else:
        yield value
        yield from getattr(value, "tensors", ())


@contextmanager
def _local_modules_by_value() -> Iterator[None]:
    """Send modules that lie beside the notebook by value, so that the workers get today's edits."""
    registered = []
    for module in list(sys.modules.values()):
        if _is_local(module):
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_local(module: Any) -> bool:
    name = getattr(module, "__name__", "")
    file = getattr(module, "__file__", None)
    if not file or name in ("__main__", "") or name.split(".")[0] == __name__.split(".")[0]:
        return False
    if name in cloudpickle.list_registry_pickle_by_value() or sys.modules.get(name) is not module:
        return False
    path = Path(file)
    inside = path.is_relative_to(os.getcwd())
    installed = any(path.is_relative_to(prefix) for prefix in {sys.prefix, sys.base_prefix})
    return inside and not installed and "site-packages" not in path.parts
