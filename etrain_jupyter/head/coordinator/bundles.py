"""Serve job bundles to remote workers in bounded pieces.

::

    kernel ── etrain_submit ──▶ head: is the file in the job's folder?  yes: the job starts
           ◀─ wants_bundle ───        no
           ── etrain_put_bundle, piece by piece ──▶ a hidden file, renamed when complete
           ── etrain_submit ──▶
    worker ── etrain_bundle, piece by piece ──▶ head      unless it can read the job's folder
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from etrain_jupyter.bundle.restore import CHUNK_BYTES, has_digest
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.head.jobs.job_spec import JobSpec

_NAME = re.compile(r"bundle(-[0-9a-f]{12})?")


class HeadBundles:
    """Receive and serve bundles as files, without keeping their bytes in memory.

    Args:
        specs: Returns the specifications of active jobs.
    """

    def __init__(self, specs: Callable[[], Iterable[JobSpec]]) -> None:
        self._specs = specs
        self._drafts: set[Path] = set()  # incomplete files that kernels are sending

    def close(self) -> None:
        """Remove the incomplete files."""
        for draft in self._drafts:
            draft.unlink(missing_ok=True)

    async def is_here(self, spec: JobSpec) -> bool:
        """Return whether this process can read the complete bundle of a job."""
        _check_name(spec)
        return await asyncio.to_thread(
            has_digest, spec.bundle_path, spec.bundle_digest, size=spec.bundle_size
        )

    async def put(self, spec: JobSpec, offset: int, data: bytes) -> None:
        """Store a piece of a bundle whose file this process cannot read.

        Raises:
            RequestError: If the bundle cannot be written, or does not match the announced digest.
        """
        _check_name(spec)
        path = spec.bundle_path
        # The digest in the name keeps two kernels from mixing the pieces of different bundles.
        draft = path.with_name(f".{path.name}.{spec.bundle_digest[:12]}")
        self._drafts.add(draft)
        try:
            is_whole = await asyncio.to_thread(_write_piece, spec, draft, offset, data)
        except OSError as exc:
            # Free the space now, because a full disk is the most likely cause, and jobs log to it.
            with contextlib.suppress(OSError):
                draft.unlink()
            self._drafts.discard(draft)
            raise RequestError(
                f"the job's bundle ({spec.bundle_size / 2**20:.0f} MB) cannot be stored in "
                f"{path.parent}: {exc.strerror or exc}. Nothing was submitted. Free space there, "
                "or pass a function that loads the data on the workers."
            ) from exc
        if is_whole:
            self._drafts.discard(draft)

    async def read(self, digest: str, offset: int) -> bytes:
        """Return the next piece of an active job's bundle; empty at its end.

        Raises:
            RequestError: If no active job has the bundle, or its file is gone.
        """
        # Jobs with the same objects share a digest; any of their files will do.
        paths = [spec.bundle_path for spec in self._specs() if spec.bundle_digest == digest]
        if not paths:
            raise RequestError(f"no active job has the bundle {digest[:12]}")
        try:
            return await asyncio.to_thread(_read_piece, paths[0], offset)
        except OSError as exc:
            raise RequestError(
                f"the bundle {paths[0]} can no longer be read: {exc.strerror or exc}. Stop the "
                "job and run its cell again."
            ) from exc


def _check_name(spec: JobSpec) -> None:
    # The kernel chose the name. It must not point outside the job's folder or at its other files.
    if not _NAME.fullmatch(spec.bundle_file):
        raise RequestError(f"{spec.bundle_file!r} is not the name of a bundle file")


def _write_piece(spec: JobSpec, draft: Path, offset: int, data: bytes) -> bool:
    draft.parent.mkdir(parents=True, exist_ok=True)
    # A retry starts over at offset 0; an earlier attempt may have left a longer file.
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if offset == 0 else 0)
    with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
        file.seek(offset)
        file.write(data)
    if offset + len(data) < spec.bundle_size:
        return False
    if not has_digest(draft, spec.bundle_digest, size=spec.bundle_size):
        raise OSError("the received bytes do not match its digest")
    draft.replace(spec.bundle_path)
    return True


def _read_piece(path: Path, offset: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)
