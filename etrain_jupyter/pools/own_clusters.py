"""Find the clusters that this user trusts: those in the user's own files.

A scheduler's answers are unpickled, so a malicious scheduler could run code in the kernel. The
address and certificates of a cluster therefore come only from the user's state directory or the
user's own ``pools.yaml``, and never from a job's record, which another user may have written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
from pathlib import Path

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.plugin import kind_of, load
from etrain_jupyter.pools.address.pool import AddressPool
from etrain_jupyter.pools.catalog import read_own_catalog
from etrain_jupyter.pools.registry import make_pool
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.state_root import state_root
from etrain_jupyter.storage.bucket_log.locations import private_root
from etrain_jupyter.untrusted import is_private_folder, read_regular

NOTES = "schedulers"
"""Folder with the addresses of existing schedulers to which this user submitted a job."""
MAX_NOTES = 500
_MAX_BYTES = 100_000
_CLUSTER_ID = re.compile(r"[a-z]{1,20}-[A-Za-z0-9_-]{1,80}")


def state_roots() -> list[Path]:
    """Return all folders that may contain this user's clusters.

    A kernel and a terminal may use different folders: often only one has ``XDG_RUNTIME_DIR``.
    """
    places = [state_root(), private_root(), Path(f"/run/user/{os.getuid()}/etrain")]
    return list(dict.fromkeys(places))


def find_cluster_dir(cluster_id: str) -> ClusterDir | None:
    """Return the folder of one of this user's clusters; None if this machine has none."""
    # The id may come from an untrusted record, so it must not lead to a path outside of the folder.
    if not _CLUSTER_ID.fullmatch(cluster_id):
        return None
    for root in state_roots():
        if _is_own(root / cluster_id):
            return ClusterDir(root / cluster_id)
    return None


def address_of(cluster: ClusterDir) -> SchedulerAddress | None:
    """Return the address of a cluster's scheduler; None while it starts or after it has ended.

    The plug-in of its pool knows the address of a scheduler on another machine.
    """
    record = cluster.record()
    if record is not None:
        # A record from another machine cannot be checked here; only an attempt to connect shows
        # whether its scheduler runs.
        return None if record.is_here and not record.is_alive else cluster.address(record)
    kind = kind_of(cluster.cluster_id)
    if kind is None or not kind.address_of:
        return None
    address: SchedulerAddress | None = load(kind.address_of)(cluster)
    return address


def is_out_of_reach(cluster: ClusterDir) -> bool:
    """Return True if a cluster in a shared folder runs, and listens, only on another machine."""
    record = cluster.record()
    return record is not None and not record.is_here and "://127." in record.address


def find_scheduler(cluster_id: str, address: str) -> SchedulerAddress | None:
    """Return the trusted address of an existing scheduler; None if this user has none.

    ``address`` comes from a job's record and is untrusted. It selects an entry in the user's own
    ``pools.yaml``; no connection is made to it otherwise.
    """
    # Check the notes first, because each identifies one particular scheduler. An entry in
    # pools.yaml identifies any scheduler that listens at the address.
    return _noted(cluster_id) or _in_own_pools(address)


def note_scheduler(address: SchedulerAddress) -> None:
    """Store the address of a scheduler that accepted a job, so that a later kernel trusts it.

    Errors are ignored. Without the note, a later kernel follows the job through its log only.
    """
    # A cluster that etrain started has its own folder.
    if find_cluster_dir(address.cluster_id) is not None:
        return
    path = _note_path(address.cluster_id)
    # Write a new file and rename it, so that a reader never sees a partial note.
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    data = json.dumps(address.to_dict()).encode()
    with contextlib.suppress(OSError):
        path.parent.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        hidden.replace(path)
        # Limit the folder's size: remove the oldest notes.
        notes = sorted(path.parent.glob("*.json"), key=lambda note: note.stat().st_mtime)
        for old in notes[:-MAX_NOTES]:
            old.unlink(missing_ok=True)


def noted_schedulers() -> list[SchedulerAddress]:
    """Return other tools' schedulers to which this user submitted a job, newest first.

    A scheduler that was restarted at the same address is listed once.
    """
    folder = private_root() / NOTES
    if not _is_own(folder):
        return []
    notes = sorted(folder.glob("*.json"), key=lambda note: note.stat().st_mtime, reverse=True)
    found: dict[str, SchedulerAddress] = {}
    for note in notes:
        address = _read_note(note)
        if address is not None:
            found.setdefault(address.address, address)
    return list(found.values())


def forget_scheduler(address: str) -> None:
    """Remove the notes about all schedulers at an address."""
    for note in (private_root() / NOTES).glob("*.json"):
        known = _read_note(note)
        if known is not None and known.address == address:
            note.unlink(missing_ok=True)


def _noted(cluster_id: str) -> SchedulerAddress | None:
    path = _note_path(cluster_id)
    if not _is_own(path.parent):
        return None
    known = _read_note(path)
    # The file's name is only a hash, so compare the id itself.
    return known if known is not None and known.cluster_id == cluster_id else None


def _is_own(folder: Path) -> bool:
    # Users who can write to the parent could replace the folder between this check and a read.
    return is_private_folder(folder.parent) and is_private_folder(folder)


def _read_note(path: Path) -> SchedulerAddress | None:
    try:
        return SchedulerAddress.from_dict(json.loads(read_regular(path, most_bytes=_MAX_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def _note_path(cluster_id: str) -> Path:
    # The id comes from a scheduler, so hash it instead of using it in a path.
    digest = hashlib.sha256(cluster_id.encode(errors="backslashreplace")).hexdigest()
    return private_root() / NOTES / f"{digest[:32]}.json"


def _in_own_pools(address: str) -> SchedulerAddress | None:
    with contextlib.suppress(EtrainError):
        for entry in read_own_catalog().values():
            if entry.kind == "address" and entry.values.get("address") == address:
                pool = make_pool(entry)
                assert isinstance(pool, AddressPool)
                return dataclasses.replace(pool.address, cluster_id=address)
    return None
