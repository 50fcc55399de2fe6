"""Rank processes of a benchmark that measures a group without a job."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any


@contextlib.contextmanager
def rank_pipes(
    serve: Callable[..., None], world_size: int, *args: Any
) -> Iterator[list[Connection]]:
    """Run ``serve(rank, world_size, *args, pipe)`` in a process per rank; yield our ends.

    At the end, each pipe delivers None, and the processes must exit.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    ranks = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        place = (rank, world_size, *args, theirs)
        process = context.Process(target=serve, args=place, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        ranks.append(process)
    yield pipes
    for pipe in pipes:
        pipe.send(None)
    for process in ranks:
        process.join(30)
