"""Worker process of a local cluster: ``python -m etrain_jupyter.worker.main``.

The head starts it. It exits when the keeper exits, which closes the pipe on this process's standard
input. It outlives the scheduler; see ``worker.lifecycle``.
"""

from __future__ import annotations

from pathlib import Path

from etrain_jupyter.process.cluster_dir import ClusterDir, ClusterRecord
from etrain_jupyter.process.entry import log_to_stderr
from etrain_jupyter.worker.lifecycle import make_parser, run_worker

AWAY_S = 60.0
"""Reconnect timeout in seconds; after that, the worker and its trainers exit."""


class LocalFinder:
    """Find the scheduler through the record in the cluster's folder."""

    away_s = AWAY_S
    is_remote = False

    def __init__(self, cluster: ClusterDir) -> None:
        self._cluster = cluster

    def look(self) -> ClusterRecord | None:
        """Return the record; None if the cluster is shutting down."""
        return self._cluster.record()


def main() -> None:
    """Run until the cluster shuts down."""
    parser = make_parser("etrain-local-worker")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--scheduler", required=True)
    parser.add_argument("--num-lives", type=int, required=True)
    parser.add_argument("--fork-server", type=int, default=-1)
    arguments = parser.parse_args()
    cluster = ClusterDir(arguments.state_dir)
    log_to_stderr()
    run_worker(
        arguments,
        LocalFinder(cluster),
        scheduler=arguments.scheduler,
        num_lives=arguments.num_lives,
        tls=cluster.tls,
        scratch=cluster.scratch,
        fork_server=arguments.fork_server,
    )


if __name__ == "__main__":
    main()
