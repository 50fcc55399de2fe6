"""Batches of data frames, Hugging Face data sets and subsets, gathered by column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset, random_split

from etrain_jupyter.trainer.data import Share, open_samples
from etrain_jupyter.trainer.references import DataError

pd = pytest.importorskip("pandas", reason="libraries: pandas is not installed")

COLUMNS: dict[str, list[Any]] = {
    "age": [30, 41, 52, 63],
    "score": [0.5, 1.5, 2.5, 3.5],
    "is_new": [True, False, True, False],
    "tokens": [[1, 2], [3, 4], [5, 6], [7, 8]],
    "ragged": [[1], [2, 3], [], [4]],
    "text": ["a", "b", None, "d"],
}


def batches(data: Any, *shares: list[int], **options: Any) -> list[Any]:
    options = {"name": "data.train", "collate": None, "num_workers": 0, **options}
    source = open_samples(data, **options)
    try:
        found = list(source.batches([Share(share, seed=7) for share in shares]))
        assert [list(rows) for rows, _ in found] == [list(share) for share in shares]
        return [batch for _, batch in found]
    finally:
        source.close()


def polars_frame() -> Any:
    return pytest.importorskip("polars", reason="platform: polars is not installed").DataFrame(
        COLUMNS
    )


# ------------------------------------------------------------------------------------- data frames


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: pd.DataFrame(COLUMNS), id="pandas"),
        pytest.param(lambda: pa.table(COLUMNS), id="Arrow table"),
        pytest.param(polars_frame, id="Polars"),
    ],
)
def test_batch_of_a_frame_has_its_columns(make: Any) -> None:
    [batch] = batches(make(), [3, 0])

    assert batch["age"].dtype == torch.int64
    assert batch["age"].tolist() == [63, 30]
    assert batch["score"].tolist() == [3.5, 0.5]
    assert batch["is_new"].tolist() == [False, True]
    assert batch["tokens"].tolist() == [[7, 8], [1, 2]]
    assert [row.tolist() for row in batch["ragged"]] == [[4], [1]]
    assert batch["text"] == ["d", "a"]
    batch["age"].add_(1)  # memory of its own


def test_missing_text_is_none() -> None:
    [batch] = batches(pd.DataFrame(COLUMNS), [2])

    assert batch["text"] == [None]


def test_categories_are_decoded_and_the_index_is_left_out() -> None:
    frame = pd.DataFrame({"color": pd.Categorical(["red", "blue", "red"])}, index=[7, 8, 9])

    assert batches(frame, [1, 2]) == [{"color": ["blue", "red"]}]


@settings(max_examples=30)
@given(
    values=st.lists(st.tuples(st.integers(-5, 5), st.floats(width=32, allow_nan=False))).filter(
        bool
    ),
    data=st.data(),
)
def test_frame_gives_the_rows_that_are_asked_for(values: list[Any], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1))
    frame = pd.DataFrame(values, columns=["a", "b"])

    [batch] = batches(frame, rows)

    assert batch["a"].tolist() == [values[row][0] for row in rows]
    assert batch["b"].tolist() == [values[row][1] for row in rows]


def test_collate_gets_the_rows_of_a_frame_as_dicts() -> None:
    def collate(samples: list[dict[str, Any]]) -> Any:
        return [(sample["age"] + sample["tokens"].sum(), sample["text"]) for sample in samples]

    assert batches(pd.DataFrame(COLUMNS), [1, 0], collate=collate) == [[(48, "b"), (33, "a")]]


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (
            pd.DataFrame({"x": [1, 2, 3], "age": [1.0, None, None]}),
            "data.train: column 'age' has 2 missing of 3 values.*fillna",
        ),
        (
            pa.table({"tokens": [[1, 2], [None, 3]]}),
            "data.train: column 'tokens' has 1 missing of 2 values.*fill_null",
        ),
        (
            pa.table({"group": pa.array([4, None, 4]).dictionary_encode()}),
            "column 'group' has 1 missing of 3 values",
        ),
        (
            pd.DataFrame({"mixed": [1, "a"]}),
            "data.train: a DataFrame has a column that cannot be read: .*'?mixed.*one type",
        ),
        (pd.DataFrame({"x": []}), r"data.train is empty \(0 samples\)"),
    ],
)
def test_frame_that_cannot_be_used_is_refused(frame: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        batches(frame, [0])


# ------------------------------------------------------------------------------ Hugging Face


@pytest.fixture(scope="module")
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="libraries: datasets is not installed")


def hugging_face(datasets: Any, **columns: Any) -> Any:
    return datasets.Dataset.from_dict({k: COLUMNS[k] for k in ("age", "score", "tokens", "text")})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batch_of_a_hugging_face_data_set_has_its_columns(datasets: Any, num_workers: int) -> None:
    shuffled = hugging_face(datasets).select([2, 3, 1])

    batch, other = batches(shuffled, [2, 0], [1], num_workers=num_workers)

    assert batch["age"].tolist() == [41, 52]
    assert batch["score"].dtype == torch.float32
    assert batch["tokens"].tolist() == [[3, 4], [5, 6]]
    assert batch["text"] == ["b", None]
    assert other["age"].tolist() == [63]


def test_format_of_a_hugging_face_data_set_is_respected(datasets: Any) -> None:
    data = hugging_face(datasets)

    [as_numpy] = batches(data.with_format("numpy", columns=["score", "text"]), [1])
    [as_torch] = batches(data.with_format("torch", columns=["score"], dtype=torch.float64), [1])
    [restricted] = batches(data.with_format(None, columns=["age"]), [1])

    assert as_numpy["score"].dtype == torch.float32
    assert as_numpy["text"] == ["b"]
    assert set(as_numpy) == {"score", "text"}
    assert set(as_torch) == {"score"}
    assert as_torch["score"].dtype == torch.float64
    assert set(restricted) == {"age"}


def test_transform_of_a_hugging_face_data_set_is_seeded(datasets: Any) -> None:
    def noisy(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": [torch.tensor(age) + torch.rand(()) for age in batch["age"]]}

    data = hugging_face(datasets).with_transform(noisy)
    torch.manual_seed(0)
    state = torch.get_rng_state()

    first, second = batches(data, [1, 2], [1, 2])

    assert torch.equal(first["x"], second["x"])
    assert torch.equal(torch.get_rng_state(), state)


def test_collate_gets_the_samples_of_a_hugging_face_data_set(datasets: Any) -> None:
    found = batches(hugging_face(datasets), [1], collate=lambda rows: [r["text"] for r in rows])

    assert found == [["b"]]


def test_missing_number_of_a_hugging_face_data_set_is_refused(datasets: Any) -> None:
    data = datasets.Dataset.from_dict({"age": [1, None, 3], "text": [None, "b", "c"]})

    with pytest.raises(DataError, match=r"column 'age' has 1 missing of 3 values.*filter"):
        batches(data, [0])
    [batch] = batches(data.filter(lambda row: row["age"] is not None), [1])
    assert batch["age"].tolist() == [3]


def test_dataset_dict_is_refused_with_its_splits(datasets: Any) -> None:
    data = datasets.DatasetDict(train=hugging_face(datasets), test=hugging_face(datasets))

    with pytest.raises(
        DataError, match=r"is a DatasetDict\. Return one of its splits: train, test"
    ):
        batches(lambda: data, [0])


# ------------------------------------------------------------------------------ subsets and files


def test_subset_is_gathered_by_column() -> None:
    train, _ = random_split(
        TensorDataset(torch.arange(9), torch.arange(9) * 10),
        [6, 3],
        generator=torch.Generator().manual_seed(1),
    )
    nested = Subset(train, [5, 0])

    [(x, y)] = batches(nested, [1, 0])

    assert x.tolist() == [train.indices[0], train.indices[5]]
    assert y.tolist() == [10 * value for value in x.tolist()]


def test_subset_of_samples_is_fetched_by_sample() -> None:
    samples = [(torch.tensor([float(i)]), i) for i in range(5)]

    [(x, y)] = batches(Subset(samples, [4, 2]), [1, 0])

    assert (x.tolist(), y.tolist()) == ([[2.0], [4.0]], [2, 4])


class Pictures:
    """A data set that refers to files, such as ``torchvision.datasets.ImageFolder``."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{i}.npy" for i in range(3)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return np.load(self.paths[index]), index


def test_missing_file_of_a_data_set_has_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        batches(Pictures(tmp_path), [0])

    assert "must exist at the same path on every worker" in caught.value.__notes__[0]


def test_torchvision_data_set_is_fetched_by_sample(tmp_path: Path) -> None:
    torchvision = pytest.importorskip(
        "torchvision", reason="platform: torchvision is not installed"
    )
    data = torchvision.datasets.FakeData(
        size=4,
        image_size=(3, 6, 6),
        num_classes=2,
        transform=torchvision.transforms.Compose(
            [torchvision.transforms.RandomHorizontalFlip(), torchvision.transforms.ToTensor()]
        ),
    )

    (images, labels), _ = batches(data, [2, 0], [1])

    assert images.shape == (2, 3, 6, 6)
    assert labels.tolist() == [int(data[2][1]), int(data[0][1])]
