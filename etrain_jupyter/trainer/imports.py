"""Imports of a job's code, which the fork server repeats in advance.

A trainer is forked from a server that has imported torch. Everything else that the notebook's
functions import, such as scikit-learn, costs each new trainer seconds. In a search, and whenever a
notebook submits similar jobs, the modules are always the same::

    trainer 1    forked ── imports sklearn ── hello ── PackagesImported
    server                                               imports sklearn
    trainer 2                                                              forked ── hello
"""

from __future__ import annotations

import contextlib
import importlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterable

SET_BY_IMPORTS = ("CUBLAS_", "KMP_", "NCCL_", "TORCH_NCCL_")
"""Prefixes of environment variables that packages, including this one, set by themselves and not at
the job's request."""


WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables that keep packages from starting threads when they are imported, because a process with
threads must not fork. One such package is pyarrow, which pandas and scikit-learn import."""


class ImportRecord:
    """The loaded modules and the environment at the start of a trainer."""

    def __init__(self) -> None:
        self._modules = frozenset(sys.modules)
        self._environment = _environment()

    def new_modules(self) -> tuple[str, ...]:
        """Return the modules of installed packages that have been imported since then.

        Empty if the job has changed the environment, because many packages read it during their
        import and must therefore be imported after the change.
        """
        if self._environment != _environment():
            return ()
        folders = _package_folders()
        names = [name for name in list(sys.modules) if name not in self._modules]
        return tuple(name for name in names if _is_installed(name, folders))


def import_modules(names: Iterable[str]) -> None:
    """Import modules, and ignore errors; the job itself will import the modules that failed."""
    added = {k: v for k, v in WITHOUT_THREADS.items() if k not in os.environ}
    os.environ.update(added)
    for name in names:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
    for variable in added:
        del os.environ[variable]


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(SET_BY_IMPORTS)}


def _package_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths["purelib"], paths["platlib"], site.getusersitepackages()}
    return tuple(os.path.join(folder, "") for folder in found)


def _is_installed(name: str, folders: tuple[str, ...]) -> bool:
    # Modules in the notebook's folder may change between jobs. Modules without a file are created
    # by other modules.
    origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
    return origin is not None and origin.startswith(folders)
