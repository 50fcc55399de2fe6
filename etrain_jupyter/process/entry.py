"""Process start-up: logging, and factories named in a settings file."""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Callable
from typing import Any

FORMER_NAMES = {
    "etrain_jupyter.cluster.coordinator:Coordinator": (
        "etrain_jupyter.head.coordinator.coordinator:Coordinator"
    ),
    "etrain_jupyter.cluster.supervisor:Supervisor": "etrain_jupyter.worker.supervisor:Supervisor",
    "etrain_jupyter.pools.local_head_nodes:LocalHeadNodes": (
        "etrain_jupyter.head.local_node_source:LocalHeadNodes"
    ),
    "etrain_jupyter.pools.aws_spot.head:make_nodes": (
        "etrain_jupyter.pools.ec2.head.main:make_nodes"
    ),
}
"""Names in the settings of clusters started by an earlier version, and their current locations."""


def load_factory(reference: str) -> Callable[..., Any]:
    """Import and return ``package.module:attribute``."""
    module, _, attribute = FORMER_NAMES.get(reference, reference).partition(":")
    factory: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return factory


def log_to_stderr() -> None:
    """Send log messages to standard error, which is a file in the state directory."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def collect_garbage_rarely() -> None:
    """Let Python search for unreachable cycles less often.

    By default, that takes about a fifth of the processor time of a scheduler with 400 workers,
    because its many long-lived objects are searched each time. Reference counting alone frees
    nearly everything.
    """
    gc.set_threshold(10_000, 20, 50)
