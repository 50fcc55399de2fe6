"""``Shards`` as an object of the notebook."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etrain_jupyter.data import Shards, write_shards
from etrain_jupyter.errors import ShardError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards({"id": np.arange(10)}, tmp_path / "set", shuffle=False, progress=False)
    return tmp_path / "set"


def test_it_is_a_sequence_of_samples(folder: Path) -> None:
    shards = Shards(folder)

    assert repr(shards) == f"Shards({str(folder)!r})"
    assert (len(shards), shards[2]["id"], shards[-1]["id"]) == (10, 2, 9)
    assert [sample["id"] for sample in shards] == list(range(10))
    assert repr(shards).endswith("10 samples in 1 blocks and 1 files")
    with pytest.raises(IndexError, match="sample 10 of 10"):
        shards[10]


def test_transform_is_applied_to_each_sample(folder: Path) -> None:
    shards = Shards(folder, transform=lambda sample: sample["id"] * 2)

    assert shards[3] == 6


def test_relative_path_is_that_of_the_notebook(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    shards = Shards("set")
    monkeypatch.chdir("/")

    assert shards.path == str(folder)
    assert len(shards) == 10


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("set", {"window": 0}, "window=0 is less than 1"),
        ("set", {"columns": "id"}, r"Write columns=\['id'\]"),
        ("gs://bucket/set", {}, "shards cannot be read from gs://"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    path: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ShardError, match=message):
        Shards(path, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "does not exist on this machine. If only the workers have it"),
        ("s3://UPPER/set", "names the bucket 'UPPER'"),
    ],
)
def test_wrong_places_are_refused_when_they_are_used(path: str, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        len(Shards(path))


def test_dataset_dict_names_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets: not installed")
    rows = datasets.Dataset(pa.table({"x": [1]}))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))

    with pytest.raises(ShardError, match=r"Name one of its splits: .*/both/test, .*/both/train"):
        len(Shards(tmp_path / "both"))
    assert len(Shards(tmp_path / "both" / "train")) == 1


def test_two_formats_in_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}')
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")

    with pytest.raises(ShardError, match="has JSON lines and Parquet files"):
        len(Shards(tmp_path))
    assert len(Shards(tmp_path / "a.jsonl")) == 1


def test_json_lines_with_new_keys_name_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etrain_jupyter.data.formats.json_lines.BLOCK_BYTES", 20)
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n' * 5 + '{"x": 3, "y": 1}\n')

    with pytest.raises(ShardError, match=r"cannot be decoded.*columns=\[\.\.\.\]"):
        list(Shards(tmp_path))
    assert [sample["x"] for sample in Shards(tmp_path, columns=["x"])][-1] == 3


def test_without_pyarrow_the_remedy_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("etrain_jupyter.data.")]:
        if name.split(".")[-1] not in ("shards", "writing", "places", "index", "disk_cache"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("columns", "opening", "reader"):
        monkeypatch.delattr(f"etrain_jupyter.data.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

    with pytest.raises(ShardError, match=r"pip install \"etrain-jupyter\[data\]\""):
        len(Shards(folder))
