"""Write bundles to files and verify their digests."""

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
"""Chunk size for sending a bundle, in bytes: sender and receiver each hold one chunk in memory."""


def write_bundle(path: Path, bundle: Bundle | bytes) -> None:
    """Write a bundle to a new file that only its owner can read.

    Raises:
        BundleError: If the notebook's memory has changed since the bundle was captured.
        OSError: If the file cannot be written.
    """
    digest = hashlib.sha256()
    # O_EXCL and mode 0600: the folder may be shared, and the bundle contains the user's data.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for chunk in [bundle] if isinstance(bundle, bytes) else bundle.chunks():
            digest.update(chunk)
            file.write(chunk)
    # Large arrays are not copied at capture, so another thread may change one before it is written.
    if not isinstance(bundle, bytes) and digest.hexdigest() != bundle.digest:
        raise BundleError(
            "another thread of the notebook changed an array or tensor of the job while it was "
            "being written. Nothing was submitted. Wait for that thread, then run the cell again."
        )


def has_digest(path: Path, digest: str, *, size: int | None = None) -> bool:
    """Return True if the file exists and has this SHA-256. With ``size``, check the size first."""
    try:
        if size is not None and path.stat().st_size != size:
            return False
        return digest_of_file(open_regular(path)) == digest
    except OSError:
        return False
