"""Data larger than memory: our shards against Hugging Face, mosaicml-streaming and webdataset.

Two ranks read the same rows in every format, one format after another, in several rounds. Rows are
512 tokens with a skewed distribution, or 6 to 14 KB of incompressible bytes like a small JPEG. The
rows are not decoded, so the figures are those of reading and shuffling.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.shard_readers import BATCH, NEEDS, WRITERS, Row
from etrain_jupyter.data import Shards
from etrain_jupyter.rules.samples.batch_plan import share_samples
from etrain_jupyter.rules.samples.block_order import BlockLayout, BlockOrder

WORLD_SIZE = 2
BAR_AMPLIFICATION = 1.3
"""Bytes read per byte used at 8 ranks with the default window."""
FIGURES = ("samples_per_s", "cpu_s", "first_batch_s", "resume_s", "peak_mb")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--gb", type=float, help="size of each corpus (default 4; quick: 0.04)")
    parser.add_argument("--rounds", type=int, help="rounds (default 3; quick: 1)")
    parser.add_argument("--seconds", type=float, help="reading time (default 20; quick: 3)")
    parser.add_argument("--folder", type=Path, help="folder for the corpora; kept if given")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write both corpora in every format, and read them in turn."""
    num_bytes = int(1e9 * (options.gb or (0.04 if options.quick else 4)))
    rounds = options.rounds or (1 if options.quick else 3)
    seconds = options.seconds or (3 if options.quick else 20)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="etrain-shards-bench-"))
    missing = {
        name: f"{module} is not installed" for name, module in NEEDS.items() if lacks(module)
    }
    names = [name for name in WRITERS if name not in missing]
    corpora = {}
    try:
        for kind in ("text", "image"):
            made = {name: write(name, kind, num_bytes, folder) for name in names}
            runs: dict[str, list[Row]] = {name: [] for name in names}
            for _ in range(rounds):
                for name in names:
                    runs[name].append(read(name, folder / kind / slug(name), seconds))
            corpora[kind] = {
                name: summary(runs[name]) | made[name] | used(name, runs[name], made[name])
                for name in names
            }
            if "ours" in names:
                corpora[kind]["ours"]["blocks"] = len(Shards(folder / kind / "ours").layout.rows)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    return {
        "benchmark": "shards",
        "gb": num_bytes / 1e9,
        "world_size": WORLD_SIZE,
        "missing": missing,
        "corpora": corpora,
        "amplification": {str(size): amplification(size) for size in (1, 2, 4, 8)},
        "bar_amplification": BAR_AMPLIFICATION,
    }


def lacks(module: str) -> bool:
    """Return True if a module is not installed."""
    return importlib.util.find_spec(module) is None


def slug(name: str) -> str:
    """Return the name of a reader's folder."""
    return name.lower().replace(" ", "-")


# --- corpora ---


def rows_of(kind: str, num_bytes: int) -> Iterator[Row]:
    """Yield the rows of a corpus; the same ones in every call."""
    rng = np.random.default_rng(0)
    while num_bytes > 0:
        if kind == "text":
            data: Any = np.minimum(rng.zipf(1.3, 512), 50_000).astype(np.int32)
            num_bytes -= data.nbytes
        else:
            data = rng.bytes(int(rng.integers(6_000, 14_000)))
            num_bytes -= len(data)
        yield {"data": data, "label": int(rng.integers(10))}


def write(name: str, kind: str, num_bytes: int, folder: Path) -> Row:
    """Write a corpus in one format, unless it exists; return its size and the time."""
    target = folder / kind / slug(name)
    began_at = time.perf_counter()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[name](functools.partial(rows_of, kind, num_bytes), target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return {
        "write_s": time.perf_counter() - began_at,
        "size": size,
        "num_samples": sum(1 for _ in rows_of(kind, num_bytes)),
    }


# --- readers ---


def read(name: str, folder: Path, seconds: float) -> Row:
    """Read with one process per rank; return the sum or the worst of their figures."""
    module = "benchmarks.shard_readers"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, name, folder, str(rank), str(WORLD_SIZE), str(seconds)],
            stdout=subprocess.PIPE,
        )
        for rank in range(WORLD_SIZE)
    ]
    found = []
    for rank in ranks:
        output, _ = rank.communicate()
        if rank.returncode:
            raise RuntimeError(f"{name} failed with exit code {rank.returncode}")
        found.append(json.loads(output.splitlines()[-1]))
    return {
        **{key: sum(f[key] for f in found) for key in ("samples", "bytes_read")},
        "samples_per_s": sum(f["samples_per_s"] for f in found),
        "cpu_s": 1e6 * sum(f["cpu_s"] for f in found) / sum(f["samples"] for f in found),
        **{key: max(f[key] for f in found) for key in ("first_batch_s", "resume_s", "peak_mb")},
    }


def summary(runs: list[Row]) -> Row:
    """Return the median of each figure."""
    return {key: statistics.median(run[key] for run in runs) for key in FIGURES}


def used(name: str, runs: list[Row], made: Row) -> Row:
    """Return the bytes read per byte of the files that hold the samples that were used."""
    if name == "Hugging Face":
        return {"bytes_per_byte": None}  # mapped files are read without system calls
    share = [run["samples"] / made["num_samples"] for run in runs]
    return {
        "bytes_per_byte": statistics.median(
            run["bytes_read"] / (made["size"] * part) for run, part in zip(runs, share, strict=True)
        )
    }


def amplification(world_size: int, num_blocks: int = 128, rows: int = 2048) -> float:
    """Return the blocks that all ranks read in an epoch, per block of the set.

    >>> amplification(1)
    1.0
    """
    # The last block is smaller, as in real sets: equal blocks may happen to fit the batch exactly.
    layout = BlockLayout((*(rows,) * (num_blocks - 1), rows // 3), 64)
    order = BlockOrder(layout, seed=0, epoch=0)
    known: list[set[int]] = [set() for _ in range(world_size)]
    for first in range(0, layout.num_samples, BATCH):
        counts = share_samples(min(BATCH, layout.num_samples - first), world_size)
        samples, end = order.arrange(first, counts), 0
        for rank, count in enumerate(counts):
            known[rank].update(layout.blocks_of(samples[end : end + count]).tolist())
            end += count
    return round(sum(map(len, known)) / num_blocks, 2)


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as Markdown tables."""
    rows = [
        (
            kind,
            name,
            f"{found['size'] / 1e6:,.0f}",
            f"{found['samples_per_s'] / 1e3:,.1f}k",
            f"{found['cpu_s']:,.1f}",
            f"{found['first_batch_s']:.2f}",
            f"{found['resume_s']:.2f}",
            f"{found['peak_mb']:,.0f}",
            f"{found['bytes_per_byte']:.2f}" if found["bytes_per_byte"] else "-",
        )
        for kind, readers in result["corpora"].items()
        for name, found in readers.items()
    ]
    head = (
        *("data", "reader", "size, MB", "samples/s", "CPU, us per sample", "first batch, s"),
        *("resume at 90 %, s", "peak, MB", "bytes read per byte used"),
    )
    read_by = ", ".join(f"{size} ranks {found}" for size, found in result["amplification"].items())
    lines = [report.table(head, rows), "", f"blocks read per block, window of 64: {read_by}"]
    lines += [f"skipped: {name}: {reason}" for name, reason in result["missing"].items()]
    return "\n".join(lines)
