"""Data larger than memory: our shards against Hugging Face, mosaicml-streaming and webdataset.

Two ranks read the same rows in every format, one reader after another, in several rounds. Rows
are 512 tokens with a skewed distribution, or small JPEGs, which all readers decode by the same
function.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.storage.shard_readers import (
    BATCH,
    LOADER,
    NEEDS,
    NUM_TOKENS,
    READERS,
    WRITERS,
    Row,
    format_of,
)
from etrain_jupyter.data import Shards
from etrain_jupyter.rules.samples.batch_plan import share_samples
from etrain_jupyter.rules.samples.block_order import BlockLayout, BlockOrder

WORLD_SIZE = 2
BAR_AMPLIFICATION = 1.3
"""Bytes read per byte used at 8 ranks with the default window."""
BAR_RESUME_S = 1.0
FIGURES = ("samples_per_s", "cpu_us", "first_batch_s", "peak_mb")
CORPUS_OF = {"text": "text", "bytes": "image", "image": "image"}
"""The corpus that each kind of reading uses; ``bytes`` reads images without decoding them."""
IMAGE_SIZE = 96
POOL_ROWS = {"text": 1 << 15, "image": 1 << 14}
"""Number of different rows, far more than a block has: their repetition is not compressed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--gb", type=float, help="size of both corpora (default 4; quick: 0.4)")
    parser.add_argument("--rounds", type=int, help="rounds (default 2; quick: 1)")
    parser.add_argument("--seconds", type=float, help="reading time (default 15; quick: 3)")
    parser.add_argument("--folder", type=Path, help="folder for the corpora; kept if given")
    parser.add_argument("--kind", action="append", choices=CORPUS_OF, help="default: all")
    parser.add_argument("--reader", action="append", choices=READERS, help="default: all")
    parser.add_argument("--no-cold", action="store_true", help="skip runs without page cache")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write both corpora in every format, and read them in turn."""
    num_bytes = int(1e9 * (options.gb or (0.4 if options.quick else 4.4)) / 2)
    rounds = options.rounds or (1 if options.quick else 2)
    seconds = options.seconds or (3 if options.quick else 15)
    kinds = options.kind or list(CORPUS_OF)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="etrain-shards-bench-"))
    missing = {
        name: f"{module} is not installed" for name, module in NEEDS.items() if lacks(module)
    }
    names = [name for name in options.reader or READERS if format_of(name) not in missing]
    formats = {format_of(name): None for name in names}
    load = [os.getloadavg()[0]]
    ranks = Ranks(formats)
    try:
        pools = {corpus: pool_of(corpus) for corpus in {CORPUS_OF[kind] for kind in kinds}}
        made = {
            (corpus, name): write(name, corpus, num_bytes, folder, pool)
            for corpus, pool in pools.items()
            for name in formats
        }
        small = {
            corpus: write("ours", corpus, num_bytes // 4, folder / "quarter", pool)
            for corpus, pool in pools.items()
            if "ours" in formats
        }
        corpora: dict[str, dict[str, Row]] = {}
        for kind in kinds:
            corpus = CORPUS_OF[kind]
            read_by = [name for name in names if is_useful(name, kind)]
            runs: dict[str, list[Row]] = {name: [] for name in read_by}
            resumes: dict[str, list[float]] = {name: [] for name in read_by}
            for _ in range(rounds):
                for name in read_by:
                    task = task_of(name, kind, folder, seconds)
                    runs[name].append(ranks.run({**task, "do": "measure"}))
                    # Without the start of a process. webdataset cannot seek: to resume, it would
                    # read 90 % of the epoch.
                    if kind != "bytes" and LOADER not in name and name != "webdataset":
                        resumes[name].append(ranks.run({**task, "do": "resume"})["resume_s"])
                load.append(os.getloadavg()[0])
            corpora[kind] = {
                name: {
                    **summary(runs[name]),
                    **made[corpus, format_of(name)],
                    "resume_s": statistics.median(resumes[name]) if resumes[name] else None,
                    "runs": [run["samples_per_s"] for run in runs[name]],
                }
                for name in read_by
            }
            if "ours" in names:
                task = task_of("ours", kind, folder / "quarter", seconds)
                found = ranks.run({**task, "do": "measure"})
                corpora[kind]["ours"]["quarter_peak_mb"] = found["peak_mb"]
                corpora[kind]["ours"]["blocks"] = len(
                    Shards(folder_of(folder, corpus, "ours")).layout.rows
                )
            # Decoding does not change what is read.
            for name in formats if kind != "image" and not options.no_cold else ():
                corpora[kind][name] |= cold(
                    name, kind, folder, ranks, made[corpus, format_of(name)]
                )
    finally:
        ranks.close()
        if options.folder is None:
            shutil.rmtree(folder)
    return {
        "benchmark": "shards",
        "gb": 2 * num_bytes / 1e9,
        "world_size": WORLD_SIZE,
        "missing": missing,
        "load": load,
        "corpora": corpora,
        "quarter": small,
        "amplification": {str(size): amplification(size) for size in (1, 2, 4, 8)},
        "bar_amplification": BAR_AMPLIFICATION,
        "bar_resume_s": BAR_RESUME_S,
    }


def is_useful(name: str, kind: str) -> bool:
    """Return False for a loader process that would have no work: ours only decodes."""
    return kind == "image" or name != f"ours{LOADER}"


def lacks(module: str) -> bool:
    """Return True if a module is not installed."""
    return importlib.util.find_spec(module) is None


def folder_of(folder: Path, corpus: str, name: str) -> Path:
    """Return the folder of a corpus in the format of a reader."""
    return folder / corpus / format_of(name).lower().replace(" ", "-")


# --- corpora ---


def pool_of(corpus: str) -> list[Any]:
    """Return the different data of a corpus; the same ones in every run."""
    from PIL import Image

    rng = np.random.default_rng(0)
    size = POOL_ROWS[corpus]
    if corpus == "text":
        tokens = np.minimum(rng.zipf(1.3, (size, NUM_TOKENS)), 50_000)
        return list(tokens.astype(np.int32))
    found = []
    for _ in range(size):
        # Smooth shapes with noise: about 6 KB, like a photo of this size.
        small = rng.integers(0, 256, (8, 8, 3), np.uint8)
        smooth = np.array(Image.fromarray(small).resize((IMAGE_SIZE, IMAGE_SIZE)))
        noisy = smooth + rng.normal(0, 16, smooth.shape)
        data = io.BytesIO()
        image = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
        image.save(data, "JPEG", quality=90)
        found.append(data.getvalue())
    return found


def rows_of(pool: list[Any], num_bytes: int) -> Iterator[Row]:
    """Yield the rows of a corpus; the same ones in every call."""
    number = 0
    while num_bytes > 0:
        data = pool[number % len(pool)]
        yield {"data": data, "label": number % 1000}
        num_bytes -= len(data) if isinstance(data, bytes) else data.nbytes
        number += 1


def write(name: str, corpus: str, num_bytes: int, folder: Path, pool: list[Any]) -> Row:
    """Write a corpus in one format, unless it exists; return its size and the time."""
    target = folder_of(folder, corpus, name)
    began_at = time.perf_counter()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[name](functools.partial(rows_of, pool, num_bytes), target, corpus)
        os.sync()
    return {
        "write_s": time.perf_counter() - began_at,
        "size": sum(path.stat().st_size for path in target.rglob("*") if path.is_file()),
        "num_samples": sum(1 for _ in rows_of(pool, num_bytes)),
    }


# --- readers ---


class Ranks:
    """The process that runs the ranks of one reader at a time."""

    def __init__(self, names: dict[str, None]) -> None:
        self._names = names
        self._process = self._start()
        self._num_tasks = 0

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.storage.shard_readers", *self._names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Loader processes that are killed leave messages about semaphores. Errors are figures.
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def run(self, task: Row) -> Row:
        """Run a task on all ranks; return the sum or the worst of their figures.

        Raises:
            RuntimeError: If a rank failed, or hung twice.
        """
        for _ in range(2):
            if found := self._run(task):
                return found
            # Seen with mosaicml-streaming, whose processes wait for each other.
            print(f"{task['reader']}: no result after {MAX_SECONDS} s, repeated", flush=True)
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = self._start()
        raise RuntimeError(f"{task['reader']} did not finish within {MAX_SECONDS} s")

    def _run(self, task: Row) -> Row | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._num_tasks += 1
        # Each task has its own port, because the previous one may linger in TIME_WAIT.
        port = 20_000 + (os.getpid() * 64 + self._num_tasks) % 10_000
        self._process.stdin.write(json.dumps({**task, "port": port}) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], MAX_SECONDS)[0]:
            return None
        found = json.loads(self._process.stdout.readline() or "[]")
        errors = [f["error"] for f in found if "error" in f]
        if errors or not found:
            raise RuntimeError(f"{task['reader']} failed: {(errors or ['its process ended'])[0]}")
        total = {"samples", "samples_per_s", "bytes_read"}
        worst = {key: max(f[key] for f in found) for key in found[0]}
        return {key: sum(f[key] for f in found) if key in total else worst[key] for key in worst}

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def task_of(name: str, kind: str, folder: Path, seconds: float) -> Row:
    """Return what ``shard_readers`` must know to read a corpus."""
    path = folder_of(folder, CORPUS_OF[kind], name)
    return {
        "reader": name,
        "kind": kind,
        "folder": str(path),
        "world_size": WORLD_SIZE,
        "seconds": seconds,
        "max_samples": sys.maxsize,
    }


MAX_SECONDS = 90
"""Time limit of one task."""
COLD_SECONDS = 12
"""Maximum time of a run without page cache."""


def cold(name: str, kind: str, folder: Path, ranks: Ranks, made: Row) -> Row:
    """Read an epoch of files that are not in the page cache; count the bytes from the disk."""
    task = task_of(name, kind, folder, COLD_SECONDS)
    for path in Path(task["folder"]).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    # Without the last batches: nothing of the next epoch is read.
    limit = made["num_samples"] // WORLD_SIZE - 8 * BATCH
    found = ranks.run({**task, "do": "measure", "max_samples": limit})
    used = made["size"] * found["samples"] / made["num_samples"]
    return {
        "cold_samples_per_s": found["samples_per_s"],
        "cold_share": found["samples"] / made["num_samples"],
        "bytes_per_byte": found["bytes_read"] / used,
    }


def summary(runs: list[Row]) -> Row:
    """Return the median of each figure."""
    return {key: statistics.median(run[key] for run in runs) for key in FIGURES}


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
    rows = []
    for kind, readers in result["corpora"].items():
        best = max(
            (f["samples_per_s"] for n, f in readers.items() if format_of(n) != "ours"), default=None
        )
        for name, found in readers.items():
            rows.append(
                (
                    kind,
                    name,
                    f"{found['size'] / 1e6:,.0f}",
                    f"{found['samples_per_s'] / 1e3:,.1f}k",
                    f"{found['samples_per_s'] / best:.2f}" if best else "-",
                    f"{found['cpu_us']:,.1f}",
                    f"{found['first_batch_s']:.2f}",
                    "-" if found["resume_s"] is None else f"{found['resume_s']:.2f}",
                    f"{found['peak_mb']:,.0f}",
                    *(
                        (
                            f"{found['cold_samples_per_s'] / 1e3:,.1f}k",
                            f"{found['bytes_per_byte']:.2f}",
                        )
                        if "bytes_per_byte" in found
                        else ("-", "-")
                    ),
                )
            )
    head = (
        *("data", "reader", "size, MB", "samples/s", "of the best peer", "CPU, us per sample"),
        *("first batch, s", "resume at 90 %, s", "peak, MB", "cold samples/s"),
        "bytes read per byte used",
    )
    read_by = ", ".join(f"{size} ranks {found}" for size, found in result["amplification"].items())
    lines = [report.table(head, rows), "", f"blocks read per block, window of 64: {read_by}"]
    lines += [
        f"ours, {kind}: {readers['ours']['blocks']} blocks, peak {readers['ours']['peak_mb']:,.0f} "
        f"MB; {readers['ours']['quarter_peak_mb']:,.0f} MB with a quarter of the corpus"
        for kind, readers in result["corpora"].items()
        if "ours" in readers
    ]
    lines += [f"skipped: {name}: {reason}" for name, reason in result["missing"].items()]
    return "\n".join([*lines, f"load: {min(result['load']):.1f} to {max(result['load']):.1f}"])
