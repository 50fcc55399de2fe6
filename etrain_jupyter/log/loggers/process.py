"""Run a logger next to the coordinator: ``python -m etrain_jupyter.log.loggers.process``.

A library may block, start threads or fail, so each logger has a process of its own. The process
reads the log, never the coordinator's memory. If it is killed, the next one continues from what
the destination has stored.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.log.loggers.base import is_final
from etrain_jupyter.log.loggers.feed import LogFeed, follow_log, writer_lock
from etrain_jupyter.log.loggers.registry import make_logger
from etrain_jupyter.untrusted import plain_line

RETRY_S = 5.0
"""Pause after the first failure, in seconds; doubled after each further failure."""
MAX_RETRY_S = 300.0
"""Maximum pause between two attempts, in seconds."""
TRIES_AFTER_END = 3
"""Failures after the end of the job before the process gives up."""
GAVE_UP = 3
"""Exit code of a process that has reported why it gave up."""
WARNING = "etrain-logger: "
"""Prefix of the output lines that belong in the job's log; others come from the libraries."""


def follow_elsewhere(
    name: str,
    options: Mapping[str, Any],
    log_path: Path,
    on_warning: Callable[[str], None],
    *,
    retry_s: float = RETRY_S,
) -> threading.Thread:
    """Follow a log in another process, which exits when the job ends or when this process exits.

    Args:
        name: Name of the logger.
        options: Its options, from ``Logger.options``.
        log_path: The log.
        on_warning: Called with each failure, from the returned thread ``etrain-<name>-<job>``.
        retry_s: See ``RETRY_S``.
    """

    def run() -> None:
        command = [sys.executable, "-m", __name__, name, str(log_path)]
        command += [str(os.getpid()), str(retry_s)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as exc:
            on_warning(str(exc))
            return
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            last = ""
            try:
                process.stdin.write(json.dumps(dict(options)))
                process.stdin.close()
            except OSError:
                pass  # it has exited; its output has the reason
            for line in process.stdout:
                if line.startswith(WARNING):
                    on_warning(line.removeprefix(WARNING).strip())
                else:
                    last = line.strip() or last
        if process.returncode not in (0, GAVE_UP):
            on_warning(last or f"its process exited with code {process.returncode}")

    thread_name = f"etrain-{name}-{log_path.parent.name}"
    thread = threading.Thread(target=run, name=thread_name, daemon=True)
    thread.start()
    return thread


def follow_with_retries(
    make_feed: Callable[[], LogFeed],
    is_wanted: Callable[[], bool],
    warn: Callable[[str], None],
    *,
    retry_s: float = RETRY_S,
    tries_after_end: int = TRIES_AFTER_END,
    follow: Callable[[LogFeed, Callable[[], bool]], None] = follow_log,
) -> bool:
    """Follow a log until the job ends; after a failure, continue with another feed.

    Args:
        make_feed: Creates a feed with a new logger.
        is_wanted: Returns False once the feed should end before the job.
        warn: Called with each failure; a repeated failure is reported once.
        retry_s: See ``RETRY_S``.
        tries_after_end: See ``TRIES_AFTER_END``.
        follow: Follows one feed.

    Returns:
        False if the destination failed until the end.
    """
    num_after_end, pause_s = 0, retry_s
    reported = ""
    while True:
        try:
            feed = make_feed()
        except ConfigError as exc:  # for example, the library is not installed on this machine
            warn(plain_line(str(exc), 500))
            return False
        try:
            follow(feed, is_wanted)
            return True
        except EtrainError as exc:
            text = plain_line(str(exc), 500)
        # A logger of another package may raise any exception.
        except Exception as exc:
            text = plain_line(f"{type(exc).__name__}: {exc}", 500)
        feed.discard()
        if text != reported:
            warn(text)
            reported = text
        num_after_end += is_final(feed.status)
        if num_after_end >= tries_after_end or not is_wanted():
            return False
        _pause(pause_s, is_wanted)
        pause_s = min(2 * pause_s, MAX_RETRY_S)


def _pause(seconds: float, is_wanted: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + seconds
    while is_wanted() and (left := ends_at - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))


def follow_alone(name: str, log_path: Path, feed: LogFeed, is_wanted: Callable[[], bool]) -> None:
    """Follow a log while no other process writes it to the same logger.

    The lock is free between two attempts, so that ``%etrain track`` can be used then.
    """
    with writer_lock(log_path, name, is_wanted) as is_locked:
        if not is_locked:
            return
        try:
            follow_log(feed, is_wanted)
        except BaseException:
            feed.discard()
            raise


def main() -> None:
    """Follow the log given on the command line while the given parent process is alive."""
    os.nice(10)
    name, path, parent, retry_s = sys.argv[1:]
    log_path = Path(path)
    options = json.loads(sys.stdin.read())

    def warn(text: str) -> None:
        print(f"{WARNING}{text}", flush=True)

    # If the coordinator dies, Linux gives this process another parent. The next coordinator starts
    # another logger.
    is_done = follow_with_retries(
        lambda: LogFeed(log_path, make_logger(name, options)),
        lambda: os.getppid() == int(parent),
        warn,
        retry_s=float(retry_s),
        follow=functools.partial(follow_alone, name, log_path),
    )
    sys.exit(0 if is_done else GAVE_UP)


if __name__ == "__main__":
    main()
