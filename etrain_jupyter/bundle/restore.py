"""Open a bundle on a rank and evaluate its references."""

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
from etrain_jupyter.untrusted import open_regular

FORMAT_VERSION = 2

HEADER = struct.Struct("!I")
"""Length of the JSON header, which follows."""

CHUNK_BYTES = 2 << 20
"""Chunk size for sending a bundle, in bytes: sender and receiver each hold one chunk in memory."""

Readable = bytes | bytearray | memoryview | Path | io.BufferedReader
"""A bundle, as its bytes or its file."""


class OpenBundle:
    """A job's references, ready to be evaluated on this machine.

    Opening reads the header only; the first evaluation unpickles the notebook's objects.

    Attributes:
        references: Expressions by key.
        cells: Text of the captured code, by file name.
        code: Fingerprints of the captured code.
        packages: Package versions in the notebook's environment; empty for a package that is not
            installed.
    """

    def __init__(self, header: Mapping[str, Any], content: _Content, start: int) -> None:
        self.references: dict[str, str] = header["references"]
        self.packages: dict[str, str] = header["packages"]
        self.cells = _cells_of(header)
        self.code = CodeTable(**header["code"])
        self._order: list[str] = header["names"]
        self._table: int = header["table"]
        self._content, self._start = content, start  # the payload begins at `start`
        self._names: dict[str, Any] | None = None
        self._evaluated: set[str] = set()

    def fileno(self) -> int:
        """Return the descriptor of the bundle's file, for another process.

        The file stays open, so the process can read it even if the file has been deleted.

        Raises:
            BundleError: If the bundle is in memory.
        """
        return self._content.fileno()

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes, hexadecimal. Computing it reads the whole bundle."""
        return digest_of_file(self._content.open())

    def evaluate(self, key: str) -> Any:
        """Return the value of a reference.

        References share objects: two keys that name one object get the same object. Evaluating a
        key a second time unpickles everything again, so a model that was trained in between is
        reset to its state in the notebook.

        Raises:
            BundleError: If the objects cannot be unpickled on this machine.
            Exception: Any exception that the notebook's code raises.
        """
        expression = self.references[key].strip()
        # Example: a trainer evaluates the keys twice, with objects that share a module M:
        #
        #   evaluate("model")    loads all objects: M1
        #   evaluate("loss")     uses the same objects: M1
        #   (training changes M1)
        #   evaluate("model")    a second time: loads all objects again: M2, as in the notebook
        #   evaluate("loss")     not evaluated since the reload: M2
        if self._names is None or key in self._evaluated:
            self._names, self._evaluated = self._load(), set()
        self._evaluated.add(key)
        # A captured name, or the import path of a local module, which was captured by its path.
        if expression in self._names:
            return self._names[expression]
        # The import path of an installed module.
        path = import_path(expression)
        if path is not None:
            return _import(*path)
        # Any other expression. Register its text, so that a traceback shows the key of the cell.
        # linecache and `cells` use this name as a key only; it is not a path.
        filename = f"<etrain {key}>"
        self.cells[filename] = CellSource(label=f"{key} of the cell", text=expression)
        namespace = {"__name__": "__main__", **self._names}
        return eval(compile(expression, filename, "eval"), namespace)

    def differences(self) -> list[str]:
        """Describe each package that differs: ``torch 2.6.0 in the notebook, 2.7.0 here``."""
        found = []
        for package, theirs in self.packages.items():
            ours = version_of(package)
            if theirs and theirs != ours:
                found.append(f"{package} {theirs} in the notebook, {ours or 'none'} here")
        return found

    def install_sources(self) -> None:
        """Make the cells' lines available to tracebacks in this process."""
        sources.install_sources(self.cells)

    def format_user_traceback(self, exc: BaseException) -> str:
        """Return a traceback of the user's frames, with ``Cell In[n], line m``."""
        return sources.format_user_traceback(exc, self.cells)

    def _load(self) -> dict[str, Any]:
        stream = self._content.open()
        stream.seek(self._start)
        # Use one unpickler for all names, whose memo preserves objects that several names share.
        unpickler = self._unpickler(stream)
        names: dict[str, Any] = {}
        for name in self._order:
            try:
                names[name] = unpickler.load()
            except Exception as exc:
                raise self._not_loadable(name, exc) from exc
        return names

    def _unpickler(self, stream: BinaryIO) -> pickle.Unpickler:
        # Map the payload in each call: a second set of objects must not see the changes that
        # training made to the first set.
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
                f"'{name}' of the notebook needs the module '{exc.name}', which is not installed "
                f"on this worker.{differ} Install it on the workers, or put its file next to the "
                "notebook."
            )
        return BundleError(
            f"'{name}' of the notebook cannot be unpickled on this worker ({type(exc).__name__}: "
            f"{exc}).{differ} Install the same packages on both, or pass a function that builds it."
        )


def open_bundle(bundle: Readable, *, digest: str = "") -> OpenBundle:
    """Read a bundle's header, without running any code from the notebook.

    Arrays and tensors are memory-mapped from a bundle file: pages are loaded when they are used,
    and processes on one machine share the pages that they do not modify.

    Args:
        bundle: The bytes, or the file, or an open file. The file stays open.
        digest: Expected SHA-256; empty to skip the check.

    Raises:
        BundleError: If it is not a bundle, is corrupt, or was written with another format or Python
            version.
    """
    content = _Content(bundle)
    if digest and (found := digest_of_file(content.open())) != digest:
        raise BundleError(
            f"{content} is corrupt: its SHA-256 is {found}, expected {digest}. None of its code "
            "was run. Submit the job again."
        )
    header, start = _read_header(content)
    # Check the versions before anything is unpickled: the errors caused by a mismatch would be hard
    # to understand.
    version, python = header["format"], tuple(header["python"][:2])
    if version != FORMAT_VERSION:
        raise BundleError(
            f"the bundle has format {version}, but this worker reads format {FORMAT_VERSION}. "
            "Install the same version of etrain-jupyter in the notebook and on the workers."
        )
    if python != sys.version_info[:2]:
        raise BundleError(
            f"the notebook runs Python {python[0]}.{python[1]}, but this worker runs "
            f"{sys.version_info[0]}.{sys.version_info[1]}. Code is sent as bytecode, which "
            "needs the same version. Install the notebook's Python version on the workers."
        )
    return OpenBundle(header, content, start)


def read_cells(bundle: Readable) -> dict[str, CellSource]:
    """Return only the cells of a bundle."""
    header, _ = _read_header(_Content(bundle))
    return _cells_of(header)


def digest_of_file(file: Any) -> str:
    """Return the SHA-256 of an open file from its current position, and close the file."""
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_digest(path: Path, digest: str, *, size: int | None = None) -> bool:
    """Return True if the file exists and has this SHA-256. With ``size``, check the size first."""
    try:
        if size is not None and path.stat().st_size != size:
            return False
        return digest_of_file(open_regular(path)) == digest
    except OSError:
        return False


class _Content:
    """The bytes of a bundle, in memory or in an open file."""

    # The file stays open, so that it may be deleted as soon as the bundle is open.
    def __init__(self, bundle: Readable) -> None:
        self._file: BinaryIO | None = None
        self._path = bundle if isinstance(bundle, Path) else None
        self._data: bytes | bytearray | memoryview = b""
        content = open_regular(bundle) if isinstance(bundle, Path) else bundle
        if isinstance(content, io.BufferedReader):
            self._file = content
        else:
            self._data = content

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def __str__(self) -> str:
        return str(self._path) if self._path is not None else f"the bundle of {self.size} bytes"

    @property
    def size(self) -> int:
        return len(self._data) if self._file is None else os.fstat(self._file.fileno()).st_size

    def fileno(self) -> int:
        if self._file is None:
            raise BundleError("the bundle is in memory and has no file")
        return self._file.fileno()

    def open(self) -> BinaryIO:
        """Return a new file object, at the beginning of the bytes."""
        if self._file is None:
            return io.BytesIO(self._data)
        return io.BufferedReader(_FromStart(self._file))

    def map(self) -> memoryview:
        """Return the bytes as private writable memory: changes affect neither file nor source."""
        if self._file is None:
            return memoryview(bytearray(self._data))
        # Copy on write: training modifies the tensors in place, but must not change the file.
        return memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY))


class _FromStart(io.RawIOBase):
    """Reader of an open file that keeps its own position, so several readers can share the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # No caller seeks from the end.
        self._position = offset + (self._position if whence == os.SEEK_CUR else 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        # preadv leaves the shared file offset unchanged.
        count = os.preadv(self._file.fileno(), [buffer], self._position)
        self._position += count
        return count


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, buffers: Any, reader: tensors.TensorReader) -> None:
        super().__init__(stream, buffers=buffers)
        self._reader = reader

    def find_class(self, module: str, name: str) -> Any:
        # Tensors are pickled as calls to a placeholder. Replace it with this bundle's reader,
        # which is known only here.
        found = super().find_class(module, name)
        return self._reader.rebuild if found is tensors.rebuild_tensor else found


def _read_header(content: _Content) -> tuple[dict[str, Any], int]:
    """Return the header and the position of the payload."""
    try:
        with content.open() as file:
            (length,) = HEADER.unpack(file.read(HEADER.size))
            # A corrupt length could request gigabytes: never read more than the file has.
            header = json.loads(file.read(min(length, content.size)))
    except (struct.error, ValueError) as exc:
        raise BundleError(
            f"these {content.size} bytes are not a complete bundle. Submit the job again."
        ) from exc
    return header, HEADER.size + length


def _cells_of(header: Mapping[str, Any]) -> dict[str, CellSource]:
    return {name: CellSource(**cell) for name, cell in header["cells"].items()}


def make_module(name: str) -> ModuleType:
    """Create an empty module for a file next to the notebook, and register it for ``import``.

    Do not move or rename this function or ``fill_module``: bundles refer to them by name.
    """
    # setdefault: a module with this name on the worker stays importable, and the bundle's objects
    # still use their own module.
    module = ModuleType(name)
    sys.modules.setdefault(name, module)
    return module


def fill_module(module: ModuleType, state: Mapping[str, Any]) -> ModuleType:
    """Set the attributes of a module."""
    vars(module).update(state)
    return module


def _import(module: str, attribute: str) -> Any:
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        raise BundleError(
            f"this worker has no module '{exc.name}', which {module}:{attribute} needs. Install "
            "it on the workers, or put its file next to the notebook."
        ) from exc
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def version_of(package: str) -> str:
    """Return the installed version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
