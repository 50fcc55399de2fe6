"""Capture the notebook objects that a job names, by value, in one content-addressed payload.

::

    4 bytes   length of the header
    header    JSON: format, versions, references, names, text of the cells
    payload   one pickle per name, written by one pickler, so that objects shared by two names
              stay shared
              the bytes of large arrays and of tensors, aligned to 64 bytes
              a table of their positions

Large arrays and tensors are not copied: the bundle refers to the notebook's own memory until it is
written to a file, and a rank maps that file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from etrain_jupyter.bundle.code_table import tabulate
from etrain_jupyter.bundle.payload import (
    MAX_BYTES,
    Part,
    Payload,
    PayloadTooLargeError,
    PickleStream,
    chunks_of,
)
from etrain_jupyter.bundle.pickler import (
    BundlePickler,
    ProbePickler,
    digest_of_value,
    is_local_module,
    pickling_local_modules_by_value,
)
from etrain_jupyter.bundle.restore import FORMAT_VERSION, HEADER, version_of
from etrain_jupyter.bundle.sources import collect_sources, defining_cell
from etrain_jupyter.bundle.tensors import ALIGNMENT
from etrain_jupyter.bundle.unpicklable import find_unpicklable
from etrain_jupyter.config.references import free_names, import_path
from etrain_jupyter.errors import BundleError

LARGE_BYTES = 64 * 1024 * 1024
"""A captured object of at least this size causes a warning, because it is sent to every machine."""

NUM_LARGEST = 5
"""Number of names listed in the error about a bundle that is too large."""

_REMEDY_FOR_SIZE = "pass a function that builds or loads it there"
_PACKAGES = ("torch", "numpy", "cloudpickle", "etrain-jupyter")

CellOf = Callable[[str, Any], str]
"""Returns the label of the cell that defines a name and its value; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A job's references and all objects that they need, as bytes."""

    digest: str
    """SHA-256 of all bytes, hexadecimal."""
    parts: tuple[Part, ...]
    """The bytes; those of arrays and tensors are in the notebook's own memory."""
    sizes: dict[str, int]
    """Bytes added by each captured name. Shared objects count for the first name only."""
    warnings: tuple[str, ...] = ()
    """Warnings about objects that work but are slow to send, with the remedy."""

    @property
    def data(self) -> bytes:
        """A single copy of all bytes; for small bundles."""
        return b"".join(self.chunks())

    @property
    def header(self) -> bytes:
        """The first part, which ``open_bundle`` accepts if no reference is evaluated."""
        return b"".join(chunks_of(self.parts[:1]))

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes in order, in bounded chunks."""
        return chunks_of(self.parts)


def capture_bundle(
    references: Mapping[str, str],
    namespace: Mapping[str, Any],
    *,
    cell_numbers: Mapping[str, int] | None = None,
    where: Callable[[str], str] | None = None,
) -> Bundle:
    """Capture the free names of all references.

    Objects of the notebook and of modules next to it are pickled by value; objects of installed
    packages by name.

    Args:
        references: Expressions by key, from ``TrainConfig.references()``.
        namespace: The notebook's names.
        cell_numbers: Execution count of each cell, by the file name that the kernel gave it.
        where: Returns the cell that defines a name; if None, the text of the cells is searched.

    Raises:
        BundleError: If an object cannot be sent; the message names it, the cell that defines it,
            and the remedy. Also raised if all objects together exceed ``MAX_BYTES``.
    """
    numbers = cell_numbers or {}

    def cell_of(name: str, value: Any) -> str:
        return (where(name) if where is not None else "") or defining_cell(name, value, numbers)

    objects = _objects_of(references, namespace)
    # Compute the digests inside the block as well, because their pickles also include local
    # modules.
    with pickling_local_modules_by_value():
        pickler = BundlePickler(
            stream := PickleStream(max_bytes=MAX_BYTES), stream.keep_out_of_band
        )
        without_code = _pickle_all(objects, pickler, stream, cell_of)
        payload = Payload(stream, pickler.tensors)
        sizes = {name: stream.sizes[name] + pickler.tensors.sizes[name] for name in objects}
        if sum(sizes.values()) > MAX_BYTES:
            raise _too_large(sizes, objects, cell_of)
        # Data gets a separate digest, so that a resumed job detects a changed data set. Names
        # with code are compared by their source instead: their pickles differ between kernels.
        data_names = _names_of_data(references)
        digests = {n: digest_of_value(objects[n]) for n in without_code if n in data_names}
    cells = collect_sources(pickler.filenames, numbers)
    header = {
        "format": FORMAT_VERSION,
        "python": list(sys.version_info[:3]),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "references": dict(references),
        "names": list(objects),
        "cells": {name: asdict(cell) for name, cell in cells.items()},
        "code": asdict(
            tabulate(pickler.codes, pickler.functions, pickler.classes, objects, digests)
        ),
        "table": payload.table_position,
    }
    return _finish(header, payload, sizes)


def write_bundle(path: Path, bundle: Bundle | bytes) -> None:
    """Write a bundle to a new file that only its owner can read.

    Raises:
        BundleError: If the notebook's memory has changed since the bundle was captured.
        OSError: If the file cannot be written.
    """
    digest = hashlib.sha256()
    # O_EXCL and mode 0600: the folder may be shared, and the bundle contains the user's data.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for chunk in [bundle] if isinstance(bundle, bytes) else bundle.chunks():
            digest.update(chunk)
            file.write(chunk)
    # Large arrays are not copied at capture, so another thread may change one before it is written.
    if not isinstance(bundle, bytes) and digest.hexdigest() != bundle.digest:
        raise BundleError(
            "another thread of the notebook changed an array or tensor of the job while it was "
            "being written. Nothing was submitted. Wait for that thread, then run the cell again."
        )


def _pickle_all(
    objects: Mapping[str, Any], pickler: BundlePickler, stream: PickleStream, cell_of: CellOf
) -> list[str]:
    """Pickle all objects into the stream; return the names whose pickles contain no code."""
    without_code = []
    for name, value in objects.items():
        pickler.tensors.owner = stream.owner = name
        num_codes = len(pickler.codes)
        try:
            pickler.dump(value)
        except PayloadTooLargeError:
            break  # the sizes so far exceed the limit, which the caller reports
        except Exception as exc:  # An object's own __reduce__ may raise anything.
            raise _cannot_be_sent(name, value, exc, cell_of) from exc
        # Because of the pickler's memo, shared code is written only once. A name whose code was
        # written for an earlier name counts as data.
        if len(pickler.codes) == num_codes:
            without_code.append(name)
    return without_code


def _finish(header: Mapping[str, Any], payload: Payload, sizes: dict[str, int]) -> Bundle:
    # The digest is computed from the notebook's own memory, and `write_bundle` computes it again:
    # a difference means that another thread changed an array in between.
    parts = (memoryview(_header_bytes(header)), *payload.parts)
    digest = hashlib.sha256()
    for chunk in chunks_of(parts):
        digest.update(chunk)
    warnings = [
        f"'{name}' ({size / 2**20:.0f} MB) will be copied to every worker. To avoid the copy, "
        f"{_REMEDY_FOR_SIZE}."
        for name, size in sizes.items()
        if size > LARGE_BYTES
    ]
    return Bundle(digest=digest.hexdigest(), parts=parts, sizes=sizes, warnings=tuple(warnings))


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    # Padded with spaces, which JSON ignores, so that the payload is aligned in the file. A rank
    # maps the file, and tensors need aligned memory.
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + HEADER.size) % ALIGNMENT)
    return HEADER.pack(len(text)) + text


def _names_of_data(references: Mapping[str, str]) -> set[str]:
    # Names whose values are compared on resume. These are only data sets, because the weights of a
    # model come from the checkpoint: a model object may differ.
    return {
        name
        for key, text in references.items()
        if key.startswith("data.")
        for name in (text.strip(), *free_names(text))
    }


def _objects_of(references: Mapping[str, str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects to capture by name; an attribute of a local module by its import path."""
    wanted = {name for text in references.values() for name in free_names(text)}
    # Sorted, so that the same objects give the same bytes.
    objects = {name: namespace[name] for name in sorted(wanted & namespace.keys())}
    for key, text in references.items():
        path = import_path(text)
        if path is not None and is_local_module(path[0]):
            objects[text.strip()] = _imported(key, *path)
    return objects


def _imported(key: str, module: str, attribute: str) -> Any:
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as exc:  # The module is the user's: it may raise anything.
        raise BundleError(
            f"{key}: {module}:{attribute} cannot be imported ({type(exc).__name__}: {exc}). "
            f"Nothing was submitted. Run 'import {module}' in a cell to see where it fails."
        ) from exc
    return value


def _cannot_be_sent(name: str, value: Any, exc: Exception, cell_of: CellOf) -> BundleError:
    def dump(part: Any, skipped_ids: set[int]) -> None:
        ProbePickler(skipped_ids).dump(part)

    found = find_unpicklable(name, value, exc, dump=dump, where=cell_of)
    cell = cell_of(name, value)
    defined = f" (defined in {cell})" if cell else ""
    return BundleError(
        f"'{name}'{defined} cannot be sent to the workers: {found.explanation}. "
        f"Nothing was submitted. {found.remedy}"
    )


def _too_large(
    sizes: Mapping[str, int], objects: Mapping[str, Any], cell_of: CellOf
) -> BundleError:
    def describe(name: str) -> str:
        cell = cell_of(name, objects[name])
        return f"'{name}' {_in_mib(sizes[name])}" + (f" ({cell})" if cell else "")

    largest = sorted(objects, key=lambda name: -sizes[name])[:NUM_LARGEST]
    listed = [name for name in largest if sizes[name] >= LARGE_BYTES] or largest[:1]
    return BundleError(
        f"this job uses at least {_in_mib(sum(sizes.values()))} of notebook objects; at most "
        f"{_in_mib(MAX_BYTES)} can be sent to the workers. The largest: "
        f"{', '.join(map(describe, listed))}. Nothing was submitted. Instead of a large object, "
        f"{_REMEDY_FOR_SIZE}, for example data: {{train: load_train_set}}."
    )


def _in_mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MB"
