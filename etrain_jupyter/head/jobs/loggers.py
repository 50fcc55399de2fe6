"""Start the processes that pass a job's log on to TensorBoard and to its loggers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log.loggers.process import follow_elsewhere as start_logger
from etrain_jupyter.log.tensorboard import follow_elsewhere


def start_loggers(spec: JobSpec, warn: Callable[[str], None]) -> None:
    """Start one process for each logger; ``warn`` gets the failures, on the event loop."""
    loop = asyncio.get_running_loop()

    def warner(before: str, after: str = "") -> Callable[[str], None]:
        def warn_later(why: str) -> None:  # called in the thread that waits for the process
            loop.call_soon_threadsafe(warn, f"{before}: {why}{after}")

        return warn_later

    if spec.tensorboard is not None:
        warn_of_files = warner("TensorBoard files are not written")
        follow_elsewhere(spec.log_path, spec.tensorboard, warn_of_files)
    for name, options in spec.loggers.items():
        after = (
            " Training continues. If they are missing afterwards: "
            f"%etrain track {spec.job_id} --to {name}"
        )
        warn_of_values = warner(f"Values are not logged to {name}", after)
        start_logger(name, options, spec.log_path, warn_of_values)
