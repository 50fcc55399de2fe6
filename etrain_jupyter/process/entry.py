"""Process start-up: logging, and factories named in a settings file."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any


def load_factory(reference: str) -> Callable[..., Any]:
    """Import and return ``package.module:attribute``."""
    module, _, attribute = reference.partition(":")
    factory: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return factory


def log_to_stderr() -> None:
    """Send log messages to standard error, which is a file in the state directory."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
