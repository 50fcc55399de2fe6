"""Corrupt and hostile data sets: each is a ShardError, never memory of the process or a crash."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etrain_jupyter.data import Shards
from etrain_jupyter.data.formats.own import MANIFEST, manifest_of
from etrain_jupyter.data.index import ShardFile, ShardIndex
from etrain_jupyter.errors import ShardError

LISTS = pa.table({"x": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64()))})
OFFSETS = struct.pack("<4i", 0, 2, 4, 6)


def write_arrow(folder: Path, table: pa.Table, old: bytes = b"", new: bytes = b"") -> Path:
    """Write an Arrow file of which one part is replaced, and return its folder."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    data = sink.getvalue().to_pybytes()
    assert old in data
    folder.mkdir()
    (folder / "a.arrow").write_bytes(data.replace(old, new, 1))
    return folder


def read_all(folder: Path) -> list[object]:
    return list(Shards(folder, cache_dir=folder.parent / "cache"))


def test_offsets_beyond_the_values_are_an_error(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path / "set", LISTS, OFFSETS, struct.pack("<4i", 0, 500, 750, 1000))

    with pytest.raises(ShardError, match=r"a.arrow.*cannot be decoded.*offset"):
        read_all(folder)


def test_offsets_beyond_the_values_of_a_later_batch_are_an_error(tmp_path: Path) -> None:
    # The first batch is decoded to index the file, the others only when they are read.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, LISTS.schema) as file:
        file.write_table(pa.table({"x": pa.array([[7, 8]], pa.list_(pa.int64()))}))
        file.write_table(LISTS)
    data = sink.getvalue().to_pybytes()
    (tmp_path / "a.arrow").write_bytes(data.replace(OFFSETS, struct.pack("<4i", 0, 5, 7, 10**3)))

    shards = Shards(tmp_path)
    with pytest.raises(ShardError, match=r"a.arrow.*cannot be decoded.*offset"):
        list(shards)
    with pytest.raises(ShardError, match=r"a.arrow.*cannot be decoded.*offset"):
        shards[2]


def test_offsets_of_a_set_with_valid_digests_are_an_error(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path / "set", LISTS)
    data = (folder / "a.arrow").read_bytes()
    bad = data.replace(OFFSETS, struct.pack("<4i", 0, 500, 750, 1000))
    index = Shards(folder).index
    (folder / "a.arrow").write_bytes(bad)
    [block] = index.blocks
    digest = hashlib.sha256(bad[block.first : block.first + block.size]).hexdigest()
    own = ShardIndex(
        format="etrain",
        schema=index.schema,
        files=(ShardFile("a.arrow", len(bad), ""),),
        blocks=(block._replace(sha256=digest),),
    )
    (folder / MANIFEST).write_bytes(manifest_of(own, {}))

    with pytest.raises(ShardError, match=r"a.arrow.*cannot be decoded.*offset"):
        read_all(folder)


def test_more_rows_than_values_are_an_error(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(7, dtype=np.int64) + 100})
    seven, many = struct.pack("<q", 7), struct.pack("<q", 100_000)
    folder = write_arrow(tmp_path / "set", table)
    data = bytearray((folder / "a.arrow").read_bytes())
    for at in range(0, len(data) - 7, 8):
        if data[at : at + 8] == seven:
            data[at : at + 8] = many
    (folder / "a.arrow").write_bytes(data)

    with pytest.raises(ShardError, match=r"a.arrow.*cannot be decoded"):
        read_all(folder)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_text_that_is_not_utf8_is_an_error(tmp_path: Path, kind: str) -> None:
    bad = pa.array([b"ab", b"\xff\xfe"]).cast(pa.binary()).view(pa.string())
    table = pa.table({"s": bad})
    if kind == "arrow":
        write_arrow(tmp_path / "set", table)
    else:
        (tmp_path / "set").mkdir()
        pq.write_table(table, tmp_path / "set" / "a.parquet")

    with pytest.raises(ShardError, match=r"cannot be decoded.*UTF8"):
        read_all(tmp_path / "set")


def write_manifest(folder: Path, block: list[Any], **changes: Any) -> None:
    """Write a set whose manifest has one block and some changes."""
    content = {
        "format": "etrain-shards",
        "version": 1,
        "sample": "dict",
        "schema": base64.b64encode(LISTS.schema.serialize().to_pybytes()).decode(),
        "files": [{"name": "part-00000.arrow", "size": 1000, "blocks": [block]}],
        **changes,
    }
    folder.mkdir()
    (folder / "part-00000.arrow").write_bytes(bytes(1000))
    (folder / MANIFEST).write_text(json.dumps(content))


@pytest.mark.parametrize(
    "block",
    [
        pytest.param([0, 1000, "5", 5, "00"], id="rows a text"),
        pytest.param([0, 1000, 2.5, 5, "00"], id="rows a float"),
        pytest.param([0, 1000, True, 5, "00"], id="rows a truth value"),
        pytest.param([0, 1000, -5, 5, "00"], id="rows negative"),
        pytest.param([0, 1000, 10**15, 5, "00"], id="more rows than bits"),
        pytest.param([0, 1000, 5, "z", "00"], id="bytes in memory a text"),
        pytest.param([0, 1000, 5, -1, "00"], id="bytes in memory negative"),
        pytest.param([-100, 50, 5, 5, "00"], id="begins before the file"),
        pytest.param([0, 2**60, 5, 5, "00"], id="ends after the file"),
        pytest.param([0, 1000, 5, 5, 7], id="digest a number"),
        pytest.param([0, 1, 2], id="too short"),
    ],
)
def test_block_of_a_manifest_that_cannot_be_is_refused(tmp_path: Path, block: list[Any]) -> None:
    write_manifest(tmp_path / "set", block)

    with pytest.raises(ShardError, match=r"shards.json in .* is not a valid manifest"):
        read_all(tmp_path / "set")


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "AAAA"},
        {"sample": {"a": 1}},
        {"files": "abc"},
        {"files": [7]},
        {"files": [{"name": ["a"], "size": 1000, "blocks": []}]},
        {"format": ["etrain-shards"]},
    ],
)
def test_manifest_with_wrong_types_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_manifest(tmp_path / "set", [0, 1000, 5, 5, "00"], **changes)

    with pytest.raises(ShardError, match=r"shards.json in .* is not a valid manifest"):
        read_all(tmp_path / "set")


@pytest.mark.parametrize("name", [MANIFEST, "state.json", "a.jsonl"])
def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / name).write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}\n")

    with pytest.raises(ShardError, match=name):
        read_all(tmp_path)
