"""Hands a job to a coordinator, and the notebook's objects if it does not see their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etrain_jupyter.bundle.files import CHUNK_BYTES
from etrain_jupyter.errors import PoolError
from etrain_jupyter.notebook.job.job_record import JobRecord
from etrain_jupyter.notebook.job.link import JobLink
from etrain_jupyter.wire.requests import PutBundle, SubmitJob

SUBMIT_S = 120.0
"""The scheduler may be busy, and compares the digest of a large bundle."""

PIECE_S = 60.0
"""Timeout in seconds of one piece of the bundle."""


def bundle_facts(record: JobRecord) -> dict[str, Any]:
    """Return what a job's order says of the notebook's objects."""
    return {
        "bundle_digest": record.bundle_digest,
        "bundle_size": record.bundle_path.stat().st_size,
        "bundle_file": record.bundle_file,
    }


def hand_over(link: JobLink, order: dict[str, Any], bundle: Path) -> None:
    """Submit a job. A coordinator elsewhere asks for the bundle, which goes there in pieces.

    Raises:
        PoolError: If the coordinator refuses.
        JobLostError: If the cluster went away: the job may have begun there.
    """
    if not link.call(SubmitJob(job=order), timeout=SUBMIT_S).wants_bundle:
        return
    with bundle.open("rb") as file:
        offset = 0
        while data := file.read(CHUNK_BYTES):
            link.call(PutBundle(job=order, offset=offset, data=data), timeout=PIECE_S)
            offset += len(data)
    if link.call(SubmitJob(job=order), timeout=SUBMIT_S).wants_bundle:
        raise PoolError(
            f"the scheduler took all {offset / 2**20:.0f} MB of the job's bundle and does not have "
            "it. Nothing was submitted. Run the cell again."
        )
