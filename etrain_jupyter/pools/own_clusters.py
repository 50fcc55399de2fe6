"""The clusters that this user may talk to: those that the user's own files know.

A scheduler's answers are unpickled, so whoever is asked can run code here. The address and the
certificates of a cluster therefore come from the user's state directory or from the user's own
``pools.yaml``, and from nowhere else: never from a job's record, which may be a stranger's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import stat
from pathlib import Path

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.pools.catalog import read_own_catalog
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.state_root import state_root
from etrain_jupyter.storage.bucket_log.place import private_root
from etrain_jupyter.untrusted import read_regular

NOTES = "schedulers"
"""Folder with the addresses of schedulers that somebody else made and that got a job from here."""
MOST_NOTES = 500
_MOST_BYTES = 100_000
_CLUSTER_ID = re.compile(r"(local|aws)-[A-Za-z0-9_-]{1,80}")


def state_roots() -> list[Path]:
    """Return the folders in which this user's clusters are, wherever they were started from.

    A kernel and a terminal may differ in whether they have ``XDG_RUNTIME_DIR``.
    """
    places = [state_root(), private_root(), Path(f"/run/user/{os.getuid()}/etrain")]
    return list(dict.fromkeys(places))


def find_cluster_dir(cluster_id: str) -> ClusterDir | None:
    """Return what this machine has of a cluster of this user; None if that is nothing."""
    if not _CLUSTER_ID.fullmatch(cluster_id):
        return None
    for root in state_roots():
        if is_private_folder(root) and is_private_folder(root / cluster_id):
            return ClusterDir(root / cluster_id)
    return None


def address_of(cluster: ClusterDir) -> SchedulerAddress | None:
    """Return where a cluster's scheduler is reached; None while it starts, and once it has ended.

    Its head may have a machine of its own.
    """
    record = cluster.record()
    if record is not None:
        return None if record.is_here and not record.is_alive else cluster.address(record)
    from etrain_jupyter.pools.ec2.client.remote_pool import head_address_of

    return head_address_of(cluster)


def is_out_of_reach(cluster: ClusterDir) -> bool:
    """Tell whether a cluster of another machine, which shares the folder, listens only there."""
    record = cluster.record()
    return record is not None and not record.is_here and "://127." in record.address


def find_scheduler(cluster_id: str, address: str) -> SchedulerAddress | None:
    """Return how a scheduler that somebody else made is reached, if this user knows it.

    Args:
        cluster_id: What it calls itself.
        address: Where it is said to listen: this is looked for, and never used.
    """
    return _noted(cluster_id) or _in_own_pools(address)


def note_scheduler(address: SchedulerAddress) -> None:
    """Remember where a job was given to; its record alone is not believed later.

    Where nothing can be kept, the job is followed by its log once this kernel has ended.
    """
    if find_cluster_dir(address.cluster_id) is not None:
        return
    path = _note_path(address.cluster_id)
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    data = json.dumps(address.to_dict()).encode()
    with contextlib.suppress(OSError):
        path.parent.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        hidden.replace(path)
        notes = sorted(path.parent.glob("*.json"), key=lambda note: note.stat().st_mtime)
        for old in notes[:-MOST_NOTES]:
            old.unlink(missing_ok=True)


def is_private_folder(path: Path) -> bool:
    """Tell whether a folder is this user's and nobody else may write in it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_closed


def _noted(cluster_id: str) -> SchedulerAddress | None:
    path = _note_path(cluster_id)
    if not is_private_folder(path.parent):
        return None
    try:
        known = SchedulerAddress.from_dict(json.loads(read_regular(path, most_bytes=_MOST_BYTES)))
    except (OSError, ValueError, TypeError):
        return None
    return known if known.cluster_id == cluster_id else None


def _note_path(cluster_id: str) -> Path:
    digest = hashlib.sha256(cluster_id.encode(errors="backslashreplace")).hexdigest()
    return private_root() / NOTES / f"{digest[:32]}.json"


def _in_own_pools(address: str) -> SchedulerAddress | None:
    from etrain_jupyter.pools.external.pool import AddressPool

    with contextlib.suppress(EtrainError):
        for entry in read_own_catalog().values():
            if entry.kind == "address" and entry.values.get("address") == address:
                pool = AddressPool.from_entry(entry)
                return dataclasses.replace(pool.address, cluster_id=address)
    return None
