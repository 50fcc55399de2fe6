"""The digest of a data set in shards depends on its samples, not on how or where it is read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etrain_jupyter.bundle.capture import capture_bundle
from etrain_jupyter.bundle.code_table import compare_code
from etrain_jupyter.bundle.restore import open_bundle
from etrain_jupyter.data import Shards, write_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    columns = {"id": np.arange(400), "x": np.arange(400) % 7}
    write_shards(columns, tmp_path / "set", block_bytes=800, progress=False)
    return tmp_path / "set"


def changes(one: Shards, other: Shards) -> list[str]:
    old, new = (
        open_bundle(capture_bundle({"data.train": "corpus"}, {"corpus": data}).header)
        for data in (one, other)
    )
    return [c.kind for c in compare_code(old.code, new.code, (old.cells, new.cells))]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"cache_bytes": 1 << 20}, []),
        ({"cache_dir": "elsewhere"}, []),
        ({"num_threads": 1}, []),
        ({"window_bytes": 1 << 30}, []),
        ({"window": 2}, ["data"]),
        ({"window_bytes": 1}, ["data"]),
        ({"columns": ["id"]}, ["data"]),
        ({"transform": len}, ["data"]),
    ],
    ids=str,
)
def test_settings_change_the_data_only_if_they_change_order_or_samples(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    expected: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    assert changes(Shards(folder), Shards(folder, **settings)) == expected


def test_copy_in_another_folder_is_no_change_of_the_data(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")

    assert changes(Shards(folder), Shards(tmp_path / "copy")) == []


def test_other_rows_are_a_change_of_the_data(folder: Path, tmp_path: Path) -> None:
    columns = {"id": np.arange(400), "x": np.arange(400) % 5}
    other = write_shards(columns, tmp_path / "other", block_bytes=800, progress=False)

    assert changes(Shards(folder), other) == ["data"]
