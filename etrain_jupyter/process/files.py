"""Write private files atomically."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield the path of a hidden file, which becomes ``path`` unless the block raises."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_private(path: Path, text: str) -> None:
    """Replace a file with mode 0600 atomically, so readers see either the old text or the new."""
    # The pid keeps two processes that write the same file from mixing up their drafts.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    # Set the mode at creation, because before a later chmod, others could open the file.
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        f.write(text)
    os.replace(draft, path)
