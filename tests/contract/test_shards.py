"""Every format of a data set in shards, in a folder and in a bucket, gives the same samples."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etrain_jupyter.data import Shards, write_shards
from etrain_jupyter.errors import ShardError
from etrain_jupyter.rules.samples.block_order import BlockOrder
from etrain_jupyter.testing.s3_faults import Kind, S3Fault
from etrain_jupyter.testing.s3_server import S3Server

NUM_ROWS = 500


def make_table() -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(NUM_ROWS), pa.int64()),
            "tokens": pa.array([[i, i + 1, i + 2] for i in range(NUM_ROWS)], pa.list_(pa.int64())),
            "text": [f"row {i}" for i in range(NUM_ROWS)],
        }
    )


def write_own(folder: Path) -> None:
    write_shards(make_table(), folder, shuffle=False, block_bytes=2000, progress=False)


def write_parquet(folder: Path) -> None:
    for number in range(2):
        half = make_table().slice(number * 250, 250)
        pq.write_table(half, folder / f"part-{number}.parquet", row_group_size=60)


def write_ipc_files(folder: Path) -> None:
    for number in range(2):
        half = make_table().slice(number * 250, 250)
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(folder / f"{number}.arrow", half.schema, options=options) as file:
            file.write_table(half, max_chunksize=50)


def write_json_lines(folder: Path) -> None:
    rows = make_table().to_pylist()
    for number in range(2):
        lines = [json.dumps(row) for row in rows[number * 250 : number * 250 + 250]]
        lines.insert(3, "")  # blank lines are not rows
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n" * number)


def write_hugging_face(folder: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets: not installed")
    datasets.Dataset(make_table()).save_to_disk(str(folder), num_shards=2)


FORMATS: dict[str, Callable[[Path], None]] = {
    "etrain": write_own,
    "parquet": write_parquet,
    "arrow": write_ipc_files,
    "json": write_json_lines,
    "hugging face": write_hugging_face,
}


class Home(Protocol):
    """Where a test's set is stored."""

    url: str

    def store(self, folder: Path) -> None: ...
    def names(self) -> list[str]: ...
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...


class FolderHome:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def store(self, folder: Path) -> None:
        folder.rename(self.folder)

    def names(self) -> list[str]:
        return sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*"))

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()


class BucketHome:
    def __init__(self, server: S3Server, bucket: str) -> None:
        self.server, self.bucket = server, bucket
        self.url = f"s3://{bucket}/sets/mine"

    def store(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self.write(path.relative_to(folder).as_posix(), path.read_bytes())

    def names(self) -> list[str]:
        keys = self.server.list_keys(self.bucket, "sets/mine/")
        return [key.removeprefix("sets/mine/") for key in keys]

    def read(self, name: str) -> bytes:
        return self.server.read(self.bucket, f"sets/mine/{name}")

    def write(self, name: str, data: bytes) -> None:
        self.server.write(self.bucket, f"sets/mine/{name}", data)

    def remove(self, name: str) -> None:
        self.server.remove(self.bucket, f"sets/mine/{name}")


_buckets = itertools.count()


@pytest.fixture(params=["folder", "bucket"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    if request.param == "folder":
        yield FolderHome(tmp_path / "set")
        return
    server: S3Server = request.getfixturevalue("s3_server")
    bucket = f"shards-{next(_buckets)}"
    server.make_bucket(bucket)
    yield BucketHome(server, bucket)


@pytest.fixture(params=FORMATS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stored(home: Home, kind: str, tmp_path: Path) -> Home:
    folder = tmp_path / "made"
    folder.mkdir()
    FORMATS[kind](folder)
    home.store(folder)
    return home


def open_set(home: Home, tmp_path: Path, **options: object) -> Shards:
    return Shards(home.url, cache_dir=tmp_path / "cache", **options)  # type: ignore[arg-type]


def data_file(home: Home) -> str:
    suffixes = (".arrow", ".parquet", ".jsonl")
    return next(name for name in home.names() if name.endswith(suffixes))


# ------------------------------------------------------------------------------------------- reads


def test_all_samples_are_read_in_the_order_of_the_files(stored: Home, tmp_path: Path) -> None:
    shards = open_set(stored, tmp_path)

    samples = list(shards)

    assert len(shards) == NUM_ROWS
    assert [sample["id"] for sample in samples] == list(range(NUM_ROWS))
    assert samples[7]["tokens"].tolist() == [7, 8, 9]
    assert samples[-1]["text"] == "row 499"


def test_rows_are_read_by_number_in_any_order(stored: Home, tmp_path: Path) -> None:
    shards = open_set(stored, tmp_path)
    numbers = np.random.default_rng(0).permutation(NUM_ROWS)[:200]
    reader = shards.open(num_kept=1)

    taken = reader.take(numbers)

    assert taken["id"].tolist() == numbers.tolist()
    assert taken["text"] == [f"row {n}" for n in numbers]
    assert shards[int(numbers[3])]["id"] == numbers[3]
    reader.close()


def test_epoch_in_batches_has_each_sample_once_and_reads_each_block_once(
    stored: Home, tmp_path: Path
) -> None:
    shards = open_set(stored, tmp_path, window=3)
    order = BlockOrder(shards.layout, seed=1, epoch=0)
    reader = shards.open()

    found = []
    for first in range(0, NUM_ROWS, 32):
        samples = order.samples(first, min(first + 32, NUM_ROWS))
        reader.prefetch(samples)
        found += reader.take(samples)["id"].tolist()

    assert sorted(found) == list(range(NUM_ROWS))
    assert reader.num_bytes_read == sum(block.size for block in shards.index.blocks)
    reader.close()


def test_columns_can_be_chosen(stored: Home, tmp_path: Path) -> None:
    shards = open_set(stored, tmp_path, columns=["text", "id"])

    assert shards[5] == {"text": "row 5", "id": 5}
    with pytest.raises(ShardError, match=r"has no column 'tex'\. Its columns are 'id', 'tokens'"):
        open_set(stored, tmp_path, columns=["tex"])[0]


def test_description_travels_with_its_index(stored: Home, tmp_path: Path) -> None:
    shards = open_set(stored, tmp_path)

    travelled = pickle.loads(data := pickle.dumps(shards))

    assert len(data) < 8000
    assert travelled.layout == shards.layout
    assert travelled.digest == shards.digest
    assert travelled[3]["id"] == 3


def test_copy_in_another_place_has_the_same_digest(stored: Home, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    for name in stored.names():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(stored.read(name))

    assert Shards(folder).digest == open_set(stored, tmp_path).digest


# --------------------------------------------------------------------------------------- bad input


def test_missing_shard_is_an_error_that_names_it(stored: Home, kind: str, tmp_path: Path) -> None:
    known = open_set(stored, tmp_path)
    len(known)
    name = data_file(stored)
    stored.remove(name)

    with pytest.raises(ShardError, match=rf"{name} is missing .*Nothing was skipped"):
        list(known)
    if kind in ("etrain", "hugging face"):  # other folders do not list their files
        with pytest.raises(ShardError, match="missing"):
            len(open_set(stored, tmp_path))


def test_truncated_shard_is_an_error(stored: Home, tmp_path: Path) -> None:
    name = data_file(stored)
    stored.write(name, stored.read(name)[:-30])

    with pytest.raises(ShardError, match=rf"{name}.*(truncated|complete|bytes instead of)"):
        len(open_set(stored, tmp_path))


def test_shard_that_is_replaced_during_a_run_is_an_error(
    stored: Home, kind: str, tmp_path: Path
) -> None:
    reader = open_set(stored, tmp_path, cache_bytes=0).open()
    name = data_file(stored)
    reader.read_block(0)
    data = bytearray(stored.read(name))
    data[len(data) // 2] ^= 1

    stored.write(name, bytes(data))

    with pytest.raises(ShardError, match=rf"{name}.*(is not the one that was indexed)"):
        reader.read_block(0)


def other_content(kind: str, data: bytes) -> bytes:
    """Return a shard of the same form with other rows, in the same number of bytes."""
    if kind == "json":
        return data.replace(b'"row 1"', b'"raw 1"')
    source = pa.BufferReader(data)
    if kind == "parquet":
        table = pq.read_table(source)
    elif data[:6] == b"ARROW1":
        table = pa.ipc.open_file(source).read_all()
    else:
        table = pa.ipc.open_stream(source).read_all()
    ids = pa.array([value ^ 1 for value in table.column("id").to_pylist()], pa.int64())
    table = table.set_column(0, table.schema.field("id"), ids)
    sink = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(table, sink, row_group_size=60)
    elif data[:6] == b"ARROW1":
        options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "etrain" else "lz4")
        with pa.ipc.new_file(sink, table.schema, options=options) as file:
            file.write_table(table)
    else:
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    return sink.getvalue().to_pybytes()[: len(data)].ljust(len(data), b"\0")


def test_shard_that_is_replaced_before_its_first_read_is_an_error(
    stored: Home, kind: str, tmp_path: Path
) -> None:
    # As it travels: the worker does not index the files itself.
    travelled = pickle.loads(pickle.dumps(open_set(stored, tmp_path, cache_bytes=0)))
    name = data_file(stored)
    data = stored.read(name)

    stored.write(name, other_content(kind, data))

    assert len(stored.read(name)) == len(data)
    with pytest.raises(ShardError, match=rf"{name} .*(not the one that was indexed|no footer)"):
        travelled[1]


@pytest.mark.parametrize("home", ["folder"], indirect=True)
def test_longer_shard_is_an_error_that_names_both_sizes(
    stored: Home, kind: str, tmp_path: Path
) -> None:
    shards = open_set(stored, tmp_path)
    len(shards)
    name = data_file(stored)
    size = len(stored.read(name))
    stored.write(name, stored.read(name) + b"more")

    if kind in ("etrain", "json"):  # every block has a digest, and more bytes are never read
        assert shards[1]["id"] == 1
        return
    expected = rf"{name} .* has {size + 4} bytes instead of {size}.*%etrain resume JOB"
    with pytest.raises(ShardError, match=expected):
        shards[1]


@pytest.mark.parametrize("home", ["folder"], indirect=True)
def test_copy_with_other_times_is_read(stored: Home, tmp_path: Path) -> None:
    travelled = pickle.loads(pickle.dumps(open_set(stored, tmp_path)))

    for name in stored.names():
        os.utime(Path(stored.url) / name, (1, 1))

    assert [sample["id"] for sample in travelled] == list(range(NUM_ROWS))


# The manifest has one schema for all files, and the types of JSON lines are unified.
@pytest.mark.parametrize("kind", ["parquet", "arrow", "hugging face"])
def test_changed_schema_between_shards_is_an_error(stored: Home, kind: str, tmp_path: Path) -> None:
    names = [n for n in stored.names() if n.endswith((".arrow", ".parquet"))]
    other = pa.table({"id": ["a"], "tokens": [[1]], "text": ["b"]})
    sink = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(other, sink)
    else:
        with pa.ipc.new_stream(sink, other.schema) as stream:
            stream.write_table(other)
    stored.write(names[1], sink.getvalue().to_pybytes())

    expected = rf"schema of {names[1]}.*column 'id' is string instead of int64"
    with pytest.raises(ShardError, match=expected):
        len(open_set(stored, tmp_path))


def test_set_without_rows_is_an_error(home: Home, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    if kind == "etrain":
        with pytest.raises(ShardError, match="the source has no rows"):
            write_shards([], folder / "set", progress=False)
        return
    empty = make_table().slice(0, 0)
    if kind == "parquet":
        pq.write_table(empty, folder / "a.parquet")
    elif kind == "json":
        (folder / "a.jsonl").write_text("\n\n")
    else:
        with pa.ipc.new_file(folder / "a.arrow", empty.schema):
            pass
    home.store(folder)

    with pytest.raises(ShardError, match="has no rows"):
        len(open_set(home, tmp_path))


def test_place_without_shards_is_an_error(home: Home, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "notes.txt").write_text("none")
    home.store(tmp_path / "made")

    with pytest.raises(ShardError, match=r"has no shards \(1 files\)"):
        len(open_set(home, tmp_path))


# ------------------------------------------------------------------------------------------ writes


@pytest.mark.parametrize("workers", [None, 2])
def test_set_that_is_written_is_read_again(home: Home, tmp_path: Path, workers: int | None) -> None:
    options = {"block_bytes": 2000, "spill_dir": tmp_path, "progress": False}
    one = write_shards(make_table(), tmp_path / "one", **options)

    written = write_shards(make_table(), home.url, workers=workers, **options)

    assert sorted(sample["id"] for sample in open_set(home, tmp_path)) == list(range(NUM_ROWS))
    assert written.digest == one.digest
    assert len(written.index.blocks) > 8
    assert not [name for name in home.names() if "writing" in name or "partial" in name]


def test_unfinished_write_is_refused_and_then_completed(home: Home, tmp_path: Path) -> None:
    table = make_table()

    def rows(fail_at: int) -> Iterator[dict[str, object]]:
        for number, row in enumerate(table.to_pylist()):
            if number == fail_at:
                raise KeyboardInterrupt
            yield row

    options = {"block_bytes": 2000, "spill_dir": tmp_path, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        write_shards(rows(fail_at=400), home.url, **options)
    with pytest.raises(ShardError, match="write has not finished"):
        len(open_set(home, tmp_path))

    write_shards(rows(fail_at=-1), home.url, **options)

    assert sorted(sample["id"] for sample in open_set(home, tmp_path)) == list(range(NUM_ROWS))


def test_complete_set_is_not_overwritten(home: Home, tmp_path: Path) -> None:
    write_shards([{"x": 1}], home.url, progress=False)

    with pytest.raises(ShardError, match="already has a complete set"):
        write_shards([{"x": 2}], home.url, progress=False)

    again = write_shards([{"x": 2}], home.url, exist_ok=True, progress=False)
    assert again[0] == {"x": 1}


# ------------------------------------------------------------------------------------- bucket only


def bucket_of(server: S3Server, tmp_path: Path) -> BucketHome:
    bucket = f"shards-{next(_buckets)}"
    server.make_bucket(bucket)
    home = BucketHome(server, bucket)
    (tmp_path / "made").mkdir()
    write_own(tmp_path / "made")
    home.store(tmp_path / "made")
    return home


def test_faults_of_the_bucket_are_retried(s3_server: S3Server, tmp_path: Path) -> None:
    home = bucket_of(s3_server, tmp_path)
    s3_server.set_faults(
        S3Fault(kind="truncate", every=4, match="GET"),
        S3Fault(kind="slow_down", every=5, match="GET"),
        S3Fault(kind="spoil_answer", every=3, match="part-"),
    )

    samples = list(open_set(home, tmp_path))

    assert [sample["id"] for sample in samples] == list(range(NUM_ROWS))
    assert s3_server.counts().get("spoil_answer", 0) > 0


@pytest.mark.parametrize("kind", ["slow_down", "internal_error", "reset"])
def test_long_outage_of_the_bucket_only_delays(
    s3_server: S3Server, tmp_path: Path, no_pauses: None, kind: Kind
) -> None:
    """boto3 gives up after four attempts, but an error here would end the job."""
    home = bucket_of(s3_server, tmp_path)
    for where in ("?list-type", "shards.json", "part-"):
        s3_server.set_faults(S3Fault(kind=kind, match=where, count=12))
        assert len(list(open_set(home, tmp_path))) == NUM_ROWS


def test_bucket_that_stays_unavailable_is_named(
    s3_server: S3Server, tmp_path: Path, no_pauses: None
) -> None:
    home = bucket_of(s3_server, tmp_path)
    s3_server.set_faults(S3Fault(kind="slow_down", match="GET"))

    with pytest.raises(ShardError, match=r"S3 limits the request rate \(SlowDown\), also in 6 att"):
        len(open_set(home, tmp_path))


def test_second_reader_on_the_machine_reads_from_the_disk(
    s3_server: S3Server, tmp_path: Path
) -> None:
    home = bucket_of(s3_server, tmp_path)
    list(open_set(home, tmp_path))
    shards = pickle.loads(pickle.dumps(open_set(home, tmp_path)))
    s3_server.set_faults()  # resets the counters

    samples = list(shards)

    assert len(samples) == NUM_ROWS
    assert "GetObject" not in s3_server.counts(), s3_server.counts()


def test_cache_that_cannot_be_used_is_bypassed_with_a_warning(
    s3_server: S3Server, tmp_path: Path
) -> None:
    home = bucket_of(s3_server, tmp_path)
    (tmp_path / "file").write_text("in the way")
    warnings: list[str] = []

    reader = Shards(home.url, cache_dir=tmp_path / "file").open(warn=warnings.append)

    assert reader.take(np.array([3, 499]))["id"].tolist() == [3, 499]
    assert len(warnings) == 1
    assert "are read from their source" in warnings[0]
    reader.close()


def test_bucket_without_permission_is_an_error(s3_server: S3Server, tmp_path: Path) -> None:
    home = bucket_of(s3_server, tmp_path)
    shards = open_set(home, tmp_path)
    len(shards)
    s3_server.set_faults(S3Fault(kind="deny"))

    with pytest.raises(ShardError, match=r"part-00000\.arrow cannot be read in s3://.*denied"):
        shards[0]
    with pytest.raises(ShardError, match=r"cannot be listed.*denied"):
        len(open_set(home, tmp_path))


def test_missing_bucket_is_an_error(s3_server: S3Server, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"s3://no-such-bucket-here"):
        len(Shards("s3://no-such-bucket-here/set", cache_dir=tmp_path))
