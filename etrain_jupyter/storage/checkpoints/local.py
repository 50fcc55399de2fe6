"""Checkpoint store in a folder, on a disk or a network file system."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints.base import Progress, choose_folders, ignore_progress
from etrain_jupyter.storage.checkpoints.files import (
    fsync_folder,
    link_if_absent,
    removed_at_end,
    write_new,
)
from etrain_jupyter.storage.checkpoints.manifest import (
    BLOCK_BYTES,
    MANIFESTS_FOLDER,
    PARTS_FOLDER,
    Manifest,
    Part,
    check_block,
    check_file,
    check_key,
    folder_key,
    manifest_key,
    parse_manifest,
    step_name,
    step_of_folder,
    step_of_manifest,
)
from etrain_jupyter.untrusted import folder_state, open_regular, read_regular

_MAX_MANIFEST_BYTES = 64_000_000


class LocalStore:
    """Checkpoint store in a folder; ``CheckpointStore`` documents the methods.

    Args:
        root: The folder, usually the job's run folder. The first write creates it.
        block_bytes: Size of the blocks in which parts can be read.
    """

    is_remote = False
    notice = ""

    def __init__(self, root: str | os.PathLike[str], *, block_bytes: int = BLOCK_BYTES) -> None:
        self.root = Path(root).absolute()
        self._block_bytes = block_bytes
        self._state = folder_state(self.root)

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    def __str__(self) -> str:
        return str(self.root)

    def begin(self, step: int) -> str:
        """Return the key of a new, empty folder for the parts of this step."""
        attempt = 0
        with self._as_checkpoint_error(f"{step_name(step)} cannot be started"):
            if self._state is not None:
                # A folder that was deleted is private when it is created again.
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_root()
            (self.root / PARTS_FOLDER).mkdir(parents=True, exist_ok=True)
            self._refuse_links()
            while True:
                key = folder_key(step, attempt)
                try:
                    # mkdir is atomic: only one of several processes creates the folder. An existing
                    # folder is never reused, because its writer may have been evicted but may still
                    # be running.
                    (self.root / key).mkdir()
                except FileExistsError:
                    attempt += 1
                else:
                    fsync_folder(self.root / PARTS_FOLDER)
                    return key

    def put_part(
        self,
        folder: str,
        name: str,
        data: bytes | memoryview | Path,
        *,
        progress: Progress = ignore_progress,
    ) -> Part:
        """Write one part to a temporary file, sync it, read it back, and rename it."""
        key = f"{folder}/{name}"
        path = self._path_of(key)
        self._check_root()
        temporary = path.with_name(f".{name}.{secrets.token_hex(4)}")
        with self._as_checkpoint_error(f"{key} cannot be written"), removed_at_end(temporary):
            # This check need not be atomic, because the folder belongs to one attempt, in which
            # each rank writes a part with a different name.
            if path.exists():
                raise CheckpointError(f"{key} already exists; keys are never used twice")
            part = write_new(temporary, data, progress, key=key, block_bytes=self._block_bytes)
            # Verify before the rename, so that a file with its final name is complete and correct.
            check_file(part, temporary)
            os.rename(temporary, path)
            fsync_folder(path.parent)
        return part

    def commit(self, manifest: Manifest) -> bool:
        """Write the manifest if the step has none."""
        name = step_name(manifest.step)
        self._check_root()
        for part in manifest.parts.values():
            self._check_exists(part)
        path = self.root / manifest_key(manifest.step)
        temporary = path.with_name(f".{name}.{secrets.token_hex(4)}")
        with self._as_checkpoint_error(f"the manifest of {name} cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with removed_at_end(temporary):
                write_new(temporary, manifest.to_json().encode())
                # A rename would replace the manifest of another writer; a link fails if the name
                # exists, and the file is complete from the beginning.
                is_new = link_if_absent(temporary, path)
                fsync_folder(path.parent)
        try:
            return is_new or self.read_manifest(manifest.step) == manifest
        except CheckpointError:
            return False

    def list_steps(self) -> list[int]:
        """Return the steps that have a manifest, oldest first."""
        names = self._names_in(MANIFESTS_FOLDER)
        return sorted(step for step in map(step_of_manifest, names) if step is not None)

    def read_manifest(self, step: int) -> Manifest:
        """Return a step's manifest."""
        try:
            text = read_regular(self.root / manifest_key(step), most_bytes=_MAX_MANIFEST_BYTES)
        except OSError as exc:
            raise CheckpointError(
                f"{step_name(step)}: its manifest cannot be read ({exc.strerror})"
            ) from exc
        return parse_manifest(text, step=step)

    def get_part(self, part: Part) -> Path:
        """Return the part's own file, after comparing size and SHA-256."""
        path = self._path_of(part.key)
        check_file(part, path)
        return path

    def read_block(self, part: Part, number: int) -> bytes:
        """Return the verified bytes of one block."""
        path = self._path_of(part.key)
        first, stop = part.block_range(number)
        try:
            with open_regular(path, follow=True) as file:
                size = os.fstat(file.fileno()).st_size
                data = os.pread(file.fileno(), stop - first, first)
        except FileNotFoundError as exc:
            raise CheckpointError(f"{part.key} is missing") from exc
        except OSError as exc:
            raise CheckpointError(f"{part.key} cannot be read ({exc.strerror})") from exc
        if size != part.size:
            raise CheckpointError(f"{part.key} has {size} bytes instead of {part.size}")
        check_block(part, number, data)
        return data

    def prune(self, keep_steps: Collection[int]) -> list[str]:
        """Delete other checkpoints, manifests first, and leftovers before the newest kept one."""
        self._check_root()
        self._refuse_links()
        listed = self.list_steps()
        kept = [step for step in listed if step in keep_steps]
        with self._as_checkpoint_error("old checkpoints cannot be deleted"):
            removed = [manifest_key(step) for step in listed if step not in keep_steps]
            for key in removed:
                (self.root / key).unlink(missing_ok=True)
            # The deletion of the manifests must be durable before the first part is deleted.
            # Otherwise, after a power failure, a manifest could reappear whose parts are missing.
            if removed:
                fsync_folder(self.root / MANIFESTS_FOLDER)
            dropped = set(listed) - set(kept)
            names = self._names_in(PARTS_FOLDER)
            for name in choose_folders(self, names, kept=kept, dropped=dropped)[1]:
                shutil.rmtree(self.root / PARTS_FOLDER / name, ignore_errors=True)
                removed.append(f"{PARTS_FOLDER}/{name}")
            self._remove_temporary_manifests(before=max(kept, default=0))
        return removed

    def _remove_temporary_manifests(self, *, before: int) -> None:
        # `.step_00001200.1a2b3c4d`, left by a writer that was killed in `commit`. A file for the
        # newest kept step or a later one may belong to a commit in progress.
        for name in self._names_in(MANIFESTS_FOLDER):
            step = step_of_folder(name[1:].rpartition(".")[0]) if name.startswith(".") else None
            if step is not None and step < before:
                (self.root / MANIFESTS_FOLDER / name).unlink(missing_ok=True)

    def _check_root(self) -> None:
        """Refuse a folder that another user may have put in place of the store's folder."""
        # A user who can write to the run store can rename the job's private folder and create
        # another one in its place, in which that user could read the checkpoints.
        now = folder_state(self.root)
        if now is not None and self._state is not None and now.may_be_planted(self._state):
            raise CheckpointError(
                f"{self.root} was replaced, and another user may have prepared the new folder: "
                "nothing was written or deleted there. Remove or rename it"
            )
        self._state = self._state or now

    def _refuse_links(self) -> None:
        # Through a link, writing and pruning would act on files elsewhere, which may not be ours.
        for name in (PARTS_FOLDER, MANIFESTS_FOLDER):
            if (self.root / name).is_symlink():
                raise CheckpointError(
                    f"{self.root / name} is a link, which is not followed: nothing was written or "
                    "deleted there. To keep checkpoints on another disk set checkpoint: {to: "
                    "FOLDER} in the cell"
                )

    def _check_exists(self, part: Part) -> None:
        try:
            size = self._path_of(part.key).stat().st_size
        except OSError as exc:
            raise CheckpointError(f"{part.key} is missing, so nothing was committed") from exc
        if size != part.size:
            raise CheckpointError(
                f"{part.key} has {size} bytes instead of {part.size}, so nothing was committed"
            )

    def _path_of(self, key: str) -> Path:
        path = self.root / check_key(key)
        # A link inside the folder could still point outside.
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise CheckpointError(f"key {key!r} points outside of {self.root} and is refused")
        return path

    def _names_in(self, folder: str) -> list[str]:
        try:
            return os.listdir(self.root / folder)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as exc:  # ValueError: a record can name any text as a path
            why = getattr(exc, "strerror", None) or exc
            raise CheckpointError(f"{self.root} cannot be listed ({why})") from exc

    @contextmanager
    def _as_checkpoint_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise CheckpointError(f"{what} in {self.root}: {exc.strerror or exc}") from exc
