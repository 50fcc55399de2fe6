"""The worker of a SLURM job: ``python -m etrain_jupyter.plugins.slurm.machine.job_worker``.

The job script replaces its shell with this process, which therefore gets SLURM's signals:

=========  ===================================  ==================================================
signal     sent by SLURM                        reaction
=========  ===================================  ==================================================
SIGUSR1    ``notice`` before the time limit;    interruption notice: the training job continues
           before a preemption, if SLURM is     without this worker from the next step boundary
           configured to send it then
SIGTERM    ``kill_wait`` before SIGKILL: time   the same; the worker shuts down once it has no
           limit, preemption, scancel           trainers
=========  ===================================  ==================================================

SLURM sends SIGTERM to the trainers, too, which therefore ignore it.

dask-jobqueue writes the command line, so the options of ``dask worker`` are accepted, too.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

from etrain_jupyter.plugins.slurm.site import Site
from etrain_jupyter.process.entry import log_to_stderr
from etrain_jupyter.untrusted import make_private
from etrain_jupyter.worker.lifecycle import RecordFinder, make_parser, run_worker

logger = logging.getLogger("etrain.slurm")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of the job script."""
    parser = make_parser("etrain-slurm-worker")
    parser.add_argument("scheduler", help="address when the job was submitted; not used")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--away-s", type=float, required=True)
    parser.add_argument("--kill-wait-s", type=float, required=True)
    parser.add_argument("--interface", default="")
    parser.add_argument("--local-directory", type=Path)
    # These describe the tasks that a Dask worker runs; this one runs none.
    for name in ("nthreads", "memory-limit", "death-timeout"):
        parser.add_argument(f"--{name}")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the worker until it exits."""
    arguments = parse_arguments()
    log_to_stderr()
    site = Site(arguments.folder)
    # A job that waited longer than its cluster ran has nothing to do.
    finder = RecordFinder(site.record, away_s=arguments.away_s)
    first = finder.look()
    if first is None:
        logger.warning("the cluster of %s has ended", site.path)
        return
    # A requeued job would use its worker's name a second time. The pool submits a new job instead.
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        logger.warning("SLURM has restarted this job: it ends, and the pool submits a new one")
        return
    _limit_threads(arguments.device)
    scratch = (arguments.local_directory or site.scratch) / f"{site.path.name}-{arguments.name}"
    try:
        make_private(scratch)
    except OSError as exc:
        logger.error(
            "the scratch folder %s cannot be used: %s. The worker exits. Remove this folder, or "
            "write another local_directory: PATH in pools.yaml",
            scratch,
            exc.strerror,
        )
        raise SystemExit(1) from None
    os.environ["ETRAIN_SIGTERM"] = "ignore"  # read by the trainers
    _hold_stdin_open()
    run_worker(
        arguments,
        finder,
        scheduler=first.address,
        num_lives=first.num_lives,
        host=own_address(first.address, arguments.interface),
        tls=site.tls,
        scratch=scratch,
        kill_wait_s=arguments.kill_wait_s,
    )


def own_address(scheduler: str, interface: str) -> str:
    """Return this machine's address on an interface, or else on the route to the scheduler."""
    if interface:
        from distributed import utils

        untyped: Any = utils
        return str(untyped.get_ip_interface(interface))
    host, _, port = scheduler.rpartition("://")[2].rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket selects the local address and sends nothing.
        probe.connect((host.strip("[]"), int(port)))
        return str(probe.getsockname()[0])


def _limit_threads(device: str) -> None:
    """Use the job's cores, and no GPU that was not requested."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK")
    if cores is not None:
        os.environ.setdefault("OMP_NUM_THREADS", cores)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _hold_stdin_open() -> None:
    """Replace standard input with a pipe that this process keeps open.

    A worker and its trainers exit at the end of their standard input, and that of a SLURM job is
    empty. With this pipe, the trainers exit when the worker does.
    """
    read_fd, _ = os.pipe()
    os.dup2(read_fd, sys.stdin.fileno())
    os.close(read_fd)


if __name__ == "__main__":
    main()
