"""Training on shards: batches, the same bits for any history, and the proof in the checksums."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from etrain_jupyter.data import BatchKey, Shards, batch_key, write_shards
from etrain_jupyter.rules.samples.block_order import BlockOrder
from etrain_jupyter.rules.samples.ledger import checksum_of
from etrain_jupyter.trainer.data import Share, open_samples
from etrain_jupyter.trainer.references import DataError
from tests.unit.trainer.rank_processes import Generation, Job, RankProcesses
from tests.unit.trainer.reproducible_jobs import BATCH, SHARDS, STEPS, keys

NUM_SAMPLES = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set") / "shards"
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM_SAMPLES, 8)).astype(np.float32)
    rows = {
        "x": x,
        "label": (x.sum(axis=1) > 0).astype(np.int64),
        "text": np.array([f"row {i}" for i in range(NUM_SAMPLES)]),
    }
    write_shards(rows, folder, block_bytes=400, progress=False)
    return folder


def batches(shards: Shards, *, collate: Any = None, num_workers: int = 0) -> list[Any]:
    source = open_samples(shards, name="data.train", collate=collate, num_workers=num_workers)
    try:
        return list(source.batches([Share([3, 80, 4], 1), Share([5], 2), Share([6, 7], 3)]))
    finally:
        source.close()


def test_batch_has_the_columns_as_tensors(folder: Path) -> None:
    (samples, batch), *_ = batches(Shards(folder))
    expected = [Shards(folder)[i] for i in (3, 80, 4)]

    assert samples.tolist() == [3, 80, 4]
    assert batch["x"].tolist() == [sample["x"].tolist() for sample in expected]
    assert batch["label"].dtype == torch.int64
    assert batch["text"] == [sample["text"] for sample in expected]
    batch["x"].add_(1)  # memory of its own


def test_set_of_tuples_gives_tuples(tmp_path: Path) -> None:
    write_shards((torch.arange(90), torch.arange(90) * 2), tmp_path / "set", progress=False)

    (_, (x, y)), *_ = batches(Shards(tmp_path / "set"))

    assert (2 * x).tolist() == y.tolist()


def noisy(sample: dict[str, Any]) -> Any:
    return sample["x"] + torch.rand(()).item(), sample["label"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_transform_and_its_random_numbers_do_not_depend_on_the_process(
    folder: Path, num_workers: int
) -> None:
    expected = batches(Shards(folder, transform=noisy))

    found = batches(Shards(folder, transform=noisy), num_workers=num_workers)

    assert [samples.tolist() for samples, _ in found] == [[3, 80, 4], [5], [6, 7]]
    for (_, (x, y)), (_, (other_x, other_y)) in zip(found, expected, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_collate_gets_the_samples(folder: Path) -> None:
    (_, texts), *_ = batches(Shards(folder), collate=lambda rows: [row["text"] for row in rows])

    assert texts == [Shards(folder)[i]["text"] for i in (3, 80, 4)]


def test_stream_is_refused_with_the_remedy() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([1])

    with pytest.raises(DataError, match=r"is a Stream\. A stream has no index.*write_shards"):
        open_samples(Stream(), name="data.train", collate=None, num_workers=0)


# ---------------------------------------------------------------------------------------- training


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def names(folder: Path) -> dict[str, Any]:
    shards = Shards(folder, window=5)
    loss = nn.functional.cross_entropy
    return {"model": Net, "data.train": shards, "data.eval": shards, "loss": loss}


HISTORIES = {
    "3 ranks": [Generation(members=(2, 0, 1))],
    "joins and leaves": [
        Generation(members=(0, 1), until=2),
        Generation(members=(1, 2, 3, 0), until=3),
        Generation(members=(2, 0, 1)),
    ],
    "losses": [
        Generation(members=(0, 1, 2), until=1, lost=1),
        Generation(members=(2, 0, 1, 3)),
    ],
}


def train(ranks: RankProcesses, folder: Path, history: list[Generation], **more: Any) -> Any:
    config = {**keys(**more), "metrics": {}}
    return ranks.train(Job(config=config, names=functools.partial(names, folder), history=history))


@pytest.mark.parametrize("name", HISTORIES)
def test_no_history_changes_a_bit(ranks: RankProcesses, folder: Path, name: str) -> None:
    [alone] = train(ranks, folder, [Generation(members=(0,))])

    outcomes = train(ranks, folder, HISTORIES[name])

    assert {outcome.digest for outcome in outcomes} == {alone.digest}


@pytest.mark.parametrize("reproducible", [{"shards": SHARDS}, False])
def test_steps_train_the_samples_of_the_order_over_blocks(
    ranks: RankProcesses, folder: Path, reproducible: Any
) -> None:
    first, *_ = train(ranks, folder, [Generation(members=(0, 1, 2))], reproducible=reproducible)
    layout = Shards(folder, window=5).layout

    steps = first.records("step")

    assert len(steps) == STEPS
    position = 0
    for record in steps:
        epoch, begin = divmod(position, NUM_SAMPLES)
        due = min(BATCH, NUM_SAMPLES - begin)
        order = BlockOrder(layout, seed=0, epoch=epoch)
        assert record["sample_checksum"] == checksum_of(order.samples(begin, begin + due))
        position += due


def keyed(samples: list[Any]) -> Any:
    key = batch_key()
    assert key is not None
    return key


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collate_knows_the_samples_of_its_batch(folder: Path, num_workers: int) -> None:
    source = open_samples(Shards(folder), name="data.train", collate=keyed, num_workers=num_workers)
    shares = [Share([3, 80], 1, job_seed=5, epoch=2), Share([5], 2, job_seed=5, epoch=3)]

    found = [key for _, key in source.batches(shares)]
    source.close()

    assert found == [
        BatchKey(seed=5, epoch=2, samples=(3, 80)),
        BatchKey(seed=5, epoch=3, samples=(5,)),
    ]
