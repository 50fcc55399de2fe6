"""Opens a bundle on a rank."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import io
import json
import pickle
import struct
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from etrain_jupyter.bundle import sources
from etrain_jupyter.bundle.code_table import CodeTable
from etrain_jupyter.bundle.sources import CellSource
from etrain_jupyter.config.references import import_path
from etrain_jupyter.errors import BundleError

FORMAT_VERSION = 1
HEADER = struct.Struct("!I")
"""Length of the JSON header that follows it."""


class OpenBundle:
    """A job's references, to be evaluated here.

    Opening reads only the header; the notebook's objects are made when one is asked for first.

    Attributes:
        digest: SHA-256 of the bytes, hexadecimal.
        references: Key to expression.
        cells: Text of the code that was captured, by file name.
        code: What the captured code says; None in a bundle of an older version.
        packages: Versions in the notebook's environment; empty where it has none.
    """

    def __init__(self, header: Mapping[str, Any], data: bytes, start: int) -> None:
        """``start``: where in ``data`` the payload begins."""
        self.digest = hashlib.sha256(data).hexdigest()
        self.references: dict[str, str] = header["references"]
        self.packages: dict[str, str] = header["packages"]
        self.cells = _cells_of(header)
        self.code = CodeTable(**header["code"]) if "code" in header else None
        self._order: list[str] = header["names"]
        self._data, self._start = data, start
        self._names: dict[str, Any] | None = None
        self._evaluated: set[str] = set()

    def evaluate(self, key: str) -> Any:
        """Return the value of a reference.

        What references share is one object. A key that is asked for again is built anew, from the
        bytes: a model that
        was trained meanwhile comes back as it was in the notebook.

        Raises:
            BundleError: If the objects cannot be made here.
            Exception: Whatever the notebook's code raises.
        """
        expression = self.references[key].strip()
        if self._names is None or key in self._evaluated:
            self._names, self._evaluated = self._load(), set()
        self._evaluated.add(key)
        if expression in self._names:
            return self._names[expression]
        path = import_path(expression)
        if path is not None:
            return _import(*path)
        filename = f"<etrain {key}>"
        self.cells[filename] = CellSource(label=f"{key} of the cell", text=expression)
        namespace = {"__name__": "__main__", **self._names}
        return eval(compile(expression, filename, "eval"), namespace)

    def differences(self) -> list[str]:
        """Return ``torch 2.6.0 in the notebook, 2.7.0 here`` for each package that differs."""
        found = []
        for package, theirs in self.packages.items():
            ours = _version_of(package)
            if theirs and theirs != ours:
                found.append(f"{package} {theirs} in the notebook, {ours or 'none'} here")
        return found

    def install_sources(self) -> None:
        """Make tracebacks in this process find the cells' lines."""
        sources.install_sources(self.cells)

    def format_user_traceback(self, exc: BaseException) -> str:
        """Return the traceback as the user should see it, with ``Cell In[n], line m``."""
        return sources.format_user_traceback(exc, self.cells)

    def _load(self) -> dict[str, Any]:
        stream = io.BytesIO(self._data)
        stream.seek(self._start)
        # One unpickler for all names: it remembers what later ones share with earlier ones.
        unpickler = pickle.Unpickler(stream)
        names: dict[str, Any] = {}
        for name in self._order:
            try:
                names[name] = unpickler.load()
            except Exception as exc:
                raise self._not_loadable(name, exc) from exc
        return names

    def _not_loadable(self, name: str, exc: Exception) -> BundleError:
        differ = "; ".join(self.differences())
        differ = f" Versions differ: {differ}." if differ else ""
        if isinstance(exc, ModuleNotFoundError):
            return BundleError(
                f"'{name}' of the notebook needs the module '{exc.name}', which this worker "
                f"lacks.{differ} Install it "
                "for the workers, or put its file beside the notebook."
            )
        return BundleError(
            f"'{name}' of the notebook cannot be made on this worker ({type(exc).__name__}: "
            f"{exc}).{differ} Install "
            "the same packages on both, or name a function that builds it."
        )


def open_bundle(data: bytes) -> OpenBundle:
    """Read a bundle's header; nothing of the notebook runs yet.

    Raises:
        BundleError: If it is none, of another format, or was made by another Python.
    """
    header, start = _read_header(data)
    version, python = header["format"], tuple(header["python"][:2])
    if version != FORMAT_VERSION:
        raise BundleError(
            f"the bundle has format {version}, this worker reads {FORMAT_VERSION}. Install the "
            "same version of "
            "etrain-jupyter in the notebook and on the workers."
        )
    if python != sys.version_info[:2]:
        raise BundleError(
            f"the notebook runs Python {python[0]}.{python[1]}, this worker {sys.version_info[0]}."
            f"{sys.version_info[1]}. Code by value needs the same version on both."
        )
    return OpenBundle(header, data, start)


def read_cells(data: bytes) -> dict[str, CellSource]:
    """Return only the cells of a bundle, for whoever does not open it."""
    header, _ = _read_header(data)
    return _cells_of(header)


def _read_header(data: bytes) -> tuple[dict[str, Any], int]:
    """Return the header, and where the payload begins."""
    try:
        (length,) = HEADER.unpack_from(data)
        header = json.loads(data[HEADER.size : HEADER.size + length])
    except (struct.error, ValueError) as exc:
        message = f"these {len(data)} bytes are no bundle, or part of one. Submit the job again."
        raise BundleError(message) from exc
    return header, HEADER.size + length


def _cells_of(header: Mapping[str, Any]) -> dict[str, CellSource]:
    return {name: CellSource(**cell) for name, cell in header["cells"].items()}


def make_module(name: str) -> ModuleType:
    """Make an empty module that lay beside the notebook; ``import`` finds it from now on."""
    module = ModuleType(name)
    sys.modules.setdefault(name, module)
    return module


def fill_module(module: ModuleType, state: Mapping[str, Any]) -> ModuleType:
    """Give a module its names."""
    vars(module).update(state)
    return module


def _import(module: str, attribute: str) -> Any:
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        raise BundleError(
            f"this worker has no module '{exc.name}', which {module}:{attribute} needs. Install "
            "it for the workers, or put its file beside the notebook."
        ) from exc
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
