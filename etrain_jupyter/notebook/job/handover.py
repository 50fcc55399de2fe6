"""Submit a job to a coordinator, and upload its bundle if the coordinator cannot read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etrain_jupyter.bundle.restore import CHUNK_BYTES
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import PoolError
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.link import JobLink, NoAnswerError, UnreachableError
from etrain_jupyter.wire.requests import PutBundle, SubmitJob
from etrain_jupyter.wire.versions import read_fingerprint

SUBMIT_S = 120.0
"""Timeout of a submit, in seconds. The scheduler may be busy, and hashing a large bundle takes
time."""

PIECE_S = 60.0
"""Timeout of the upload of one chunk of the bundle, in seconds."""


def spec_of(record: RunRecord, config: TrainConfig, *, cwd: str) -> dict[str, Any]:
    """Return the fields of ``head.jobs.job_spec.JobSpec``, which the coordinator validates."""
    return {
        "job_id": record.job_id,
        "name": record.name,
        "run_dir": str(record.folder),
        "config": record.config,
        "bundle_digest": record.bundle_digest,
        "bundle_size": record.bundle_path.stat().st_size,
        "bundle_file": record.bundle_file,
        "pool": record.pool,
        "cwd": cwd,
        "min_workers": config.workers.min,
        "max_workers": config.max_workers(),
        "fingerprint": read_fingerprint(),
        **({"place": record.place} if record.place else {}),
    }


def hand_over(link: JobLink, spec: dict[str, Any], bundle: Path) -> None:
    """Submit a job; upload the bundle in chunks if the coordinator requests it.

    Raises:
        PoolError: If the coordinator refuses.
        JobLostError: If the cluster disappeared or did not respond; the job may have started there.
    """
    # The coordinator reads the bundle from the job's folder if it can:
    #   submit -> wants_bundle=False   the job has started
    #   submit -> wants_bundle=True    its machine does not have the file: nothing has started
    #             PutBundle, chunk by chunk; the last one makes it check the digest
    #   submit -> wants_bundle=False   the job has started
    if not _submit(link, spec):
        return
    # The first chunk truncates a file that an interrupted upload left behind.
    with bundle.open("rb") as file:
        offset = 0
        while data := file.read(CHUNK_BYTES):
            link.call(PutBundle(job=spec, offset=offset, data=data), timeout=PIECE_S)
            offset += len(data)
    if _submit(link, spec):
        raise PoolError(
            f"the scheduler received all {offset / 2**20:.0f} MB of the job's bundle but cannot "
            "read them. Nothing was submitted. Run the cell again."
        )


def _submit(link: JobLink, spec: dict[str, Any]) -> bool:
    """Submit a job; return whether the coordinator needs its bundle first."""
    try:
        return link.call(SubmitJob(job=spec), timeout=SUBMIT_S).wants_bundle
    except NoAnswerError as exc:
        # A scheduler that was suspended reads the request after it resumes, and starts the job. The
        # callers keep the folder after a JobLostError; otherwise the job would train without being
        # listed.
        job_id = spec["job_id"]
        raise UnreachableError(
            f"the scheduler did not answer within {SUBMIT_S:g} s, so job {job_id} may or may not "
            f"have been submitted. Its folder is kept. `%etrain attach {job_id}` shows whether it "
            f"runs, and `%etrain stop {job_id}` stops it."
        ) from exc
