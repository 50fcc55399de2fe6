"""Start-up code shared by all kinds of worker processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from etrain_jupyter.worker.lifecycle import (
    SchedulerFinder,
    WorkerLifecycle,
    WorkerOptions,
    run_process,
)


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return a parser for the options common to all workers."""
    parser = argparse.ArgumentParser(prog=prog)
    for name in ("name", "device", "supervisor"):
        parser.add_argument(f"--{name}", required=True)
    return parser


def run_worker(
    arguments: argparse.Namespace,
    finder: SchedulerFinder,
    *,
    scheduler: str,
    num_lives: int,
    tls: Path,
    scratch: Path,
    host: str = "127.0.0.1",
    fork_server: int = -1,
    kill_wait_s: float = 0.0,
    on_serving: Callable[[], None] = lambda: None,
) -> None:
    """Run a worker until it shuts down; logging must already be set up.

    Args:
        arguments: From ``make_parser``.
        finder: Finds the scheduler, even if it was restarted at another address.
        scheduler: Address of the first scheduler.
        num_lives: Its incarnation number, starting at 1.
        tls: Folder with the certificates.
        scratch: Folder for Dask.
        host: This machine's address to listen on.
        fork_server: Descriptor of the connection to this machine's fork server; -1 if it has none.
        kill_wait_s: Seconds between SIGTERM and SIGKILL; 0.0 to shut down on SIGTERM immediately.
        on_serving: Called after each connection to a scheduler.
    """
    options = WorkerOptions(
        name=arguments.name,
        device=arguments.device,
        supervisor=arguments.supervisor,
        scheduler=scheduler,
        num_lives=num_lives,
        host=host,
        tls=tls,
        scratch=scratch,
        fork_server=fork_server,
        kill_wait_s=kill_wait_s,
    )
    run_process(lambda: WorkerLifecycle(options, finder, on_serving=on_serving), scratch=scratch)
