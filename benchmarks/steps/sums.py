"""Cost of summing a tensor over the ranks: recursive doubling next to gloo's all-reduce.

Rank processes on this machine sum tensors of several sizes, with both methods in turns. Between two
sums they sleep, as ranks compute between two sums, so that each wait really waits. The benchmark
reports the processor time of all ranks per sum, and the time until the slowest rank has the sum.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import report
from benchmarks.common.rank_pipes import rank_pipes

WORLD_SIZES = (2, 3, 4, 8)
SIZES = (160, 200_000, 1_000_000, 4_000_000)
"""Sizes of the tensors in bytes: a step header of a few ranks, and gradients."""
METHODS = ("gloo", "doubling")
PAUSE_S = 0.002
"""Time between two sums, in seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--sums", type=int, help="sums per round (default 100; quick: 30)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each method (default 5)")
    parser.add_argument("--world-size", type=int, action="append", help="default: 2, 3, 4, 8")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every world size and tensor size."""
    count = options.sums or (30 if options.quick else 100)
    sizes = options.world_size or list(WORLD_SIZES)
    return {
        "benchmark": "sums",
        "sums": count,
        "rounds": options.rounds,
        "world_sizes": {str(size): _measure_ranks(size, options.rounds, count) for size in sizes},
    }


def _measure_ranks(world_size: int, rounds: int, count: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="etrain-sums-") as folder,
        rank_pipes(serve, world_size, os.path.join(folder, "store")) as pipes,
    ):
        return {str(size): _measure_size(pipes, size, rounds, count) for size in SIZES}


def _measure_size(pipes: list[Connection], size: int, rounds: int, count: int) -> dict[str, Any]:
    times: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for number in range(-1, rounds):  # the first round loads code and is discarded
        for method in METHODS:
            for pipe in pipes:
                pipe.send((method, size, count))
            results = [pipe.recv() for pipe in pipes]
            if number >= 0:
                cpu_s, wall_s = (list(column) for column in zip(*results, strict=True))
                times[method].append((sum(cpu_s) / count, max(wall_s)))
    medians = {
        method: {
            "cpu_ms": 1e3 * statistics.median(cpu_s for cpu_s, _ in found),
            "wall_ms": 1e3 * statistics.median(wall_s for _, wall_s in found),
        }
        for method, found in times.items()
    }
    return {**medians, "ratio": medians["doubling"]["cpu_ms"] / medians["gloo"]["cpu_ms"]}


class _Peers:
    """Messages through gloo, like those of ``RankGroup``."""

    def __init__(self, gloo: Any, rank: int, world_size: int) -> None:
        self._gloo, self.rank, self.world_size = gloo, rank, world_size

    def isend(self, tensor: Any, dst: int, tag: int) -> Any:
        return self._gloo.send([tensor], dst, tag)

    def irecv(self, tensor: Any, src: int, tag: int) -> Any:
        return self._gloo.recv([tensor], src, tag)

    def raise_if_failed(self) -> None:
        """Do nothing: this group is never aborted."""


def serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    """Run a rank until the pipe delivers None."""
    import torch
    import torch.distributed as dist

    from etrain_jupyter.trainer.group.small_sum import sum_small

    torch.set_num_threads(1)
    # torch's annotations lack parts of this.
    torch_dist: Any = dist
    gloo = torch_dist.ProcessGroupGloo(
        torch_dist.FileStore(store, world_size), rank, world_size, timedelta(seconds=60)
    )
    peers = _Peers(gloo, rank, world_size)
    while (message := pipe.recv()) is not None:
        method, size, count = message
        tensor = torch.zeros(size // 4)
        waits_s = []
        began_s = time.process_time()
        for _ in range(count):
            time.sleep(PAUSE_S)
            start_s = time.perf_counter()
            if method == "gloo":
                gloo.allreduce([tensor]).wait()
            else:
                sum_small(peers, tensor)
            waits_s.append(time.perf_counter() - start_s)
        pipe.send((time.process_time() - began_s, statistics.median(waits_s)))
    os._exit(0)  # gloo's threads may still be shutting down


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    head = ("ranks", "bytes", "processor time: gloo", "doubling", "ratio", "time: gloo", "doubling")
    rows = []
    for world_size, sizes in result["world_sizes"].items():
        for size, found in sizes.items():
            gloo, doubling = found["gloo"], found["doubling"]
            cells = (f"{gloo['cpu_ms']:.2f}", f"{doubling['cpu_ms']:.2f}", f"{found['ratio']:.2f}")
            times = (f"{gloo['wall_ms']:.2f}", f"{doubling['wall_ms']:.2f}")
            rows.append((world_size, f"{int(size):,}", *cells, *times))
    return (
        "Milliseconds per sum: processor time of all ranks, and time until the slowest rank has "
        f"the sum.\n\n{report.table(head, rows)}"
    )
