"""Where checkpoints lie: stores, the manifest protocol, retention.

A part of a checkpoint is bytes or a file here; what is in it only ``ranks`` knows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from etrain_jupyter.checkpoints.base import (
    CheckpointStore,
    OpenCheckpoint,
    newest_valid,
    open_newest,
    open_step,
)
from etrain_jupyter.checkpoints.local import LocalStore
from etrain_jupyter.checkpoints.manifest import Manifest, Part, manifest_key
from etrain_jupyter.checkpoints.retention import choose_steps_to_keep
from etrain_jupyter.errors import ConfigError, NotSupportedYetError

__all__ = [
    "CheckpointStore",
    "LocalStore",
    "Manifest",
    "OpenCheckpoint",
    "Part",
    "choose_steps_to_keep",
    "manifest_key",
    "newest_valid",
    "open_newest",
    "open_step",
    "open_store",
]


def open_store(url: str) -> CheckpointStore:
    """Return the store at a folder's path or a URL; nothing is read or written yet.

    Raises:
        NotSupportedYetError: For ``s3://``.
        ConfigError: For a scheme that no store is registered for.
    """
    scheme = urlsplit(url).scheme if "://" in url else "file"
    if scheme not in _STORES:
        raise ConfigError(
            f"checkpoint.to={url!r}: there is no store for {scheme}://. Nothing was submitted.",
            path=("checkpoint", "to"),
            hint="Give the path of a folder.",
        )
    return _STORES[scheme](url)


def _open_folder(url: str) -> CheckpointStore:
    return LocalStore(Path(unquote(urlsplit(url).path) if "://" in url else url).expanduser())


def _refuse_s3(url: str) -> CheckpointStore:
    raise NotSupportedYetError(
        f"checkpoint.to={url!r}: this version keeps checkpoints in folders only.",
        path=("checkpoint", "to"),
        hint="Give the path of a folder, or leave the key out to use the run folder.",
    )


_STORES: dict[str, Callable[[str], CheckpointStore]] = {"file": _open_folder, "s3": _refuse_s3}
"""A new store is one line here."""
