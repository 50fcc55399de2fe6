"""Ranks of another number than those that wrote a checkpoint read their shards of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from etrain_jupyter.storage.checkpoints import CheckpointStore, LocalStore, Part
from etrain_jupyter.storage.checkpoints.s3 import S3Store
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer
from etrain_jupyter.trainer.state.restoring import ReadReport, read_shards
from tests.unit.trainer.sharding.test_shard_files import OPTIONS, trained, write
from tests.unit.trainer.sharding.test_sharded_optimizer import Model, divide, sharded

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    if request.param == "folder":
        yield LocalStore(tmp_path, block_bytes=200)
    else:
        request.getfixturevalue("s3_server")
        yield S3Store(f"s3://{request.getfixturevalue('s3_bucket')}/run")


class ThreadGroup:
    """The group of ranks that are threads; only sums."""

    def __init__(self, rank: int, summands: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(summands)
        self._summands = summands
        self._barrier = barrier

    @classmethod
    def make(cls, world_size: int) -> list[ThreadGroup]:
        summands = [torch.zeros(0)] * world_size
        barrier = threading.Barrier(world_size, timeout=60)
        return [cls(rank, summands, barrier) for rank in range(world_size)]

    def all_reduce(self, tensor: torch.Tensor) -> SimpleNamespace:
        self._summands[self.rank] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(sum(self._summands))
        self._barrier.wait()
        return SimpleNamespace(wait=lambda: None)


def read_on_all(
    store: CheckpointStore, parts: list[Part], world_size: int
) -> tuple[list[ShardedOptimizer], list[ReadReport]]:
    """Read the checkpoint on new ranks; return them with their reports."""
    ranks = [sharded(Model(), OPTIONS) for _ in range(world_size)]
    by_name = {part.key.rpartition("/")[2]: part for part in parts}
    groups = ThreadGroup.make(world_size)

    def read(rank: int) -> ReadReport:
        return read_shards(groups[rank], ranks[rank], store, by_name, lambda: None)  # type: ignore[arg-type]

    with ThreadPoolExecutor(world_size) as threads:
        return ranks, list(threads.map(read, range(world_size)))


@pytest.mark.parametrize(("written", "read"), [(3, 2), (2, 4)])
def test_all_ranks_read_the_shards_that_they_would_have_received(
    store: CheckpointStore, written: int, read: int
) -> None:
    writers = trained(written)
    parts = write(writers, store)  # type: ignore[arg-type]
    ranks, reports = read_on_all(store, parts, read)

    [report] = set(reports)
    assert report.error == ""
    assert len(report.num_bytes) == read
    assert all(0 < num <= sum(part.size for part in parts) for num in report.num_bytes)
    for one, expected in zip(ranks, divide(writers, read), strict=True):
        assert one.spans == expected.spans
        for held, known in zip(one.held, expected.held, strict=True):
            for part, other in zip(held.parts, known.parts, strict=True):
                state, theirs = held.state_of(part), known.state_of(other)
                assert state.keys() == theirs.keys()
                assert all(torch.equal(state[key], theirs[key]) for key in state)


@pytest.mark.parametrize("fault", ["missing", "short", "bit", "header"])
def test_no_rank_keeps_a_part_if_another_rank_cannot_read_its_own(
    tmp_path: Path, fault: str
) -> None:
    store = LocalStore(tmp_path, block_bytes=200)
    parts = write(trained(3), store)
    path = tmp_path / parts[2].key
    data = path.read_bytes()
    damaged = {"short": data[:-1], "bit": data[:-1] + b"?", "header": b"?" + data[1:]}
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged[fault])
    ranks, reports = read_on_all(store, parts, 2)

    assert reports[0] == reports[1]
    assert "optimizer-00003-of-00003.safetensors" in reports[0].error
    assert not any(one.held for one in ranks)


def test_bytes_altered_in_transit_are_read_again(
    s3_server: S3Server, s3_bucket: str, no_pauses: None
) -> None:
    store = S3Store(f"s3://{s3_bucket}/run")
    parts = write(trained(3), store)  # type: ignore[arg-type]
    s3_server.set_faults(
        S3Fault(kind="spoil_answer", every=2, count=1), S3Fault(kind="truncate", every=5, count=1)
    )
    _, reports = read_on_all(store, parts, 2)
    assert [report.error for report in reports] == ["", ""]
    assert s3_server.counts()["spoil_answer"] > 0
