"""Cost of authentication between ranks: the time to connect, with and without it.

Rank processes form one generation after another. This process forwards what they publish, like the
coordinator of a job. ``plain`` connects with gloo alone, without authentication. ``checked`` is the
mode of every job. The modes take turns, so that changes of the machine's load affect both of them.
The benchmark reports the slowest rank of each generation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from benchmarks.common import report
from benchmarks.common.rank_pipes import rank_pipes

WAYS = ("plain", "checked")
WORLD_SIZES = (2, 4, 8)
HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--generations", type=int, help="generations per mode (default 25)")
    parser.add_argument("--world-size", type=int, action="append", help="default: 2, 4, 8")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Form generations in every mode, in turns."""
    count = options.generations or (15 if options.quick else 25)
    sizes = {
        str(size): measure_size(size, count) for size in options.world_size or list(WORLD_SIZES)
    }
    return {"benchmark": "forming", "generations": count, "sizes": sizes}


def measure_size(world_size: int, count: int) -> dict[str, Any]:
    """Return the median and p95 of each mode at one world size."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with rank_pipes(serve, world_size) as pipes:
        for number in range(-2, count):  # the first two load libraries and are discarded
            for way in WAYS:
                slowest = form_once(pipes, way)
                if number >= 0:
                    times[way].append(slowest)
    for way in WAYS:
        median = statistics.median(times[way]) * 1e3
        print(f"forming {way}, {world_size} ranks: {median:.1f} ms", flush=True)
    return {way: report.median_and_p95(times[way]) for way in WAYS}


def form_once(pipes: list[Connection], way: str) -> float:
    """Form one generation and return the time of the slowest rank."""
    for pipe in pipes:
        pipe.send(("form", way))
    times: list[float] = []
    while len(times) < len(pipes):
        for ready in wait(pipes, 60):
            pipe = cast(Connection, ready)
            message = pipe.recv()
            if isinstance(message, float):
                times.append(message)
                continue
            for other in pipes:
                if other is not pipe:
                    other.send(message)
    for pipe in pipes:
        pipe.send(("close", way))
        pipe.recv()
    return max(times)


def serve(rank: int, world_size: int, pipe: Connection) -> None:
    """Run a rank until the pipe delivers None."""
    _serve(rank, world_size, pipe)
    os._exit(0)  # like a trainer: gloo's threads may still be shutting down


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    import torch

    from etrain_jupyter.trainer.group import authentication, forming, process_group

    torch.set_num_threads(1)
    authenticate = authentication.authenticate
    sending = threading.Lock()

    def send(message: Any) -> None:
        with sending:
            pipe.send(message)

    def form(group: process_group.RankGroup) -> None:
        start = time.monotonic()
        group.connect()
        send(time.monotonic() - start)

    group: Any = None
    store: Any = None
    while (message := pipe.recv()) is not None:
        key, value = message
        if key == "form":
            forming.authenticate = (  # type: ignore[attr-defined]
                authenticate if value != "plain" else lambda *_, **__: None
            )
            store = process_group.BroadcastStore(lambda key, value: send((key, value)))
            group = process_group.RankGroup(
                generation=1,
                rank=rank,
                world_size=world_size,
                store=store,
                host=HOST,
            )
            threading.Thread(target=form, args=(group,), daemon=True).start()
        elif key == "close":
            group.close()
            send(0.0)
        else:
            store.put(key, value)


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    head = ("ranks", *(f"{way}: median, p95" for way in WAYS), "checked adds")
    rows = []
    for size, ways in result["sizes"].items():
        times = [f"{ways[w]['median_s'] * 1e3:.1f}, {ways[w]['p95_s'] * 1e3:.1f}" for w in WAYS]
        added = (ways["checked"]["median_s"] - ways["plain"]["median_s"]) * 1e3
        rows.append((size, *times, f"{added:.1f}"))
    return "Milliseconds until the slowest rank has connected.\n\n" + report.table(head, rows)
