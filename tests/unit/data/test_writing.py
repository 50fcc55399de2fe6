"""``write_shards``: every kind of source, a full shuffle, and interruptions."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from etrain_jupyter.data import Shards, spill, write_shards
from etrain_jupyter.data.shard_writer import _SetWriter
from etrain_jupyter.errors import ShardError

NUM_ROWS = 300


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the rows of a source after every few of them."""
    monkeypatch.setattr(spill, "FLUSH_BYTES", 800)
    monkeypatch.setattr("etrain_jupyter.data.rows._CHUNK_ROWS", 20)


def write(source: Any, to: Path, **options: Any) -> Shards:
    return write_shards(source, to, progress=False, **{"block_bytes": 1000, **options})


def ids(shards: Shards) -> list[int]:
    return [int(sample["id"]) for sample in shards]


def table() -> pa.Table:
    return pa.table({"id": range(NUM_ROWS), "text": [f"row {i}" for i in range(NUM_ROWS)]})


class Rows(Dataset):
    """A map-style data set that records what is read."""

    def __init__(self, fail_at: int = -1) -> None:
        self.read: list[int] = []
        self.fail_at = fail_at

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == self.fail_at:
            raise KeyboardInterrupt
        self.read.append(number)
        return {"id": number, "text": f"row {number}"}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(table().to_pylist())


def hugging_face(is_stream: bool) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets: not installed")
    stored = datasets.Dataset(table())
    return stored.to_iterable_dataset() if is_stream else stored


def files(folder: Path) -> list[Path]:
    paths = [folder / "a.parquet", folder / "b.jsonl"]
    pq.write_table(table().slice(0, 200), paths[0])
    rest = table().slice(200).to_pylist()
    paths[1].write_text("\n".join(map(json.dumps, rest)))
    return paths


SOURCES: dict[str, Callable[[Path], Any]] = {
    "generator": lambda folder: iter(table().to_pylist()),
    "torch IterableDataset": lambda folder: Stream(),
    "map-style": lambda folder: Rows(),
    "Hugging Face": lambda folder: hugging_face(is_stream=False),
    "Hugging Face stream": lambda folder: hugging_face(is_stream=True),
    "pandas": lambda folder: pd.DataFrame(table().to_pylist()),
    "Arrow table": lambda folder: table(),
    "Arrow batches": lambda folder: table().to_reader(max_chunksize=70),
    "dict of arrays": lambda folder: {
        "id": np.arange(NUM_ROWS),
        "text": np.array([f"row {i}" for i in range(NUM_ROWS)]),
    },
    "files": files,
    "shards": lambda folder: write(table(), folder / "other"),
}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("name", SOURCES)
def test_every_source_is_written_once(tmp_path: Path, name: str, shuffle: bool) -> None:
    shards = write(SOURCES[name](tmp_path), tmp_path / "set", shuffle=shuffle)

    samples = list(shards)
    if not shuffle and name != "shards":
        assert [sample["id"] for sample in samples] == list(range(NUM_ROWS))
    assert sorted(sample["id"] for sample in samples) == list(range(NUM_ROWS))
    assert all(sample["text"] == f"row {sample['id']}" for sample in samples)


@pytest.mark.parametrize(
    "source",
    [
        TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6)),
        (torch.arange(12.0).reshape(6, 2), torch.arange(6)),
        [(torch.tensor([2.0 * i, 2.0 * i + 1]), i) for i in range(6)],
    ],
)
def test_tuples_are_read_as_tuples(tmp_path: Path, source: Any) -> None:
    shards = write(source, tmp_path / "set", shuffle=False)

    x, y = shards[2]

    assert (x.tolist(), x.dtype, y) == ([4.0, 5.0], np.float32, 2)


def test_tuples_with_names_become_dicts(tmp_path: Path) -> None:
    shards = write([(1, "a"), (2, "b")], tmp_path, columns=["id", "text"], shuffle=False)

    assert shards[1] == {"id": 2, "text": "b"}


def test_shuffle_is_seeded_and_mixes_the_whole_set(tmp_path: Path) -> None:
    orders = [
        ids(write(table(), tmp_path / f"{number}", seed=seed))
        for number, seed in enumerate((0, 0, 1))
    ]

    assert orders[0] == orders[1] != orders[2]
    # The first block has rows of all parts of the source: their mean is that of a random sample.
    first = Shards(tmp_path / "0").layout.rows[0]
    assert abs(np.mean(orders[0][:first]) - NUM_ROWS / 2) < 4 * NUM_ROWS / (12 * first) ** 0.5


def test_files_that_are_too_large_for_memory_are_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "GROUP_BYTES", 600)
    monkeypatch.setattr(spill, "FLUSH_BYTES", 1000)
    monkeypatch.setattr(spill, "NUM_BUCKETS", 4)

    shards = write(table(), tmp_path / "set")

    assert sorted(ids(shards)) == list(range(NUM_ROWS))
    assert ids(shards) != sorted(ids(shards))
    assert not (tmp_path / "set" / ".writing").exists()


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("fail_at", [1, 100, 299])
def test_interrupted_write_continues_where_it_was(
    tmp_path: Path, fail_at: int, shuffle: bool
) -> None:
    expected = ids(write(table(), tmp_path / "whole", shuffle=shuffle))
    options = {"shuffle": shuffle, "block_bytes": 100 if not shuffle else 1000}
    with pytest.raises(KeyboardInterrupt):
        write(Rows(fail_at), tmp_path / "set", **options)
    assert not (tmp_path / "set" / "shards.json").exists()

    rest = Rows()
    shards = write(rest, tmp_path / "set", **options)

    assert ids(shards) == expected
    if fail_at > 200:
        assert len(rest.read) < 150, "the first rows are not read again"


@pytest.mark.parametrize("num_files", [1, 2])
def test_write_that_is_killed_between_two_files_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int
) -> None:
    expected = ids(write(table(), tmp_path / "whole", block_bytes=200))
    code = f"""if True:
        import os, signal, sys
        from etrain_jupyter.data import shard_writer, write_shards
        from tests.unit.data.test_writing import Rows

        save = shard_writer._SetWriter._save_state
        def save_and_die(self):
            save(self)
            if len(self._state.files) == {num_files}:
                os.kill(os.getpid(), signal.SIGKILL)

        shard_writer._SetWriter._save_state = save_and_die
        write_shards(Rows(), sys.argv[1], block_bytes=200, progress=False)
    """
    to = tmp_path / "set"
    done = subprocess.run([sys.executable, "-c", code, str(to)], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(ShardError, match="write has not finished"):
        len(Shards(to))

    rest = Rows()
    shards = write(rest, to, block_bytes=200)

    assert ids(shards) == expected
    assert rest.read == [0, 299], "only looks at the form of a row, and at the last one"


@pytest.mark.usefixtures("short_chunks")
def test_other_arguments_do_not_continue_an_interrupted_write(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(Rows(fail_at=200), tmp_path / "set", seed=1)

    with pytest.raises(ShardError, match="unfinished write with seed=1, not 2"):
        write(Rows(), tmp_path / "set", seed=2)


def other_rows(num_rows: int = NUM_ROWS) -> list[dict[str, Any]]:
    return [{"id": number, "text": f"changed {number}"} for number in range(num_rows)]


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("has_index", [True, False])
def test_changed_source_does_not_continue_an_interrupted_write(
    tmp_path: Path, has_index: bool, shuffle: bool
) -> None:

    def one_by_one(rows: Any) -> Any:
        return rows if has_index else (rows[number] for number in range(NUM_ROWS))

    options = {"shuffle": shuffle, "block_bytes": 100 if not shuffle else 1000}
    with pytest.raises(KeyboardInterrupt):
        write(one_by_one(Rows(fail_at=299)), tmp_path / "set", **options)

    expected = r"row \d+ of the source has changed.*Nothing more was written.*delete .*set"
    with pytest.raises(ShardError, match=expected):
        write(one_by_one(other_rows()), tmp_path / "set", **options)
    shards = write(one_by_one(Rows()), tmp_path / "set", **options)
    assert {sample["text"][:4] for sample in shards} == {"row "}


def test_changed_source_does_not_complete_a_write_that_has_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_SetWriter, "_write_groups", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(Rows(), tmp_path / "set")
    monkeypatch.undo()

    with pytest.raises(ShardError, match="row 299 of the source has changed"):
        write(other_rows(), tmp_path / "set")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_write_that_stored_nothing_does_not_bind_the_next_one(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="row 0 is a bytes"):
        write([b"a", b"b"], tmp_path / "set")

    assert len(write([{"x": 1}], tmp_path / "set", seed=2)) == 1


def test_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(ShardError, match=r"is not empty: it has 'notes\.txt'"):
        write(table(), tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([b"a"], "row 0 is a bytes. Give dicts or tuples"),
        ([{"x": 1}, {"y": 1}], "row 1 has the columns 'y', and the first row 'x'"),
        ([{"x": 1}, {"x": "a"}], "column 'x' of rows 0 to 1 cannot be stored"),
        ([{"x": object()}], "encode images and other objects as bytes"),
        ([{"x": np.zeros((2, 2))}, {"x": np.zeros((3, 2))}], "tensors of different shapes"),
        ([(1, 2), (1,)], "row 1 has the columns '0', and the first row '0', '1'"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "the arrays differ in length"),
        (iter(()), "the source has no rows"),
        (3, "an int has no rows to write"),
    ],
)
def test_rows_that_cannot_be_written_are_named(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(ShardError) as caught:
        write(rows, tmp_path / "set")

    assert message in str(caught.value)


def test_write_that_continues_has_the_types_of_the_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "FLUSH_BYTES", 1)
    monkeypatch.setattr("etrain_jupyter.data.rows._CHUNK_ROWS", 2)
    # Without the schema of the first rows, the column would be of integers after row 3.
    values = [0.5, 1, 2, 3, 4, None]

    def rows() -> Iterator[dict[str, Any]]:
        for value in values:
            if value is None:
                raise KeyboardInterrupt
            yield {"x": value}

    with pytest.raises(KeyboardInterrupt):
        write(rows(), tmp_path / "set")
    values[-1:] = [5, 6.5]

    shards = write(rows(), tmp_path / "set")

    assert sorted(row["x"] for row in shards) == [0.5, 1, 2, 3, 4, 5, 6.5]


def test_row_that_raises_is_named(tmp_path: Path) -> None:
    class Broken(Rows):
        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"id": 1 / (number - 42)}

    with pytest.raises(ShardError, match=r"row 42 of the source .* ZeroDivisionError"):
        write(Broken(), tmp_path / "set")


def test_later_rows_with_another_type_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etrain_jupyter.data.rows._CHUNK_ROWS", 2)

    with pytest.raises(ShardError, match="column 'x' of rows 2 to 2 cannot be stored as int64"):
        write([{"x": 1}, {"x": 2}, {"x": "a"}], tmp_path / "set")


def test_progress_is_printed_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shards(table(), tmp_path / "set")

    shown = capsys.readouterr().err.split("\n")[0].split("\r")[-1]
    assert shown.startswith("shuffling  [==============================]  300 of 300 rows")


# --- shared spill folders ---


def spill_folder(tmp_path: Path) -> Path:
    """Return the folder of an unfinished write that another user can foresee."""
    (tmp_path / "shared").mkdir()
    key = hashlib.sha256(str(tmp_path / "set").encode()).hexdigest()[:16]
    return tmp_path / "shared" / f"write-{key}"


def write_shared(tmp_path: Path, source: Any = None) -> Shards:
    rows = table() if source is None else source
    return write(rows, tmp_path / "set", spill_dir=tmp_path / "shared")


def test_lock_that_is_a_link_is_not_opened(tmp_path: Path) -> None:
    folder = spill_folder(tmp_path)
    folder.mkdir(mode=0o700)
    (tmp_path / "thesis.txt").write_text("precious")
    (folder / "lock").symlink_to(tmp_path / "thesis.txt")

    with pytest.raises(ShardError, match=r"lock.*Nothing was written"):
        write_shared(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    "name",
    [".part-00000.arrow.file.partial", f".shards.json.{os.getpid()}.partial"],
    ids=["part", "record"],
)
def test_files_of_a_set_are_not_written_through_a_planted_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "writing.json").write_text("{}")  # as after an interruption
    (tmp_path / "thesis.txt").write_text("precious")
    (tmp_path / "set" / name).symlink_to(tmp_path / "thesis.txt")

    assert len(write(table(), tmp_path / "set")) == len(table())

    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("plant", ["link", "open", "other"])
def test_folder_that_another_user_may_have_prepared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    folder = spill_folder(tmp_path)
    (tmp_path / "victim").mkdir(mode=0o700)
    if plant == "link":
        folder.symlink_to(tmp_path / "victim")
    else:
        folder.mkdir(mode=0o700)
        if plant == "open":
            folder.chmod(0o777)
        else:
            monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)

    with pytest.raises(ShardError, match=r"another user.*Nothing was written.*spill_dir"):
        write_shared(tmp_path)
    assert list((tmp_path / "victim").iterdir()) == []


@pytest.mark.usefixtures("short_chunks")
def test_rows_of_an_unfinished_write_are_private(tmp_path: Path) -> None:
    folder = spill_folder(tmp_path)

    with pytest.raises(KeyboardInterrupt):
        write_shared(tmp_path, Rows(fail_at=200))

    assert folder.stat().st_mode & 0o077 == 0
