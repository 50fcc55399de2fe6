"""Plug-ins: the pools, sub-commands, loggers and checks that a package adds to the core.

The core does not know any plug-in by name. It finds them by their entry points, those of this
package as well as those of other packages::

    [project.entry-points."etrain_jupyter.plugins"]
    acme = "acme_etrain:PLUGIN"

``PLUGIN`` is a ``Plugin``. It refers to everything by ``"package.module:name"``, so that finding
the plug-ins imports neither their modules nor the libraries that they need.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any

GROUP = "etrain_jupyter.plugins"
"""Group of the entry points."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PoolKind:
    """A kind of pool, which an entry of ``pools.yaml`` names as its ``kind``."""

    make: str
    """Reference to a function that turns a ``PoolEntry`` into a ``Pool`` without starting it."""
    prefix: str = ""
    """Prefix of the ids of its clusters, if their folders are in the user's state directory."""
    of_cluster: str = ""
    """Reference to a function that takes a ``ClusterDir`` and returns its ``Pool``; required with
    ``prefix``."""
    address_of: str = ""
    """Reference to a function that takes a ``ClusterDir`` and returns the ``SchedulerAddress`` of
    a scheduler on another machine, or None."""
    down_s: float = 0.0
    """Minimum timeout of ``%etrain down`` in seconds."""
    check: str = ""
    """Reference to a function that takes the ``PoolEntry`` objects of this kind and yields a
    ``Finding`` for each check of ``%etrain doctor``. It sends no request."""
    find: str = ""
    """Reference to a function that takes a region or None and describes the machines of all
    clusters of this kind in the user's account, as text for ``%etrain ls --all``."""
    check_all: str = ""
    """Reference to a function that takes the same and yields a ``Finding`` per cluster."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A sub-command of ``%etrain``; its name is that of its function."""

    run: str
    """Reference to a function that takes a ``Surface`` and arguments; see ``notebook.commands``."""
    after: str = ""
    """The sub-command that this one follows in the help; by default, this one is the last."""
    group: str = ""
    """Sub-command that this one belongs to, such as ``pools`` for ``pools init``."""
    cell: str = ""
    """Reference to a function for ``%%etrain NAME`` that takes a ``CellSurface``, the line, the
    body and the arguments; empty if the sub-command does not accept a body."""


@dataclass(frozen=True, kw_only=True)
class CellCommand:
    """A command for the first line of a cell only, with a body like that of ``distributed``."""

    run: str
    """Reference to a function that takes a ``CellSurface``, parsed options, line and body."""
    parser: str
    """Reference to a function that returns the ``Parser`` of the command's line."""
    help: str
    """Reference to a function that returns the text of ``--help``."""
    summary: str
    """Short description, for the list of sub-commands."""
    group: str
    """Reference to the ``ExtraGroup`` of keys of the body; see ``config.keys``."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Extensions of the core by one plug-in."""

    pools: Mapping[str, PoolKind] = field(default_factory=dict)
    """Kinds of pools, by ``kind``."""
    commands: tuple[Command, ...] = ()
    cells: Mapping[str, CellCommand] = field(default_factory=dict)
    """Cell commands by name, which is also the key of the command's group in the body."""
    service: str = ""
    """Reference to a function that takes a ``ServiceHost`` and returns a ``Service``, which runs in
    the scheduler's process next to the jobs; see ``head.coordinator.services``."""
    words: str = ""
    """Reference to a mapping from the name of an argument of its commands to the accepted words,
    for completion."""
    public: Mapping[str, str] = field(default_factory=dict)
    """Functions and classes that ``etrain_jupyter`` exports, by name."""
    loggers: Mapping[str, str] = field(default_factory=dict)
    """Classes of loggers, by the name that ``log.to`` accepts."""
    notices: str = ""
    """Reference to a function that starts to watch for notices about the worker's machine; see
    ``worker.preemption_watch``."""


@cache
def installed() -> Mapping[str, Plugin]:
    """Return the installed plug-ins by name, those of this package first."""
    found: dict[str, Plugin] = {}
    for point in sorted(entry_points(group=GROUP), key=_is_foreign):
        # A plug-in of another package must not break training for all others.
        try:
            plugin = point.load()
            if not isinstance(plugin, Plugin):
                raise TypeError(f"{point.value} is not an etrain_jupyter.plugin.Plugin")
        except Exception as exc:
            logger.warning(
                "the plug-in '%s' (%s) is not used, because it cannot be loaded: %s: %s. Update or "
                "uninstall the package that provides it.",
                point.name, point.value, type(exc).__name__, exc,
            )  # fmt: skip
        else:
            found.setdefault(point.name, plugin)
    return found


def _is_foreign(point: Any) -> tuple[bool, str]:
    return not point.value.startswith(f"{__package__}."), point.name


def pool_kinds() -> Mapping[str, PoolKind]:
    """Return the kinds of pools of all plug-ins."""
    return _merge("pools")


def kind_of(cluster_id: str) -> PoolKind | None:
    """Return the kind of pool of a plug-in to which a cluster belongs; None if there is none."""
    prefix = cluster_id.partition("-")[0]
    return next((kind for kind in pool_kinds().values() if kind.prefix == prefix), None)


def loggers() -> Mapping[str, str]:
    """Return the loggers of all plug-ins."""
    return _merge("loggers")


def public_names() -> Mapping[str, str]:
    """Return the functions and classes that plug-ins add to ``etrain_jupyter``."""
    return _merge("public")


def cells() -> Mapping[str, CellCommand]:
    """Return the cell commands of all plug-ins."""
    return _merge("cells")


def commands() -> Iterator[Command]:
    """Yield the sub-commands of all plug-ins."""
    for plugin in installed().values():
        yield from plugin.commands


def _merge(part: str) -> dict[str, Any]:
    # The first plug-in with a name wins, so that another package cannot replace one of ours.
    merged: dict[str, Any] = {}
    for plugin in installed().values():
        for name, value in getattr(plugin, part).items():
            merged.setdefault(name, value)
    return merged


def load(reference: str) -> Any:
    """Import and return ``package.module:name``; the name may be that of a method."""
    module, _, name = reference.partition(":")
    return attrgetter(name)(importlib.import_module(module))
