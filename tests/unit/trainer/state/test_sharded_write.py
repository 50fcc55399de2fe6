"""Several ranks write one checkpoint, and rank 0 writes the parts that are not delivered."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.rules.optimizer_shards import shards_of
from etrain_jupyter.storage.checkpoints import LocalStore
from etrain_jupyter.storage.checkpoints.base import open_newest
from etrain_jupyter.storage.checkpoints.s3 import S3Store
from etrain_jupyter.testing.s3_server import S3Server
from etrain_jupyter.trainer.boundary import Boundary
from etrain_jupyter.trainer.group.rendezvous import BroadcastStore
from etrain_jupyter.trainer.sharding.held_state import NewShard
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer
from etrain_jupyter.trainer.state import sharded_write
from etrain_jupyter.trainer.state.checkpointer import Checkpointer
from etrain_jupyter.trainer.state.parts import NEEDED, check_parts, optimizer_parts
from etrain_jupyter.trainer.state.restoring import restore
from etrain_jupyter.trainer.state.sharded_write import files_of, is_worth_it, part_of_rank
from etrain_jupyter.wire.messages import CheckpointNotWritten, CheckpointWritten
from tests.unit.trainer.state.test_checkpointer import State, config_of


class RemoteStore(LocalStore):
    """A folder that counts as remote: each rank has its own connection to it."""

    is_remote = True

    def __init__(self, root) -> None:
        super().__init__(root)
        self.written: list[str] = []
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_broken = False

    def put_part(self, folder, name, data, **options):
        if self.is_broken:
            raise CheckpointError("this rank has lost its connection to the store")
        assert self.may_write.wait(60)
        part = super().put_part(folder, name, data, **options)
        self.written.append(name)
        return part


class Rank:
    """A rank that only saves."""

    def __init__(self, rank: int, world_size: int, store, checkpoint: dict) -> None:
        self.rank, self.store = rank, store
        self.others: list[Rank] = []
        self.sent: list[dict] = []
        self.state = State(with_scaler=False, config=config_of(checkpoint))
        self.checkpointer = Checkpointer(
            store=store,
            state=self.state,
            job_id="job",
            send=self.sent.append,
            starts=[0],
        )
        self.group = SimpleNamespace(rank=rank, world_size=world_size, generation=1)
        self.board = BroadcastStore(self._publish)
        self.checkpointer.begin(self.group, self.board)

    def _publish(self, key: str, value: bytes) -> None:
        for other in self.others:
            other.board.put(key, value)

    def train(self, *, is_agreed: bool) -> None:
        self.state.train()
        self.checkpointer.after_step(
            Boundary(group=self.group, step_s=0.1, is_save_agreed=is_agreed)
        )

    def kinds(self) -> list[type]:
        return [type(message) for message in self.sent]


@pytest.fixture(autouse=True)
def every_state_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_write, "SHARDED_BYTES", 1)


def ranks_on(*stores, **checkpoint) -> list[Rank]:
    """Make ranks that have saved once, so that rank 0 knows the size of the state."""
    checkpoint = checkpoint or {"every": "1 step"}
    ranks = [Rank(number, len(stores), store, checkpoint) for number, store in enumerate(stores)]
    for rank in ranks:
        rank.others = [other for other in ranks if other is not rank]
        torch.manual_seed(0)
        for value in rank.state.workload.model.parameters():
            torch.nn.init.normal_(value)
    ranks[0].checkpointer.request()
    train(ranks)
    join(ranks)
    for store in stores:
        store.written.clear()
    return ranks


def train(ranks: list[Rank]) -> None:
    """Make a step, with the agreement from its header."""
    is_agreed = ranks[0].checkpointer.wants_save(*ranks[0].state.marks)
    for rank in ranks:
        rank.train(is_agreed=is_agreed)


def join(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.checkpointer.wait()
        rank.checkpointer._shard_writer.wait()


def check_restored(store, ranks: list[Rank], *, step: int) -> None:
    """Check that the newest checkpoint is of this step and continues exactly."""

    def check(manifest, files) -> None:
        check_parts(manifest, files, NEEDED)

    found = open_newest(store, job_id="job", check=check)
    assert (found.manifest.step, found.skipped) == (step, [])
    fresh = State(with_scaler=False)
    restore(fresh, found.files)
    fresh.train()
    ranks[0].state.train()
    theirs = ranks[0].state.workload.model.state_dict()
    for name, value in fresh.workload.model.state_dict().items():
        assert torch.equal(value, theirs[name])


def test_small_states_and_folders_are_written_by_one_rank(tmp_path, monkeypatch):
    monkeypatch.undo()
    remote, local = RemoteStore(tmp_path), LocalStore(tmp_path)
    assert is_worth_it(remote, 64 << 20, 2)
    assert not is_worth_it(remote, (64 << 20) - 1, 2)
    assert not is_worth_it(remote, 64 << 20, 1)
    assert not is_worth_it(local, 64 << 20, 2)


@pytest.mark.parametrize("world_size", [2, 3, 4, 9, 20])
def test_every_file_has_one_writer(world_size):
    tensors = {f"optimizer.{n}": torch.zeros(n) for n in range(40)} | {"model.a": torch.ones(1)}
    num_shards = sharded_write.num_shards_of(world_size)
    files = files_of(tensors, num_shards=num_shards)
    helped = [part_of_rank(rank, world_size) for rank in range(world_size)]
    assert [name for name in helped if name] == optimizer_parts(files)
    assert helped[0] is None
    parts = [files[name] for name in optimizer_parts(files)]
    assert sorted(n for part in parts for n in part) == sorted(str(n) for n in range(40))
    sizes = [sum(t.nbytes for t in part.values()) for part in parts]
    assert max(sizes) - min(sizes) <= 4 * 40


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_rank_writes_a_part_and_rank_0_commits(tmp_path, world_size):
    stores = [RemoteStore(tmp_path) for _ in range(world_size)]
    ranks = ranks_on(*stores)
    train(ranks)
    join(ranks)
    assert sorted(stores[0].written) == ["extra.safetensors", "model.safetensors", "state.json"]
    assert [len(store.written) for store in stores[1:]] == [1] * (world_size - 1)
    assert ranks[0].kinds() == [CheckpointWritten] * 2
    check_restored(stores[0], ranks, step=2)


def test_part_whose_writer_fails_is_written_by_rank_0(tmp_path):
    stores = [RemoteStore(tmp_path), RemoteStore(tmp_path)]
    ranks = ranks_on(*stores)
    stores[1].is_broken = True
    train(ranks)
    join(ranks)
    assert "optimizer.safetensors" in stores[0].written
    assert ranks[0].kinds() == [CheckpointWritten] * 2
    check_restored(stores[0], ranks, step=2)


def test_part_whose_writer_dies_is_written_by_rank_0_as_soon_as_the_generation_is_over(tmp_path):
    stores = [RemoteStore(tmp_path), RemoteStore(tmp_path)]
    ranks = ranks_on(*stores)
    stores[1].may_write.clear()
    train(ranks)
    ranks[0].checkpointer.leave()  # called by the main thread when the other ranks are lost
    ranks[0].checkpointer.wait()
    assert "optimizer.safetensors" in stores[0].written
    assert ranks[0].kinds() == [CheckpointWritten] * 2
    stores[1].may_write.set()  # it was alive, and finishes a part that is not needed any more
    join(ranks)
    check_restored(stores[0], ranks, step=2)


def test_checkpoint_whose_rank_0_dies_is_never_acknowledged_and_the_next_one_is_whole(tmp_path):
    stores = [RemoteStore(tmp_path), RemoteStore(tmp_path)]
    ranks = ranks_on(*stores)
    stores[0].may_write.clear()
    train(ranks)
    ranks[1].checkpointer._shard_writer.wait()
    assert stores[0].list_steps() == [1]  # a part of rank 1 alone is not a checkpoint
    survivor = ranks[1]
    survivor.checkpointer.leave()
    survivor.checkpointer.starts = [0, 2]
    survivor.group = SimpleNamespace(rank=0, world_size=1, generation=2)
    survivor.checkpointer.begin(survivor.group, BroadcastStore(lambda key, value: None))
    survivor.train(is_agreed=False)
    survivor.checkpointer.wait()
    assert survivor.kinds() == [CheckpointWritten]
    assert stores[1].list_steps() == [1, 3]
    stores[0].may_write.set()
    join(ranks)
    assert ranks[0].kinds()[-1] == CheckpointNotWritten  # a later generation has saved meanwhile


def test_rank_that_waits_for_a_folder_is_notified_if_rank_0_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("etrain_jupyter.trainer.group.rendezvous.FORM_TIMEOUT_S", 1e6)
    stores = [RemoteStore(tmp_path), RemoteStore(tmp_path)]
    ranks = ranks_on(*stores)
    stores[0].begin = lambda step: (_ for _ in ()).throw(CheckpointError("no such bucket"))
    train(ranks)
    join(ranks)
    assert ranks[0].kinds() == [CheckpointWritten, CheckpointNotWritten]
    assert stores[1].written == []


def test_rank_with_a_part_in_flight_leaves_the_next_one_to_rank_0(tmp_path, monkeypatch):
    monkeypatch.setattr("etrain_jupyter.trainer.state.checkpoint_writer.MIN_TIMEOUT_S", 0.1)
    stores = [RemoteStore(tmp_path), RemoteStore(tmp_path)]
    ranks = ranks_on(*stores)
    stores[1].may_write.clear()
    for _ in range(2):
        train(ranks)
        ranks[0].checkpointer.wait()
    assert stores[0].written.count("optimizer.safetensors") == 2
    stores[1].may_write.set()
    join(ranks)
    check_restored(stores[0], ranks, step=3)


def test_ranks_agree_on_the_step_of_a_request_that_only_rank_0_knows(tmp_path):
    stores = [RemoteStore(tmp_path), RemoteStore(tmp_path)]
    ranks = ranks_on(*stores, every="1000 steps")
    train(ranks)
    ranks[0].checkpointer.request()
    ranks[0].train(is_agreed=False)  # requested after the header of that step was sent
    ranks[1].train(is_agreed=False)
    assert stores[0].list_steps() == [1]
    train(ranks)
    join(ranks)
    assert stores[0].list_steps() == [1, 4]
    assert stores[1].written == ["optimizer.safetensors"]


def test_ranks_write_to_s3_together(s3_server: S3Server, s3_bucket: str):
    stores = [S3Store(f"s3://{s3_bucket}/run") for _ in range(3)]
    for store in stores:
        store.written = []
    ranks = ranks_on(*stores)
    train(ranks)
    join(ranks)
    manifest = stores[0].read_manifest(2)
    assert {"optimizer-00001-of-00002.safetensors", "model.safetensors"} <= set(manifest.parts)
    check_restored(stores[0], ranks, step=2)


def test_checkpoint_that_lacks_one_of_its_shards_is_refused(tmp_path):
    stores = [RemoteStore(tmp_path) for _ in range(3)]
    ranks = ranks_on(*stores)
    train(ranks)
    join(ranks)
    found = open_newest(stores[0], job_id="job")
    name = "optimizer-00002-of-00002.safetensors"
    parts = {k: v for k, v in found.manifest.parts.items() if k != name}
    with pytest.raises(CheckpointError, match=f"does not list {name}"):
        check_parts(replace(found.manifest, parts=parts), found.files, NEEDED)


def divide(ranks: list[Rank]) -> None:
    """Divide the optimizer's state, which is still empty, among the ranks."""
    for rank in ranks:
        workload = rank.state.workload
        for parameter in workload.model.parameters():
            parameter.data = parameter.data.contiguous()
        shards = ShardedOptimizer(workload.optimizer, workload.model)
        spans = shards_of(rank.rank, len(ranks), shards.layout.starts)
        shards.replace([NewShard(shards.layout, span, {}) for span in spans])
        shards.adopt(rank.rank, len(ranks))
        workload.shards = shards
        rank.checkpointer.begin(rank.group, rank.board)


def divided_ranks(*stores) -> list[Rank]:
    ranks = [Rank(n, len(stores), store, {"every": "1 step"}) for n, store in enumerate(stores)]
    for rank in ranks:
        rank.others = [other for other in ranks if other is not rank]
        torch.manual_seed(0)
        for value in rank.state.workload.model.parameters():
            torch.nn.init.normal_(value)
    divide(ranks)
    return ranks


def test_ranks_write_the_parts_of_a_divided_state(tmp_path):
    # In a folder, too, in which one rank otherwise writes everything.
    stores = [RemoteStore(tmp_path) for _ in range(2)]
    ranks = divided_ranks(*stores)
    train(ranks)
    join(ranks)
    assert ranks[0].kinds() == [CheckpointWritten]
    assert stores[1].written == ["optimizer-00002-of-00002.safetensors"]
    check_restored(stores[0], ranks, step=1)


def test_checkpoint_fails_without_a_part_that_only_another_rank_has(tmp_path):
    stores = [RemoteStore(tmp_path) for _ in range(2)]
    ranks = divided_ranks(*stores)
    stores[1].is_broken = True
    train(ranks)
    join(ranks)
    [failure] = ranks[0].sent
    assert isinstance(failure, CheckpointNotWritten)
    assert "1 of 1 other workers did not write their part" in failure.error
    assert not stores[0].list_steps()

    stores[1].is_broken = False
    ranks[0].checkpointer.request()
    train(ranks)
    join(ranks)
    check_restored(stores[0], ranks, step=2)


def test_rank_with_a_part_of_the_state_does_not_save_alone(tmp_path):
    ranks = divided_ranks(*[RemoteStore(tmp_path) for _ in range(2)])
    ranks[0].checkpointer.save_now(1)
    [failure] = ranks[0].sent
    assert isinstance(failure, CheckpointNotWritten)
    assert "only a part of the optimizer's state" in failure.error
