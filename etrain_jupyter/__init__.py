"""Elastic data-parallel training from a notebook cell.

Use ``%load_ext etrain_jupyter``, then ``%%etrain distributed``; from Python,
``etrain_jupyter.distributed({...})``. The public names are those of ``etrain_jupyter.api`` and of
the installed plug-ins. They are loaded on first use, so importing the package does not load torch,
IPython, distributed or anywidget.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from etrain_jupyter.api import *  # noqa: F403

__version__ = "0.2.0"


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register ``%%etrain`` and ``%etrain``."""
    from etrain_jupyter import magics

    magics.load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Remove the magics; jobs continue."""
    from etrain_jupyter import magics

    magics.unload(ipython)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    # `from etrain_jupyter import launch` asks for an attribute before it imports the module, and
    # tools ask for special names such as `__path__`. Neither may import the whole package.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        api = import_module("etrain_jupyter.api")
        if name in api.__all__:
            return getattr(api, name)
        plugin = import_module("etrain_jupyter.plugin")
        if name in plugin.public_names():
            return plugin.load(plugin.public_names()[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    own = ["__version__", "load_ipython_extension", "unload_ipython_extension"]
    api, plugin = import_module("etrain_jupyter.api"), import_module("etrain_jupyter.plugin")
    return sorted([*own, *api.__all__, *plugin.public_names()])
