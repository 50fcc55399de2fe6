"""Bundles as files: written by the kernel, compared by their digest."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from etrain_jupyter.bundle.restore import digest_of_file
from etrain_jupyter.errors import BundleError
from etrain_jupyter.untrusted import open_regular

if TYPE_CHECKING:
    from etrain_jupyter.bundle.capture import Bundle

CHUNK_BYTES = 2 << 20
"""Of a bundle that is sent: how much of it is in memory at once, at each end."""


def write_bundle(path: Path, bundle: Bundle | bytes) -> None:
    """Write a bundle to a new file that only its owner can read.

    Raises:
        BundleError: If the notebook's memory is not what was captured any more.
        OSError: If it cannot be written.
    """
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for chunk in [bundle] if isinstance(bundle, bytes) else bundle.chunks():
            digest.update(chunk)
            file.write(chunk)
    if not isinstance(bundle, bytes) and digest.hexdigest() != bundle.digest:
        raise BundleError(
            "an array or a tensor of the job was changed by another thread of the notebook while "
            "it was being sent. Nothing was submitted. Wait for that thread, then run the cell "
            "again."
        )


def has_digest(path: Path, digest: str, *, size: int | None = None) -> bool:
    """Tell whether a file is there and has this SHA-256; another size is seen without reading."""
    try:
        if size is not None and path.stat().st_size != size:
            return False
        return digest_of_file(open_regular(path)) == digest
    except OSError:
        return False
