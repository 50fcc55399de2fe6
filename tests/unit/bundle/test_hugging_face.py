"""Hugging Face data sets are sent by value, also if they are backed by files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.bundle import pickler
from etrain_jupyter.bundle.capture import Bundle, capture_bundle
from etrain_jupyter.bundle.pickler import digest_of_value
from etrain_jupyter.bundle.restore import open_bundle
from etrain_jupyter.errors import BundleError

datasets = pytest.importorskip("datasets", reason="libraries: datasets is not installed")

NUM_ROWS = 40_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = datasets.Dataset.from_dict(
        {"x": list(range(NUM_ROWS)), "text": [f"row {i}" for i in range(NUM_ROWS)]}
    )
    data.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def sent(data: Any) -> tuple[Bundle, Any]:
    bundle = capture_bundle({"data.train": "ds"}, {"ds": data})
    return bundle, open_bundle(bundle.data).evaluate("data.train")


def test_file_backed_data_set_needs_no_file_on_the_worker(folder: Path) -> None:
    data = datasets.load_from_disk(folder)
    assert data.cache_files
    bundle = capture_bundle({"data.train": "ds"}, {"ds": data}).data
    shutil.rmtree(folder)

    opened = open_bundle(bundle).evaluate("data.train")

    assert opened.cache_files == []
    assert opened[NUM_ROWS - 1] == {"x": NUM_ROWS - 1, "text": f"row {NUM_ROWS - 1}"}
    assert opened.features == data.features


def test_format_travels_with_the_data_set(folder: Path) -> None:
    data = datasets.load_from_disk(folder)

    _, as_torch = sent(data.with_format("torch", columns=["x"]))
    _, transformed = sent(data.with_transform(lambda batch: {"y": [-x for x in batch["x"]]}))

    assert as_torch[[3]]["x"].tolist() == [3]
    assert as_torch.format["columns"] == ["x"]
    assert transformed[3] == {"y": -3}


@pytest.mark.parametrize(
    "select",
    [
        pytest.param(lambda data: data.select(range(5, 15)), id="slice"),
        pytest.param(lambda data: data.shuffle(seed=1).select(range(10)), id="shuffled"),
        pytest.param(lambda data: data.filter(lambda row: row["x"] < 10), id="filtered"),
    ],
)
@pytest.mark.parametrize("is_file_backed", [True, False])
def test_only_the_selected_rows_are_sent(folder: Path, select: Any, is_file_backed: bool) -> None:
    data = select(datasets.load_from_disk(folder, keep_in_memory=not is_file_backed))

    bundle, opened = sent(data)

    assert opened[:] == data[:]
    assert bundle.sizes["ds"] < 10_000


def test_digest_depends_on_the_rows_and_not_on_the_files(folder: Path, tmp_path: Path) -> None:
    first = datasets.load_from_disk(folder)
    shutil.copytree(folder, tmp_path / "copy")
    copy = datasets.load_from_disk(tmp_path / "copy")
    rebuilt = datasets.Dataset.from_dict(first[:])

    assert digest_of_value(first) == digest_of_value(copy) == digest_of_value(rebuilt)
    assert digest_of_value(first) != digest_of_value(first.select(range(1, NUM_ROWS)))


def test_data_set_that_is_too_large_is_refused_before_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickler, "MAX_BYTES", 500_000)
    data = datasets.load_from_disk(folder)

    with pytest.raises(BundleError) as caught:
        capture_bundle({"data.train": "make(train)"}, {"make": list, "train": {"ds": data}})

    text = str(caught.value)
    assert "'train['ds']' is a Hugging Face Dataset of 1 MB, of which at most 0 MB can be" in text
    assert "load_from_disk" in text
    assert "write_shards(dataset, to=...)" in text
    assert sent(data.select(range(100)))[1][:] == data[:100]
