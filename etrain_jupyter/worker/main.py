"""Worker process of a local cluster: ``python -m etrain_jupyter.worker.main``.

The head starts it. It ends with the keeper, when the pipe on its standard input is closed. It
outlives the scheduler, see ``worker.lifecycle``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from etrain_jupyter.process.cluster_dir import ClusterDir, ClusterRecord
from etrain_jupyter.process.entry import log_to_stderr
from etrain_jupyter.worker.lifecycle import (
    WorkerLifecycle,
    WorkerOptions,
    run_process,
)

AWAY_S = 60.0
"""Reconnect timeout in seconds; after it, the worker ends with its trainers."""


class LocalFinder:
    """Find the scheduler by the record in the cluster's folder."""

    away_s = AWAY_S
    is_remote = False

    def __init__(self, cluster: ClusterDir) -> None:
        self._cluster = cluster

    def look(self) -> ClusterRecord | None:
        """Return the record; None while the cluster shuts down."""
        return self._cluster.record()


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="etrain-local-worker")
    parser.add_argument("state_dir", type=Path)
    for name in ("scheduler", "name", "device", "supervisor"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--num-lives", type=int, required=True)
    return parser.parse_args(words)


def main() -> None:
    """Run until the cluster ends."""
    arguments = parse_arguments()
    cluster = ClusterDir(arguments.state_dir)
    options = WorkerOptions(
        name=arguments.name,
        device=arguments.device,
        supervisor=arguments.supervisor,
        scheduler=arguments.scheduler,
        num_lives=arguments.num_lives,
        tls=cluster.tls,
        scratch=cluster.scratch,
    )
    log_to_stderr()
    run_process(lambda: WorkerLifecycle(options, LocalFinder(cluster)), scratch=cluster.scratch)


if __name__ == "__main__":
    main()
