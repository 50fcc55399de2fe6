"""Readers of ``shards``: each runs two ranks of one reader at a time, and prints their figures.

The program reads tasks as JSON lines from its standard input. For each task, it forks one process
per rank, so that the time to import a package is part of no figure.
"""

from __future__ import annotations

import functools
import importlib.machinery
import io
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

BATCH = 256
"""Samples per step, over all ranks."""
NUM_TOKENS = 512
NUM_SAMPLES = "num_samples"
"""File next to the tar files of webdataset, which have no index."""

Row = dict[str, Any]
Batches = Iterator[Any]
"""Yields dicts of tensors, whose first dimension is samples."""


# --- samples: the same decoding and the same batches for all readers ---


def decode_image(sample: Row) -> Row:
    """Return an image as a tensor of shape ``(3, H, W)``, uint8."""
    import torch
    from PIL import Image

    with Image.open(io.BytesIO(sample["data"])) as image:
        pixels = torch.from_numpy(np.array(image))
    return {"data": pixels.permute(2, 0, 1), "label": sample["label"]}


def decode_bytes(sample: Row) -> Row:
    """Return the bytes of an image as a tensor of their number: reading without decoding."""
    import torch

    return {"data": torch.tensor(len(sample["data"])), "label": sample["label"]}


def decode_text(sample: Row) -> Row:
    """Return tokens as a tensor of shape ``(L,)``, int32."""
    import torch

    return {"data": torch.from_numpy(np.array(sample["data"])), "label": sample["label"]}


DECODE = {"text": decode_text, "image": decode_image, "bytes": decode_bytes}
"""By kind of reading; ``bytes`` are the files of ``image``."""


# --- writers: rows, and the folder of one format ---


def write_ours(rows: Callable[[], Iterator[Row]], folder: Path, kind: str) -> None:
    """Write the set of ``write_shards``."""
    from etrain_jupyter.data import write_shards

    write_shards(rows(), folder, progress=False)


def write_hugging_face(rows: Callable[[], Iterator[Row]], folder: Path, kind: str) -> None:
    """Write a saved Hugging Face data set."""
    import datasets
    from datasets import Features, List, Value

    data = List(Value("int32"), length=NUM_TOKENS) if kind == "text" else Value("binary")
    features = Features({"data": data, "label": Value("int64")})
    datasets.disable_progress_bars()
    cache = folder.with_suffix(".cache")
    found = datasets.Dataset.from_generator(rows, features=features, cache_dir=str(cache))
    found.save_to_disk(str(folder))
    shutil.rmtree(cache)


def write_mds(rows: Callable[[], Iterator[Row]], folder: Path, kind: str) -> None:
    """Write the shards of mosaicml-streaming, in files of the default size."""
    data = f"ndarray:int32:{NUM_TOKENS}" if kind == "text" else "bytes"
    columns = {"data": data, "label": "int"}
    with import_streaming().MDSWriter(out=str(folder), columns=columns) as writer:
        for row in rows():
            writer.write(row)


def write_webdataset(rows: Callable[[], Iterator[Row]], folder: Path, kind: str) -> None:
    """Write the tar files of webdataset."""
    import webdataset

    folder.mkdir(parents=True)
    with webdataset.ShardWriter(str(folder / "%05d.tar"), maxsize=64 << 20, verbose=0) as writer:
        for number, row in enumerate(rows()):
            data = row["data"] if isinstance(row["data"], bytes) else row["data"].tobytes()
            label = str(row["label"]).encode()
            writer.write({"__key__": f"{number:09}", "data.bin": data, "label.bin": label})
    (folder / NUM_SAMPLES).write_text(str(number + 1))


# --- readers: the batches of one rank ---


def read_ours(
    folder: Path, kind: str, rank: int, world_size: int, start: float, num_workers: int = 0
) -> Batches:
    """Read with ``Shards``, as a rank does; loader processes only decode images."""
    from etrain_jupyter.data import Shards
    from etrain_jupyter.rules.samples.batch_plan import share_samples
    from etrain_jupyter.rules.samples.block_order import BlockOrder
    from etrain_jupyter.trainer.shard_source import ShardSource

    shards = Shards(folder, transform=decode_image if kind == "image" else None)
    source = ShardSource(shards, None, num_workers, is_sequential=False, warn=print)

    def shares(epoch: int, first: int) -> Iterator[tuple[Any, int]]:
        order = BlockOrder(shards.layout, seed=0, epoch=epoch)
        while first < len(shards):
            counts = share_samples(min(BATCH, len(shards) - first), world_size)
            begin = sum(counts[:rank])
            yield order.arrange(first, counts)[begin : begin + counts[rank]], first
            first += sum(counts)

    def epochs() -> Iterator[tuple[Any, int]]:
        yield from shares(0, round(len(shards) * start))
        for epoch in range(1, sys.maxsize):
            yield from shares(epoch, 0)

    for _, batch in source.batches(epochs()):
        yield batch


def read_hugging_face(
    folder: Path, kind: str, rank: int, world_size: int, start: float, num_workers: int = 0
) -> Batches:
    """Read with ``datasets`` and a DataLoader over a full shuffle, a whole batch at a time."""
    import datasets
    import torch
    from torch.utils.data import BatchSampler, DataLoader

    data = datasets.load_from_disk(str(folder))
    if kind == "text":
        data = data.with_format("numpy")  # twice as fast as "torch"; the loader makes tensors
    elif kind == "image":
        data.set_transform(transform_columns)
    for epoch in range(sys.maxsize):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        own = order[round(len(data) * start) :][rank::world_size].tolist()
        yield from DataLoader(
            data,
            batch_size=None,
            sampler=BatchSampler(own, BATCH // world_size, drop_last=False),
            num_workers=num_workers,
        )
        start = 0.0


def transform_columns(columns: Row) -> Row:
    """Decode a batch of images, as columns."""
    import torch

    rows = [decode_image({"data": data, "label": 0}) for data in columns["data"]]
    return {
        "data": torch.stack([row["data"] for row in rows]),
        "label": torch.tensor(columns["label"]),
    }


def read_mds(
    folder: Path, kind: str, rank: int, world_size: int, start: float, num_workers: int = 0
) -> Batches:
    """Read with mosaicml-streaming and its loader."""
    streaming = import_streaming()

    class Decoded(streaming.StreamingDataset):  # type: ignore[name-defined, misc]
        def __getitem__(self, index: int) -> Any:
            return DECODE[kind](super().__getitem__(index))

    size = BATCH // world_size
    if start:
        # A world of its own: the barrier of ranks that resume may wait forever (0.13.0).
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own = folder.with_name(f"{folder.name}-{rank}")
        if not own.exists():
            own.symlink_to(folder, target_is_directory=True)
        folder = own
    data = Decoded(local=str(folder), shuffle=True, batch_size=size)
    loader = streaming.StreamingDataLoader(data, batch_size=size, num_workers=num_workers)
    if start:
        state = data.state_dict(round(len(data) * start), from_beginning=True)
        data.load_state_dict(state)
    while True:
        yield from loader


def import_streaming() -> Any:
    """Import mosaicml-streaming, which needs torchvision only for classes that are not used."""
    if importlib.machinery.PathFinder.find_spec("torchvision") is None:
        for part in ("", ".datasets", ".transforms", ".transforms.functional"):
            name = f"torchvision{part}"
            spec = importlib.machinery.ModuleSpec(name, None)
            sys.modules.setdefault(name, MagicMock(__spec__=spec, __path__=[]))
        vars(sys.modules["torchvision.datasets"])["VisionDataset"] = type("VisionDataset", (), {})
    import streaming

    return streaming


def read_webdataset(
    folder: Path, kind: str, rank: int, world_size: int, start: float, num_workers: int = 0
) -> Batches:
    """Read with webdataset; it cannot seek, so a resume reads what it skips."""
    import webdataset

    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    skipped = round(int((folder / NUM_SAMPLES).read_text()) / world_size * start)
    while True:
        data = webdataset.WebDataset(
            urls, shardshuffle=100, nodesplitter=webdataset.split_by_node, seed=0
        )
        data = data.slice(skipped, sys.maxsize).shuffle(1000)
        data = data.map(functools.partial(decode_tar, kind=kind)).batched(
            BATCH // world_size, collation_fn=collate
        )
        yield from webdataset.WebLoader(data, batch_size=None, num_workers=num_workers)
        skipped = 0


def decode_tar(sample: Row, kind: str) -> Row:
    """Decode a sample of a tar file."""
    data = sample["data.bin"]
    if kind == "text":
        data = np.frombuffer(data, np.int32)
    return DECODE[kind]({"data": data, "label": int(sample["label.bin"])})


def collate(samples: list[Row]) -> Any:
    """Join samples with torch's ``default_collate``, like the other readers."""
    from torch.utils.data import default_collate

    return default_collate(samples)


WRITERS = {
    "ours": write_ours,
    "Hugging Face": write_hugging_face,
    "mosaicml-streaming": write_mds,
    "webdataset": write_webdataset,
}
READ = {
    "ours": read_ours,
    "Hugging Face": read_hugging_face,
    "mosaicml-streaming": read_mds,
    "webdataset": read_webdataset,
}
LOADER = ", loader process"
READERS: dict[str, Callable[..., Batches]] = READ | {
    f"{name}{LOADER}": functools.partial(read, num_workers=1) for name, read in READ.items()
}
"""All readers, in the process of the rank or with one loader process for each rank."""
NEEDS = {
    "ours": "pyarrow",
    "Hugging Face": "datasets",
    "mosaicml-streaming": "streaming",
    "webdataset": "webdataset",
}


def format_of(reader: str) -> str:
    """Return the format that a reader reads."""
    return reader.partition(",")[0]


# --- one rank ---


def measure(task: Row, rank: int) -> Row:
    """Read for some time and return the figures of this rank."""
    before = Usage.now()
    began_at = time.perf_counter()
    batches = open_batches(task, rank, 0.0)
    next(batches)
    first_batch_s = time.perf_counter() - began_at
    began_at, started = time.perf_counter(), Usage.now()
    samples = 0
    peak, looked_at, elapsed_s = 0, began_at, 0.0
    while elapsed_s < task["seconds"] and samples < task["max_samples"]:
        samples += len(next(batches)["label"])
        now = time.perf_counter()
        elapsed_s = now - began_at
        if now - looked_at > 0.5:
            looked_at = now
            peak = max(peak, memory_bytes())
    ended = Usage.now()
    return {
        "samples": samples,
        "samples_per_s": samples / elapsed_s,
        "cpu_us": 1e6 * (ended.cpu_s - started.cpu_s) / samples,
        "first_batch_s": first_batch_s,
        "peak_mb": (max(peak, memory_bytes()) - before.memory) / 1e6,
        "bytes_read": ended.bytes_read - before.bytes_read,
    }


def resume(task: Row, rank: int) -> Row:
    """Return the seconds until the first batch of a resume at 90 % of an epoch."""
    batches = open_batches(task, rank, 0.9)
    began_at = time.perf_counter()
    next(batches)
    return {"resume_s": time.perf_counter() - began_at}


def open_batches(task: Row, rank: int, start: float) -> Batches:
    """Return the batches of a rank; nothing is opened before the first one."""
    reader = READERS[task["reader"]]
    return reader(Path(task["folder"]), task["kind"], rank, task["world_size"], start)


class Usage:
    """Resources of this process and its children."""

    def __init__(self, cpu_s: float, memory: int, bytes_read: int) -> None:
        self.cpu_s = cpu_s
        self.memory = memory
        self.bytes_read = bytes_read

    @classmethod
    def now(cls) -> Usage:
        """Return the use up to now; that of children which have ended counts as processor time."""
        import psutil

        ended = os.times()
        tree = _processes()
        running = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in tree)
        read = sum(_field(f"/proc/{pid}/io", "read_bytes") for pid in tree)
        return cls(running + ended.children_user + ended.children_system, memory_bytes(), read)


def memory_bytes() -> int:
    """Return the memory of this process and its children, without files that they map."""
    fields = ("Pss_Anon", "Pss_Shmem")
    return sum(
        _field(f"/proc/{pid}/smaps_rollup", name) << 10 for pid in _processes() for name in fields
    )


def _processes() -> list[int]:
    import psutil

    own = psutil.Process()
    return [own.pid, *(child.pid for child in own.children(recursive=True))]


def _field(path: str, name: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


# --- the process from which ranks are forked ---


def prepare(names: list[str]) -> None:
    """Import everything that the readers need."""
    import torch
    from PIL import Image  # noqa: F401

    torch.set_num_threads(1)
    if "ours" in names:
        import etrain_jupyter.trainer.shard_source  # noqa: F401
    if "Hugging Face" in names:
        import datasets  # noqa: F401
    if "mosaicml-streaming" in names:
        import_streaming()
    if "webdataset" in names:
        import webdataset  # noqa: F401


def run_rank(task: Row, rank: int, output: int, ends: int) -> None:
    """Run a task in this forked process, write its figures, and wait for the other ranks."""
    # As torchrun sets them; mosaicml-streaming and webdataset read them.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(task["world_size"])}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(task["world_size"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task["port"])}
    try:
        found = {"measure": measure, "resume": resume}[task["do"]](task, rank)
    except BaseException:
        traceback.print_exc()
        found = {"error": traceback.format_exc(limit=-1)}
    os.write(output, json.dumps(found).encode() + b"\n")
    os.read(ends, 1)  # loader processes of mosaicml-streaming wait for those of other ranks


def run_ranks(task: Row) -> list[Row]:
    """Run all ranks of a task and return their figures."""
    if format_of(task["reader"]) == "mosaicml-streaming":
        for path in Path("/dev/shm").glob("[0-9]" * 6 + "_*"):  # of ranks that were ended
            path.unlink()
    children = []
    ends, end = os.pipe()
    for rank in range(task["world_size"]):
        read, written = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.close(read)
            os.close(end)
            run_rank(task, rank, written, ends)
            end_children()
            os._exit(0)  # does not wait for threads of a reader that was left in mid-epoch
        os.close(written)
        children.append((pid, read))
    found = []
    for _, read in children:
        with os.fdopen(read) as file:
            found.append(json.loads(file.readline() or '{"error": "the process ended"}'))
    os.close(end)
    os.close(ends)
    for pid, _ in children:
        os.waitpid(pid, 0)
    return found


def end_children() -> None:
    """End the loader processes of this rank."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=10)


if __name__ == "__main__":
    prepare(sys.argv[1:])
    for line in sys.stdin:
        print(json.dumps(run_ranks(json.loads(line))), flush=True)
