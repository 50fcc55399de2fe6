"""A worker process of an EC2 node: ``python -m etrain_jupyter.plugins.ec2.machine.node_worker``.

Only the node's agent starts it, and it exits with the agent. The agent writes the scheduler's
address, which the cluster's lease contains, to the node's folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from etrain_jupyter.plugins.ec2.machine.redaction import redact_logs
from etrain_jupyter.process.entry import log_to_stderr
from etrain_jupyter.worker.lifecycle import RecordFinder, make_parser, run_worker

TLS = "tls"
SCRATCH = "scratch"
SCHEDULER_FILE = "scheduler.json"
"""File in the node's folder with the scheduler in the lease."""
SERVING_FILE = "serving"
"""Prefix of files in the node's folder: one for each worker that has connected."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments from the agent."""
    parser = make_parser("etrain-node-worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--away-s", type=float, required=True)
    return parser.parse_args(arguments)


def main() -> None:
    """Run the worker until it exits."""
    arguments = parse_arguments()
    folder: Path = arguments.folder
    # `away_s` is longer than the lease is valid, so the agent turns the machine off before the
    # worker gives up, and the lost lease is reported as the reason.
    finder = RecordFinder(folder / SCHEDULER_FILE, away_s=arguments.away_s)
    # The agent wrote the file before it started this process.
    first = finder.look()
    if first is None:
        raise SystemExit(f"{folder / SCHEDULER_FILE} cannot be read")
    log_to_stderr()
    # Call this after `log_to_stderr`, which creates the handlers. Their output goes to the
    # machine's console.
    redact_logs()
    run_worker(
        arguments,
        finder,
        scheduler=first.address,
        num_lives=first.num_lives,
        host=arguments.host,
        tls=folder / TLS,
        scratch=folder / SCRATCH,
        on_serving=(folder / f"{SERVING_FILE}-{arguments.name}").touch,
    )


if __name__ == "__main__":
    main()
