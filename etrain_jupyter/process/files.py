"""Write private files atomically."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Replace a file of mode 0600 atomically: readers see the previous text or the new one."""
    # The pid keeps two processes that write the same file from mixing their drafts.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    # The mode is set at creation: with a chmod afterwards, others could open the file before it.
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        f.write(text)
    os.replace(draft, path)
