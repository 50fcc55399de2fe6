"""Start the processes that pass a job's log on to its loggers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log.loggers.process import follow_elsewhere


def start_loggers(spec: JobSpec, warn: Callable[[str], None]) -> None:
    """Start one process for each logger; ``warn`` gets the failures, on the event loop."""
    loop = asyncio.get_running_loop()

    def warner(name: str) -> Callable[[str], None]:
        def warn_later(why: str) -> None:  # called in the thread that waits for the process
            text = (
                f"Values are not logged to {name}: {why} Training continues. If they are missing "
                f"afterwards: %etrain track {spec.job_id} --to {name}"
            )
            loop.call_soon_threadsafe(warn, text)

        return warn_later

    for name, options in spec.loggers.items():
        follow_elsewhere(name, options, spec.log_path, warner(name))
