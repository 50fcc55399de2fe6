"""Which workers may work for which jobs: what is installed there must fit the notebook's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from etrain_jupyter.head.coordinator.roster import WorkerFacts
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log import events
from etrain_jupyter.wire.versions import PROTOCOL, PROTOCOL_KEY, Comparison, compare

if TYPE_CHECKING:
    from etrain_jupyter.head.jobs.hosted_job import HostedJob


class Fitness:
    """Compares fingerprints, and says in a job's log what does not fit, once."""

    def __init__(self) -> None:
        self._told: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        """Jobs and the versions that they have been told of."""

    def fits(self, worker: WorkerFacts, job: HostedJob) -> bool:
        """Tell whether a worker may work for a job."""
        theirs, ours = worker.fingerprint, expected_of(job.order)
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
    """Return what a worker of this job should be: as the notebook, and one that understands us."""
    return {**order.fingerprint, PROTOCOL_KEY: str(PROTOCOL)}


def words_of(found: Comparison, worker: str) -> str:
    """Say what was found on a worker, what comes of it, and what to type next."""
    if found.fits:
        return (
            f"{'; '.join(found.notes)}: {worker} trains all the same. Install the same versions "
            "there if something is odd"
        )
    return (
        f"{'; '.join(found.wrong)}: this job cannot run there, so {worker} and all workers with "
        f"these versions get no work of it. Install {' and '.join(found.remedies)} for the "
        "workers, or start the notebook with the versions that they have. A local cluster takes "
        "up what is installed now after %etrain down"
    )
