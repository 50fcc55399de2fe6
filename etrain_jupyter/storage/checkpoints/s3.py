"""Checkpoint store in S3, or a compatible service with conditional writes.

The layout is the same as in a folder. Where a file system would rename, S3 writes only if the key
is free (``If-None-Match: *``): an object ``.begun`` claims a folder, a part is written once, and
only one of several writers creates the manifest.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from etrain_jupyter.config.store_url import split_s3_url
from etrain_jupyter.errors import CheckpointError, StoreError
from etrain_jupyter.storage.checkpoints.base import Progress, choose_folders, ignore_progress
from etrain_jupyter.storage.checkpoints.files import ScratchFile, new_scratch_file
from etrain_jupyter.storage.checkpoints.manifest import (
    MANIFESTS_FOLDER,
    PARTS_FOLDER,
    AlteredError,
    Manifest,
    Part,
    check_block,
    check_file,
    check_key,
    folder_key,
    manifest_key,
    parse_manifest,
    step_name,
    step_of_manifest,
)
from etrain_jupyter.storage.objects import store_errors_as
from etrain_jupyter.storage.objects.s3_bucket import Bucket
from etrain_jupyter.storage.objects.s3_requests import AccessDeniedError, S3Limits

T = TypeVar("T")

_POLICY = "docs/how-to/store-checkpoints-in-s3.md has the policy"
CLAIM = ".begun"
"""The object that claims a folder for the parts of one checkpoint."""


class S3Store:
    """Checkpoint store below a prefix of a bucket; ``CheckpointStore`` documents the methods.

    Args:
        url: ``s3://bucket/prefix``. The first method call connects to S3.
        limits: Sizes, timeouts and retry limits.
    """

    is_remote = True

    def __init__(self, url: str, *, limits: S3Limits | None = None) -> None:
        bucket, prefix = split_s3_url(url)
        self._bucket = Bucket(bucket, prefix, limits or S3Limits())
        self._local: WeakValueDictionary[Part, ScratchFile] = WeakValueDictionary()
        """Verified copies of parts whose paths are still referenced."""
        self._is_conditional = False
        """True once the endpoint is known to refuse a write to an existing key."""
        self.notice = ""
        self._may_not_list_uploads = False

    def __repr__(self) -> str:
        return f"S3Store({str(self._bucket)!r})"

    def __str__(self) -> str:
        return str(self._bucket)

    @store_errors_as(CheckpointError)
    def begin(self, step: int) -> str:
        """Return the key of a new, empty folder for the parts of this step."""
        what, attempt = f"{step_name(step)} cannot be started", 0
        while not self._claim(key := folder_key(step, attempt), what):
            attempt += 1
        if not self._is_conditional:
            # Claim the folder again, which must fail. An endpoint that ignores the condition would
            # let two writers commit the same step. One check per process is enough.
            if self._claim(key, what):
                raise CheckpointError(
                    f"{what} in {self}: {self._bucket.endpoint()} ignores the condition "
                    "If-None-Match and overwrites existing objects. Use a store with conditional "
                    "writes"
                )
            self._is_conditional = True
        return key

    def _claim(self, folder: str, what: str) -> bool:
        token = secrets.token_hex(8)
        return self._bucket.put_if_absent(f"{folder}/{CLAIM}", token.encode(), what, token=token)

    @store_errors_as(CheckpointError)
    def put_part(
        self,
        folder: str,
        name: str,
        data: bytes | memoryview | Path,
        *,
        progress: Progress = ignore_progress,
    ) -> Part:
        """Upload one part, in parallel chunks if it is large, and verify it."""
        key = f"{folder}/{name}"
        check_key(key)
        what = f"{key} cannot be written"
        source = data if isinstance(data, Path) else memoryview(data).cast("B")
        try:
            size = source.stat().st_size if isinstance(source, Path) else len(source)
        except OSError as exc:
            raise CheckpointError(f"{what}: {source} cannot be read ({exc.strerror})") from exc
        stored = self._bucket.upload(key, source, size, what, progress)
        part = Part(key=key, sha256=stored.sha256, size=size)
        if len(stored.chunks) > 1:
            part = replace(part, block_bytes=stored.chunk_bytes, blocks=stored.chunks)
        known = self._bucket.head(key, f"{key} cannot be read back")
        if known is None:
            raise CheckpointError(f"{key} is missing after it was written to {self}")
        # S3 computed the checksum from the bytes that it stored. Some compatible services do not
        # report one. For these, download the object and check its SHA-256.
        if not stored.is_confirmed_by(known) or known["ContentLength"] != size:
            self._fetch(part)
        return part

    @store_errors_as(CheckpointError)
    def commit(self, manifest: Manifest) -> bool:
        """Write the manifest if the step has none, and read it back."""
        name = step_name(manifest.step)
        what = f"the manifest of {name} cannot be written"
        for part in manifest.parts.values():
            check_key(part.key)
            self._check_size(part, what, ", so nothing was committed")
        data = manifest.to_json().encode()
        # Ignore the result of the write, because the stored manifest shows who committed, even
        # after a lost response or in a repeated call.
        self._bucket.put_if_absent(manifest_key(manifest.step), data, what)
        found = self._bucket.get(manifest_key(manifest.step), what)
        try:
            return found == data or parse_manifest(found or b"", step=manifest.step) == manifest
        except CheckpointError:
            return False

    @store_errors_as(CheckpointError)
    def list_steps(self) -> list[int]:
        """Return the steps that have a manifest, oldest first."""
        keys = self._bucket.keys(MANIFESTS_FOLDER, "the manifests cannot be listed")
        names = (key.removeprefix(f"{MANIFESTS_FOLDER}/") for key in keys)
        return sorted(step for step in map(step_of_manifest, names) if step is not None)

    @store_errors_as(CheckpointError)
    def read_manifest(self, step: int) -> Manifest:
        """Return a step's manifest."""
        what = f"{step_name(step)}: its manifest cannot be read"
        text = self._bucket.get(manifest_key(step), what)
        if text is None:
            raise CheckpointError(f"{what} (none is there)")
        return parse_manifest(text, step=step)

    @store_errors_as(CheckpointError)
    def get_part(self, part: Part) -> Path:
        """Return a verified local copy, downloaded in parallel chunks.

        The copy is deleted when the returned path is garbage-collected.
        """
        check_key(part.key)
        copy = self._local.get(part)
        if copy is None:
            copy = self._local[part] = self._fetch(part)
        return copy

    @store_errors_as(CheckpointError)
    def read_block(self, part: Part, number: int) -> bytes:
        """Return the verified bytes of one block, which are downloaded to memory."""
        check_key(part.key)
        first, stop = part.block_range(number)
        what = f"{part.key} cannot be read"

        def read() -> bytes:
            data = b""
            if first != stop:  # S3 has no range without bytes
                try:
                    data = self._bucket.get_range(part.key, first, stop - first, what)
                except StoreError:
                    self._check_size(part, what)  # an error that says more
                    raise
            check_block(part, number, data)
            return data

        return _twice_if_altered(read)

    def _fetch(self, part: Part) -> ScratchFile:
        what = f"{part.key} cannot be read"
        self._check_size(part, what)

        def download() -> ScratchFile:
            path = new_scratch_file()
            try:
                self._bucket.download(part.key, part.size, path, what)
                check_file(part, path)
            except BaseException:
                with suppress(OSError):  # free the space for the second attempt
                    path.unlink(missing_ok=True)
                raise
            return path

        return _twice_if_altered(download)

    def _check_size(self, part: Part, what: str, end: str = "") -> None:
        known = self._bucket.head(part.key, what)
        if known is None:
            raise CheckpointError(f"{part.key} is missing{end}")
        if known["ContentLength"] != part.size:
            raise CheckpointError(
                f"{part.key} has {known['ContentLength']} bytes instead of {part.size}{end}"
            )

    @store_errors_as(CheckpointError)
    def prune(self, keep_steps: Collection[int]) -> list[str]:
        """Delete other checkpoints, manifest first, then leftovers and incomplete uploads."""
        what = "old checkpoints cannot be deleted"
        listed = self.list_steps()
        kept = [step for step in listed if step in keep_steps]
        removed = [manifest_key(step) for step in listed if step not in keep_steps]
        for key in removed:
            self._bucket.delete(key, what)
        dropped = set(listed) - set(kept)
        keys = self._bucket.keys(PARTS_FOLDER, what)
        names = {_folder_of(key) for key in keys}
        _, unused = choose_folders(self, names, kept=kept, dropped=dropped)
        for key in keys:
            if _folder_of(key) in unused:
                self._bucket.delete(key, what)
        # Abort the uploads last, because a role that may not list them can delete the rest.
        folders = set(unused) | self._abort_uploads(kept, dropped)
        return removed + [f"{PARTS_FOLDER}/{name}" for name in sorted(folders)]

    def _abort_uploads(self, kept: Collection[int], dropped: Collection[int]) -> set[str]:
        """Abort incomplete multipart uploads; return their unused folders. Raises nothing."""
        # After access was denied once, do not repeat the request with each checkpoint.
        if self._may_not_list_uploads:
            return set()
        what = "incomplete uploads of crashed writers cannot be aborted"
        try:
            uploads = self._bucket.uploads(PARTS_FOLDER, what)
            names = {_folder_of(key) for key, _ in uploads}
            used, unused = set[str](), list[str]()
            if names:  # otherwise, read no manifests
                used, unused = choose_folders(self, names, kept=kept, dropped=dropped)
            for key, upload in uploads:
                # In a folder that a manifest refers to, all parts are complete. An upload that is
                # still open there belongs to a late rank whose part rank 0 has written elsewhere.
                if _folder_of(key) in used.union(unused):
                    self._bucket.abort(key, upload, what)
        except AccessDeniedError:
            self._may_not_list_uploads = True
            self.notice = (
                f"{what} in {self}: the role lacks s3:ListBucketMultipartUploads on the bucket, "
                f"or s3:AbortMultipartUpload on its objects ({_POLICY}). Old checkpoints were "
                "deleted nevertheless. Allow both, or let a lifecycle rule "
                "AbortIncompleteMultipartUpload delete those uploads"
            )
            return set()
        except StoreError as exc:
            self.notice = f"{exc}. Old checkpoints were deleted nevertheless"
            return set()
        self.notice = ""
        return set(unused)


def _twice_if_altered(read: Callable[[], T]) -> T:
    # The bytes may have been corrupted in transit. A second mismatch means that the object is
    # corrupt, and the caller falls back to an older checkpoint.
    try:
        return read()
    except AlteredError:
        return read()


def _folder_of(key: str) -> str:
    """Return the folder's name, the second part of the key.

    >>> _folder_of("checkpoints/step_00001200/model.safetensors")
    'step_00001200'
    """
    return key.split("/")[1]
