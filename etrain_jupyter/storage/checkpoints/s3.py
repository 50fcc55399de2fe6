"""Checkpoints under a prefix of a bucket: S3, or what speaks its protocol and writes conditionally.

The layout is that of a folder. What a file system does by renaming, S3 does by writes that succeed
only if the key is free (``If-None-Match: *``): a folder is taken by an object ``.begun`` in it, a
part is written once, and of several writers one gets the manifest.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path
from weakref import WeakValueDictionary

from etrain_jupyter.config.store_url import split_s3_url
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints.base import Progress, ignore_progress, used_folders
from etrain_jupyter.storage.checkpoints.files import (
    ScratchFile,
    new_scratch_file,
    removed_on_failure,
)
from etrain_jupyter.storage.checkpoints.manifest import (
    MANIFESTS_FOLDER,
    PARTS_FOLDER,
    AlteredError,
    Manifest,
    Part,
    check_file,
    check_key,
    folder_key,
    manifest_key,
    parse_manifest,
    step_name,
    step_of_manifest,
)
from etrain_jupyter.storage.checkpoints.retention import choose_folders_to_remove
from etrain_jupyter.storage.objects.s3_bucket import AccessDeniedError, Bucket, S3Limits, Stored

_POLICY = "docs/how-to/store-checkpoints-in-s3.md has the policy"
CLAIM = ".begun"
"""The object by which a folder of parts is taken."""


class S3Store:
    """A prefix of checkpoints; see ``CheckpointStore`` for what its methods promise.

    Args:
        url: ``s3://bucket/prefix``. Nothing is asked of S3 before the first method needs it.
        limits: How much at once, how long and how often.
    """

    is_remote = True

    def __init__(self, url: str, *, limits: S3Limits | None = None) -> None:
        bucket, prefix = split_s3_url(url)
        self._bucket = Bucket(bucket, prefix, limits or S3Limits())
        self._local: WeakValueDictionary[Part, ScratchFile] = WeakValueDictionary()
        """Verified copies of parts that somebody still holds."""
        self._is_conditional = False
        """Whether the endpoint was seen to refuse a key that is taken."""
        self.notice = ""
        self._may_not_list_uploads = False

    def __repr__(self) -> str:
        return f"S3Store({str(self._bucket)!r})"

    def __str__(self) -> str:
        return str(self._bucket)

    def begin(self, step: int) -> str:
        """Return the key of a new, empty folder for the parts of this step."""
        what, attempt = f"{step_name(step)} cannot be begun", 0
        while not self._claim(key := folder_key(step, attempt), what):
            attempt += 1
        if not self._is_conditional:
            # Once: an endpoint that ignores the condition would let two writers commit.
            if self._claim(key, what):
                raise CheckpointError(
                    f"{what} in {self}: {self._bucket.endpoint()} overwrites what is there although"
                    " it was asked not to (If-None-Match). Use a store with conditional writes"
                )
            self._is_conditional = True
        return key

    def _claim(self, folder: str, what: str) -> bool:
        token = secrets.token_hex(8)
        return self._bucket.put_if_absent(f"{folder}/{CLAIM}", token.encode(), what, token=token)

    def put_part(
        self,
        folder: str,
        name: str,
        data: bytes | memoryview | Path,
        *,
        progress: Progress = ignore_progress,
    ) -> Part:
        """Upload one part, in several chunks at once if it is large, and read it back."""
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
        self._read_back(part, stored)
        return part

    def _read_back(self, part: Part, stored: Stored) -> None:
        """Compare what S3 says of the object, or all its bytes where it does not vouch for them."""
        known = self._bucket.head(part.key, f"{part.key} cannot be read back")
        if known is None:
            raise CheckpointError(f"{part.key} is missing after it was written to {self}")
        if not stored.is_vouched_for(known) or known["ContentLength"] != part.size:
            self._fetch(part)

    def commit(self, manifest: Manifest) -> bool:
        """Write the manifest on the condition that there is none, and read it back."""
        name = step_name(manifest.step)
        what = f"the manifest of {name} cannot be written"
        for part in manifest.parts.values():
            self._check_is_there(part, what)
        data = manifest.to_json().encode()
        self._bucket.put_if_absent(manifest_key(manifest.step), data, what)
        found = self._bucket.get(manifest_key(manifest.step), what)
        return found == data or self._is_same(found, manifest)

    def _check_is_there(self, part: Part, what: str) -> None:
        check_key(part.key)
        known = self._bucket.head(part.key, what)
        if known is None:
            raise CheckpointError(f"{part.key} is missing, so nothing was committed")
        if known["ContentLength"] != part.size:
            raise CheckpointError(
                f"{part.key} has {known['ContentLength']} bytes instead of {part.size}, so nothing "
                "was committed"
            )

    def _is_same(self, found: bytes | None, manifest: Manifest) -> bool:
        try:
            return parse_manifest(found or b"", step=manifest.step) == manifest
        except CheckpointError:
            return False

    def list_steps(self) -> list[int]:
        """Return the steps that have a manifest, oldest first."""
        keys = self._bucket.keys(MANIFESTS_FOLDER, "the manifests cannot be listed")
        names = [key.removeprefix(f"{MANIFESTS_FOLDER}/") for key in keys]
        return sorted(step for step in map(step_of_manifest, names) if step is not None)

    def read_manifest(self, step: int) -> Manifest:
        """Return a step's manifest."""
        text = self._bucket.get(
            manifest_key(step), f"{step_name(step)}: its manifest cannot be read"
        )
        if text is None:
            raise CheckpointError(f"{step_name(step)}: its manifest cannot be read (none is there)")
        return parse_manifest(text, step=step)

    def get_part(self, part: Part) -> Path:
        """Return a local copy, fetched in several ranges at once and compared.

        The copy goes when nobody holds the path that is returned.
        """
        check_key(part.key)
        copy = self._local.get(part)
        if copy is None:
            copy = self._local[part] = self._fetch(part)
        return copy

    def _fetch(self, part: Part) -> ScratchFile:
        what = f"{part.key} cannot be read"
        known = self._bucket.head(part.key, what)
        if known is None:
            raise CheckpointError(f"{part.key} is missing")
        if known["ContentLength"] != part.size:
            raise CheckpointError(
                f"{part.key} has {known['ContentLength']} bytes instead of {part.size}"
            )
        try:
            return self._fetch_once(part, what)
        except AlteredError:
            return self._fetch_once(part, what)  # it may have been on its way only

    def _fetch_once(self, part: Part, what: str) -> ScratchFile:
        path = new_scratch_file()
        with removed_on_failure(path):
            self._bucket.download(part.key, part.size, path, what)
            check_file(part, path)
        return path

    def prune(self, keep_steps: Collection[int]) -> list[str]:
        """Remove other checkpoints, manifest first, leftovers and uploads that nobody completed.

        The uploads come last: a role that may not list them must not keep the parts for ever.
        ``notice`` says then what is left over.
        """
        what = "old checkpoints cannot be removed"
        listed = self.list_steps()
        kept = [step for step in listed if step in keep_steps]
        removed = [manifest_key(step) for step in listed if step not in keep_steps]
        for key in removed:
            self._bucket.delete(key, what)
        dropped = set(listed) - set(kept)
        keys = self._bucket.keys(PARTS_FOLDER, what)
        _, unused = self._sort_folders({_folder_of(key) for key in keys}, kept, dropped)
        for key in keys:
            if _folder_of(key) in unused:
                self._bucket.delete(key, what)
        folders = set(unused) | self._abort_uploads(kept, dropped)
        return removed + [f"{PARTS_FOLDER}/{name}" for name in sorted(folders)]

    def _sort_folders(
        self, names: Collection[str], kept: Collection[int], dropped: Collection[int]
    ) -> tuple[set[str], list[str]]:
        """Return the folders that manifests need, and those that nobody needs any more."""
        used = used_folders(self, kept, names)
        return used, choose_folders_to_remove(names, kept=kept, dropped=dropped, used=used)

    def _abort_uploads(self, kept: Collection[int], dropped: Collection[int]) -> set[str]:
        """Abort the multipart uploads that nobody will complete; return their unused folders.

        Nothing is raised: all else was removed before. A role that is denied this is not asked
        again.
        """
        if self._may_not_list_uploads:
            return set()
        what = "uploads that a crash left unfinished cannot be removed"
        try:
            uploads = self._bucket.uploads(PARTS_FOLDER, what)
            names = {_folder_of(key) for key, _ in uploads}
            used, unused = self._sort_folders(names, kept, dropped) if names else (set(), [])
            for key, upload in uploads:
                if _folder_of(key) in used.union(unused):
                    self._bucket.abort(key, upload, what)
        except AccessDeniedError:
            self._may_not_list_uploads = True
            self.notice = (
                f"{what} in {self}: the role lacks s3:ListBucketMultipartUploads on the bucket, "
                f"or s3:AbortMultipartUpload on its objects ({_POLICY}). Old checkpoints were "
                "removed all the same. Allow both, or let a lifecycle rule "
                "AbortIncompleteMultipartUpload remove those uploads"
            )
            return set()
        except CheckpointError as exc:
            self.notice = f"{exc}. Old checkpoints were removed all the same"
            return set()
        self.notice = ""
        return set(unused)


def _folder_of(key: str) -> str:
    """Return the second name of ``checkpoints/step_00001200/model.safetensors``."""
    return key.split("/")[1]
