"""Opens a bundle on a rank."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import io
import json
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from etrain_jupyter.bundle import sources, tensors
from etrain_jupyter.bundle.code_table import CodeTable
from etrain_jupyter.bundle.sources import CellSource
from etrain_jupyter.config.references import import_path
from etrain_jupyter.errors import BundleError

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""Format 1 has everything inside the pickles, and no table."""

HEADER = struct.Struct("!I")
"""Length of the JSON header that follows it."""

Readable = bytes | bytearray | memoryview | Path
"""A bundle: its bytes, or the file that has them."""


class OpenBundle:
    """A job's references, to be evaluated here.

    Opening reads only the header; the notebook's objects are made when one is asked for first.

    Attributes:
        references: Key to expression.
        cells: Text of the code that was captured, by file name.
        code: What the captured code says; None in a bundle of an older version.
        packages: Versions in the notebook's environment; empty where it has none.
    """

    def __init__(self, header: Mapping[str, Any], content: _Content, start: int) -> None:
        """``start``: where in the content the payload begins."""
        self.references: dict[str, str] = header["references"]
        self.packages: dict[str, str] = header["packages"]
        self.cells = _cells_of(header)
        self.code = CodeTable(**header["code"]) if "code" in header else None
        self._order: list[str] = header["names"]
        self._table: int | None = header.get("table")
        self._content, self._start = content, start
        self._names: dict[str, Any] | None = None
        self._evaluated: set[str] = set()

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes, hexadecimal; all of them are read for it."""
        return digest_of_file(self._content.open())

    def evaluate(self, key: str) -> Any:
        """Return the value of a reference.

        What references share is one object. A key that is asked for again is built anew, from the
        bytes: a model that was trained meanwhile comes back as it was in the notebook.

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
        stream = self._content.open()
        stream.seek(self._start)
        # One unpickler for all names: it remembers what later ones share with earlier ones.
        unpickler = pickle.Unpickler(stream) if self._table is None else self._unpickler(stream)
        names: dict[str, Any] = {}
        for name in self._order:
            try:
                names[name] = unpickler.load()
            except Exception as exc:
                raise self._not_loadable(name, exc) from exc
        return names

    def _unpickler(self, stream: BinaryIO) -> pickle.Unpickler:
        """Return one that makes arrays and tensors on memory of their own, without a copy."""
        assert self._table is not None
        payload = self._content.map()[self._start :]
        table = pickle.loads(payload[self._table :])
        places = (payload[position : position + size] for position, size in table.pop("arrays"))
        reader = tensors.TensorReader(payload, tensors.TensorTable(**table))
        return _Unpickler(stream, places, reader)

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


def open_bundle(bundle: Readable, *, digest: str = "") -> OpenBundle:
    """Read a bundle's header; nothing of the notebook runs yet.

    Arrays and tensors of a bundle in a file are mapped from it: they take no memory before they
    are used, and processes of one machine share what they only read.

    Args:
        bundle: Its bytes, or its file, which stays open.
        digest: SHA-256 that it must have; empty if it is known to be right.

    Raises:
        BundleError: If it is none, of another format, damaged, or was made by another Python.
    """
    content = _Content(bundle)
    if digest and (found := digest_of_file(content.open())) != digest:
        raise BundleError(
            f"{content} is damaged: its SHA-256 is {found}, and that of the job's bundle {digest}. "
            "Nothing of it was run. Submit the job again."
        )
    header, start = _read_header(content)
    version, python = header["format"], tuple(header["python"][:2])
    if version not in READABLE_VERSIONS:
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
    return OpenBundle(header, content, start)


def read_cells(bundle: Readable) -> dict[str, CellSource]:
    """Return only the cells of a bundle, for whoever does not open it."""
    header, _ = _read_header(_Content(bundle))
    return _cells_of(header)


def digest_of_file(file: Any) -> str:
    """Return the SHA-256 of what an open file has from where it stands, and close it."""
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Content:
    """The bytes of a bundle: in memory, or in a file that may lose its name meanwhile."""

    def __init__(self, bundle: Readable) -> None:
        self._file: BinaryIO | None = None
        self._path = bundle if isinstance(bundle, Path) else None
        self._data = b"" if isinstance(bundle, Path) else bundle
        if self._path is not None:
            self._file = self._path.open("rb", buffering=0)

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def __str__(self) -> str:
        return str(self._path) if self._path is not None else f"the bundle of {self.size} bytes"

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return len(self._data) if self._file is None else os.fstat(self._file.fileno()).st_size

    def open(self) -> BinaryIO:
        """Return a file that reads it from its beginning."""
        if self._file is None:
            return io.BytesIO(self._data)
        return io.BufferedReader(_FromStart(self._file))

    def map(self) -> memoryview:
        """Return its bytes in memory that may be written to, of which nobody else gets to know."""
        if self._file is None:
            return memoryview(bytearray(self._data))
        return memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY))


class _FromStart(io.RawIOBase):
    """Reads an open file with a position of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position; only from the beginning or from here."""
        self._position = offset + (self._position if whence == os.SEEK_CUR else 0)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as there are bytes."""
        count = os.preadv(self._file.fileno(), [buffer], self._position)
        self._position += count
        return count


class _Unpickler(pickle.Unpickler):
    """Makes tensors by a bundle's table."""

    def __init__(self, stream: BinaryIO, buffers: Any, reader: tensors.TensorReader) -> None:
        super().__init__(stream, buffers=buffers)
        self._reader = reader

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names; called once for each name."""
        found = super().find_class(module, name)
        return self._reader.rebuild if found is tensors.rebuild_tensor else found


def _read_header(content: _Content) -> tuple[dict[str, Any], int]:
    """Return the header, and where the payload begins."""
    try:
        with content.open() as file:
            (length,) = HEADER.unpack(file.read(HEADER.size))
            header = json.loads(file.read(min(length, content.size)))
    except (struct.error, ValueError) as exc:
        message = f"these {content.size} bytes are no bundle, or part of one. Submit the job again."
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
