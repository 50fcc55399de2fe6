"""Record what a running ``%etrain pools check`` has created, for the next one if it is killed.

::

    check 1                                       check 2
    holds the lock; records that it boots
    records its cluster and its job
    killed: nothing of it is removed
                                                  gets the lock, and finds the record
                                                  removes cluster and job, and begins

A cluster is removed only if all of its jobs are those of checks: a cell may have joined it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.account.boot import forget_probe, running_clusters
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.own_clusters import address_of, find_cluster_dir
from etrain_jupyter.pools.registry import get_pool
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.start_lock import remove_start_lock, start_lock
from etrain_jupyter.process.state_root import open_state_root
from etrain_jupyter.wire.requests import ListJobs

FOLDER = "checks"
DOWN_S = 240.0


def job_name(pool: str) -> str:
    """Return the name of the job that the check of a pool submits."""
    return f"check-{pool}"


class CheckRecord:
    """Everything that a check has created so far, in the state folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            self._known = dict(json.loads(path.read_text(encoding="utf-8")))

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def cluster_id(self) -> str:
        """Id of the started cluster; empty if it is not known yet."""
        return str(self._known.get("cluster_id", ""))

    @property
    def job_id(self) -> str:
        """Id of the submitted job; empty if it is not known yet."""
        return str(self._known.get("job_id", ""))

    def note(self, **facts: Any) -> None:
        """Add facts, before anything is created that they describe."""
        self._known |= facts
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._path, json.dumps(self._known))

    def forget(self) -> None:
        """Delete the record: nothing of the check is left."""
        self._known = {}
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def open_record(name: str, spec: AwsSpotSpec) -> Iterator[CheckRecord]:
    """Provide the record of a pool's check, while no other check of it runs on this machine.

    Raises:
        PoolError: If another one does.
    """
    root, key = open_state_root(), f"check-{name}-{spec.region}"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(start_lock(root, key, timeout_s=0.0))
        except TimeoutError as exc:
            raise PoolError(
                f"another check of pool {name} runs on this machine. Nothing was done. Wait until "
                "it has ended."
            ) from exc
        try:
            yield CheckRecord(root / FOLDER / f"{name}@{spec.region}.json")
        finally:
            remove_start_lock(root, key)


def remove_killed(name: str, spec: AwsSpotSpec, record: CheckRecord) -> Leftovers:
    """Remove what a killed check has created, as its record says; return what remains."""
    left = []
    jobs = [(record.job_id, record.cluster_id)] if record.job_id else []
    for cluster_id in running_clusters(Clients(spec), spec):
        ids = _jobs_of_checks(cluster_id, name)
        if ids is not None:
            left.append(get_pool(name).down(timeout_s=DOWN_S))
            jobs += [(one, cluster_id) for one in ids]
    for job_id, cluster_id in dict.fromkeys(jobs):
        forget_probe(spec, job_id=job_id, cluster_id=cluster_id)
    found = Leftovers.of_all(left)
    if not found:
        record.forget()
    return found


def _jobs_of_checks(cluster_id: str, pool: str) -> list[str] | None:
    """Return the ids of a cluster's jobs; None if one of them is not that of a check."""
    cluster = find_cluster_dir(cluster_id)
    address = address_of(cluster) if cluster is not None else None
    if address is None:
        return None  # started on another machine, or its head has died
    try:
        jobs = ask(address, ListJobs()).jobs
    except PoolError:
        return None  # the caller reports the running cluster
    is_check = all(one.get("name") == job_name(pool) for one in jobs)
    return [str(one["job_id"]) for one in jobs] if is_check else None
