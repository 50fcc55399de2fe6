"""Check whether a worker's installed versions are compatible with a job's notebook."""

from __future__ import annotations

from collections.abc import Mapping

from etrain_jupyter.head.coordinator.roster import WorkerFacts
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log import events
from etrain_jupyter.wire.versions import PROTOCOL_KEY, WIRE_VERSION, Comparison, compare


class Fitness:
    """Compare fingerprints, and log each incompatibility with a job once."""

    def __init__(self) -> None:
        # Pairs of a job id and worker versions that the job's log already mentions. Without them,
        # each message would repeat, because ``fits`` is called for each worker and job whenever
        # workers are assigned.
        self._told: set[tuple[str, tuple[tuple[str, str], ...]]] = set()

    def fits(self, worker: WorkerFacts, job: HostedJob) -> bool:
        """Return whether a worker may run a job."""
        theirs, ours = worker.fingerprint, expected_of(job.order)
        # A worker that reports no versions is accepted, since there is nothing to compare.
        if theirs == ours or not theirs:
            return True
        found = compare(theirs, ours, at=worker.name, here="this notebook")
        key = (job.order.job_id, tuple(sorted(theirs.items())))
        if (found.wrong or found.notes) and key not in self._told:
            self._told.add(key)
            text = words_of(found, worker.name)
            job.log(events.LogLine, level="warning", worker=worker.name, text=text)
        return found.fits


def expected_of(order: JobSpec) -> Mapping[str, str]:
    """Return the versions that this job's workers need: the notebook's, and our wire version."""
    return {**order.fingerprint, PROTOCOL_KEY: str(WIRE_VERSION)}


def words_of(found: Comparison, worker: str) -> str:
    """Describe how a worker's versions differ, the effect and the remedy."""
    if found.fits:
        return (
            f"{'; '.join(found.notes)}: {worker} is used anyway. If its results or errors differ, "
            "install the same versions there"
        )
    return (
        f"{'; '.join(found.wrong)}: this job cannot run there, so it does not use {worker} and "
        f"other workers with these versions. Install {' and '.join(found.remedies)} on the "
        "workers, or start the notebook with their versions. If they are in a local cluster, run "
        "%etrain down: the next cluster starts with the installed versions"
    )
