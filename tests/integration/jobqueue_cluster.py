"""A dask-jobqueue cluster in a process: ``python -m tests.integration.jobqueue_cluster FOLDER``.

Its jobs are processes on this machine, started by jobqueue's own stand-in for a batch system. It
prints the scheduler's address, then reads the desired number of workers from each input line.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """Run until the end of the input."""
    from dask_jobqueue.local import LocalCluster

    make: Any = LocalCluster
    cluster = make(
        cores=1,
        processes=1,
        memory="1GB",
        worker_extra_args=["--no-nanny", "--no-dashboard"],
        scheduler_options={"host": "127.0.0.1", "dashboard": False, "dashboard_address": None},
        local_directory=sys.argv[1],
        death_timeout=60,
    )
    print(cluster.scheduler_address, flush=True)
    for line in sys.stdin:
        number = int(line)
        cluster.adapt(minimum_jobs=number, maximum_jobs=number, interval="500ms")
    cluster.close()


if __name__ == "__main__":
    main()
