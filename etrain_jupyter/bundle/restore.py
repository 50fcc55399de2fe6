"""Opens a bundle on a rank."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import cloudpickle

from etrain_jupyter.bundle import sources
from etrain_jupyter.bundle.capture import FORMAT_VERSION, HEADER
from etrain_jupyter.bundle.sources import CellSource
from etrain_jupyter.config.references import import_path
from etrain_jupyter.errors import BundleError


class OpenBundle:
    """A job's references, to be evaluated here.

    Opening reads only the header; the notebook's objects are made when one is asked for first.

    Attributes:
        digest: SHA-256 of the bytes, hexadecimal.
        references: Key to expression.
        cells: Text of the cells that define what was captured, by file name.
        packages: Versions in the notebook's environment.
    """

    def __init__(self, header: Mapping[str, Any], payload: bytes, digest: str) -> None:
        self.digest = digest
        self.references: dict[str, str] = header["references"]
        self.packages: dict[str, str] = header["packages"]
        self.cells = {name: CellSource(**cell) for name, cell in header["cells"].items()}
        self._payload = payload

    @cached_property
    def _names(self) -> dict[str, Any]:
        with _explaining_imports():
            names: dict[str, Any] = cloudpickle.loads(self._payload)
        return names

    def evaluate(self, key: str) -> Any:
        """Return the value of a reference, built anew each time.

        Raises:
            BundleError: If a module that the notebook has is not on this worker.
            Exception: Whatever the notebook's code raises.
        """
        expression = self.references[key].strip()
        path = import_path(expression)
        if path is not None:
            with _explaining_imports():
                value: Any = importlib.import_module(path[0])
            for attribute in path[1].split("."):
                value = getattr(value, attribute)
            return value
        code = compile(expression, f"<etrain {key}: {expression}>", "eval")
        return eval(code, dict(self._names))

    def install_sources(self) -> None:
        """Make tracebacks in this process find the cells' lines."""
        sources.install_sources(self.cells)

    def format_user_traceback(self, exc: BaseException) -> str:
        """Return the traceback as the user should see it, with ``Cell In[n], line m``."""
        return sources.format_user_traceback(exc, self.cells)


def open_bundle(data: bytes) -> OpenBundle:
    """Read a bundle's header; nothing of the notebook runs yet.

    Raises:
        BundleError: If it is of another format, or was made by another Python.
    """
    header, payload = _split(data)
    if header["format"] != FORMAT_VERSION:
        raise BundleError(
            f"the bundle has format {header['format']}, this worker reads {FORMAT_VERSION}. "
            "Install the "
            f"same version of etrain-jupyter in the notebook and on the workers."
        )
    theirs, ours = tuple(header["python"][:2]), sys.version_info[:2]
    if theirs != ours:
        raise BundleError(
            f"the notebook runs Python {theirs[0]}.{theirs[1]}, this worker {ours[0]}.{ours[1]}. "
            "Code by "
            f"value needs the same version on both."
        )
    digest = hashlib.sha256(data).hexdigest()
    return OpenBundle(header, payload, digest)


def read_cells(data: bytes) -> dict[str, CellSource]:
    """Return only the cells of a bundle, for whoever does not open it."""
    header, _ = _split(data)
    return {name: CellSource(**cell) for name, cell in header["cells"].items()}


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = HEADER.unpack_from(data)
    return json.loads(data[HEADER.size : HEADER.size + length]), data[HEADER.size + length :]


@contextmanager
def _explaining_imports() -> Iterator[None]:
    """Say what a missing module means here: the notebook had it, or it had not been captured."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise BundleError(
            f"the workers have no module {exc.name!r}, which the notebook has. Put its file beside "
            "the notebook, from where it travels with the job, or install it for the workers."
        ) from exc
