"""A worker process of an EC2 node: ``python -m etrain_jupyter.pools.ec2.machine.node_worker``.

Started by the node's agent only, and ends with it. The agent keeps the cluster's lease in the
node's folder up to date, and with it where the scheduler is.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from etrain_jupyter.pools.ec2.machine.redaction import redact_logs
from etrain_jupyter.process.entry import log_to_stderr
from etrain_jupyter.worker.lifecycle import WorkerLifecycle, WorkerOptions, run_process

TLS = "tls"
SCRATCH = "scratch"
SCHEDULER_FILE = "scheduler.json"
"""What the lease says, in the node's folder."""
SERVING_FILE = "serving"
"""Made in the node's folder when a worker has connected, with its name at the end."""


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """What the lease says of the scheduler."""

    address: str
    num_lives: int
    is_serving: bool = True
    """Nobody here can tell; whoever tries to connect will see."""


class FileFinder:
    """Finds the scheduler by the file that the agent writes.

    Args:
        folder: The node's folder.
        away_s: How long to wait for the next scheduler.
    """

    is_remote = True

    def __init__(self, folder: Path, *, away_s: float) -> None:
        self._path = folder / SCHEDULER_FILE
        self.away_s = away_s

    def look(self) -> LeaseRecord:
        """Return what the newest lease says; the agent ends us when there is none any more."""
        told = json.loads(self._path.read_text())
        return LeaseRecord(address=told["scheduler"], num_lives=told["num_lives"])


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read what the agent gave."""
    parser = argparse.ArgumentParser(prog="etrain-node-worker")
    parser.add_argument("folder", type=Path)
    for name in ("name", "device", "supervisor", "host"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--away-s", type=float, required=True)
    return parser.parse_args(words)


def main() -> None:
    """Run until the end."""
    arguments = parse_arguments()
    folder: Path = arguments.folder
    finder = FileFinder(folder, away_s=arguments.away_s)
    first = finder.look()
    options = WorkerOptions(
        name=arguments.name,
        device=arguments.device,
        supervisor=arguments.supervisor,
        scheduler=first.address,
        num_lives=first.num_lives,
        host=arguments.host,
        tls=folder / TLS,
        scratch=folder / SCRATCH,
    )
    log_to_stderr()
    redact_logs()
    serving = folder / f"{SERVING_FILE}-{arguments.name}"
    run_process(
        lambda: WorkerLifecycle(options, finder, on_serving=serving.touch), scratch=folder / SCRATCH
    )


if __name__ == "__main__":
    main()
