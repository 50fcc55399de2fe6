"""A checkpoint holds the complete state, and opens with plain safetensors."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from etrain_jupyter.checkpoints import LocalStore
from etrain_jupyter.checkpoints.base import open_newest
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.ranks.judge import Judge
from etrain_jupyter.ranks.schedule import WorkPlan
from etrain_jupyter.ranks.state.checkpointer import EXTRA_PART, Checkpointer, restore


class Net(nn.Module):
    """Weights in another memory order, tied ones, and a buffer that no ``state_dict`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("hidden", torch.zeros(2), persistent=False)


def config_of(checkpoint: dict) -> TrainConfig:
    keys = {"model": "m", "data": {"train": "d", "eval": "e"}, "loss": "l"}
    return TrainConfig.model_validate({**keys, "checkpoint": checkpoint})


class Loop:
    """What a checkpoint is made of, without training."""

    def __init__(self, *, with_scaler: bool) -> None:
        model = Net()
        extras = {"scaler": torch.amp.GradScaler("cpu", init_scale=64.0)} if with_scaler else {}
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        self.workload = SimpleNamespace(model=model, optimizer=optimizer, extras=extras)
        self.plan = WorkPlan(
            num_train=10, num_eval=0, global_batch_size=2, steps_per_epoch=5, total_steps=5
        )
        self.step = 0
        self.position = 0
        self.page = None
        self.is_done = False
        self.judge = Judge(config_of({}))

    def counters(self) -> dict[str, int]:
        return {"step": self.step}

    def set_counters(self, counters: dict[str, int]) -> None:
        self.step = counters["step"]

    def train(self) -> None:
        for parameter in self.workload.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.workload.optimizer.step()
        self.step += 1


def save_and_restore(folder, saved: Loop, fresh: Loop) -> dict:
    config = TrainConfig.model_validate(
        {"model": "m", "data": {"train": "d"}, "loss": "l", "optimizer": {"name": "adam"}}
    )
    told: list[dict] = []
    store = LocalStore(folder)
    checkpointer = Checkpointer(
        store=store, loop=saved, job_id="job", config=config, send=told.append
    )
    checkpointer.save_now(1)
    assert [message["op"] for message in told] == ["checkpoint_committed"]
    files = open_newest(store, job_id="job").files
    restore(fresh, files)
    return files


def test_restored_trainer_goes_on_exactly(tmp_path):
    saved, fresh = Loop(with_scaler=True), Loop(with_scaler=True)
    saved.train()
    with torch.no_grad():
        saved.workload.model.hidden.fill_(3)
    saved.workload.extras["scaler"].load_state_dict(
        {**saved.workload.extras["scaler"].state_dict(), "scale": 8.0}
    )
    files = save_and_restore(tmp_path, saved, fresh)
    assert fresh.step == 1
    assert fresh.workload.extras["scaler"].get_scale() == 8.0
    assert load_file(files[EXTRA_PART])["buffer.hidden"].tolist() == [3, 3]
    for loop in (saved, fresh):
        loop.train()
    pairs = zip(
        saved.workload.model.state_dict().items(),
        fresh.workload.model.state_dict().items(),
        strict=True,
    )
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert fresh.workload.model.hidden.tolist() == [3, 3]
    assert fresh.workload.model.head.weight is fresh.workload.model.embedding.weight
    assert fresh.workload.model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_model_part_has_the_names_and_values_of_the_state_dict(tmp_path):
    saved = Loop(with_scaler=False)
    files = save_and_restore(tmp_path, saved, Loop(with_scaler=False))
    told = saved.workload.model.state_dict()
    opened = load_file(files["model.safetensors"])
    assert sorted(opened) == sorted(told)
    assert all(torch.equal(opened[name], told[name]) for name in told)


def test_checkpoint_without_a_scaler_leaves_a_new_one_as_it_is(tmp_path):
    saved, fresh = Loop(with_scaler=False), Loop(with_scaler=True)
    save_and_restore(tmp_path, saved, fresh)
    assert fresh.workload.extras["scaler"].get_scale() == 64.0


def test_checkpoint_keeps_the_records_that_the_log_may_not_have_yet(tmp_path):
    config = TrainConfig.model_validate({"model": "m", "data": {"train": "d"}, "loss": "l"})
    saved, fresh = Loop(with_scaler=False), Loop(with_scaler=False)
    saved.train()
    common = {"store": LocalStore(tmp_path), "job_id": "job", "config": config}
    records = [{"step": 1, "loss": 0.5}]
    writer = Checkpointer(
        loop=saved, send=lambda _: None, records_after=lambda step: records, **common
    )
    reader = Checkpointer(loop=fresh, send=lambda _: None, **common)
    assert reader.restore_newest(logged_step=0) is None
    writer.save_now(1)
    assert reader.restore_newest(logged_step=0) == records


class Saver:
    """A checkpointer of one generation, and what it told."""

    def __init__(self, folder, *, starts: list[int]) -> None:
        config = TrainConfig.model_validate({"model": "m", "data": {"train": "d"}, "loss": "l"})
        self.loop = Loop(with_scaler=False)
        self.told: list[dict] = []
        self.checkpointer = Checkpointer(
            store=LocalStore(folder),
            loop=self.loop,
            job_id="job",
            config=config,
            send=self.told.append,
            records_after=lambda step: [{"step": self.loop.step}],
        )
        self.checkpointer.starts = starts

    def save(self, *, step: int, generation: int) -> dict:
        self.loop.step = step
        self.checkpointer.save_now(generation)
        return self.told[-1]

    def restore(self, *, logged_step: int) -> int:
        self.checkpointer.restore_newest(logged_step=logged_step)
        return self.loop.step


def test_checkpoint_of_a_generation_that_was_given_up_is_passed_over(tmp_path):
    cut_off = Saver(tmp_path, starts=[0])
    for step in (2, 3):
        cut_off.save(step=step, generation=1)
    later = Saver(tmp_path, starts=[0, 2])
    assert later.restore(logged_step=3) == 2
    assert "generation 1 wrote it after it had been given up" in later.told[-1]["text"]


def test_checkpoint_with_steps_that_the_log_cannot_be_told_of_is_passed_over(tmp_path):
    writer = Saver(tmp_path, starts=[0])
    for step in (2, 5):
        writer.save(step=step, generation=1)
    reader = Saver(tmp_path, starts=[0])
    assert reader.restore(logged_step=2) == 2
    assert "nobody can tell the log of its step 3" in reader.told[-1]["text"]
    assert reader.restore(logged_step=4) == 5


def test_only_untrustworthy_checkpoints_are_an_error_that_names_them(tmp_path):
    Saver(tmp_path, starts=[0]).save(step=5, generation=1)
    with pytest.raises(CheckpointError, match=r"step_00000005: generation 1 wrote it after"):
        Saver(tmp_path, starts=[0, 2]).restore(logged_step=5)


def test_given_up_generation_leaves_the_store_alone_once_a_later_one_writes(tmp_path):
    later = Saver(tmp_path, starts=[0, 2])
    assert later.save(step=3, generation=2)["op"] == "checkpoint_committed"
    refused = Saver(tmp_path, starts=[0]).save(step=9, generation=1)
    assert refused["op"] == "checkpoint_failed"
    assert "generation 1 was given up: generation 2 has saved step 3" in refused["error"]
    assert LocalStore(tmp_path).list_steps() == [3]


def test_step_that_a_given_up_generation_has_saved_is_saved_anew(tmp_path):
    Saver(tmp_path, starts=[0]).save(step=3, generation=1)
    later = Saver(tmp_path, starts=[0, 2])
    assert later.save(step=3, generation=2)["op"] == "checkpoint_committed"
    assert LocalStore(tmp_path).read_manifest(3).generation == 2


def test_step_that_another_rank_has_saved_is_not_saved_twice(tmp_path):
    Saver(tmp_path, starts=[0]).save(step=2, generation=1)
    assert Saver(tmp_path, starts=[0, 2]).save(step=2, generation=2)["op"] == "checkpoint_committed"
    assert LocalStore(tmp_path).read_manifest(2).generation == 1


class BestSaver(Saver):
    """A rank 0 that evaluates, and keeps the newest checkpoint and the best one."""

    def __init__(self, folder, *, starts: list[int]) -> None:
        super().__init__(folder, starts=starts)
        config = config_of({"best": {"metric": "loss"}, "keep": 1})
        self.checkpointer._config = config
        self.loop.judge = Judge(config)
        self.group = SimpleNamespace(rank=0, generation=len(starts))

    def evaluate(self, *, step: int, loss: float) -> None:
        self.loop.step = step
        self.loop.judge.take(step, {"loss": loss})
        self.checkpointer.after_eval(self.group)

    def join(self) -> list[int]:
        self.checkpointer.join()
        return self.checkpointer._store.list_steps()


def test_best_checkpoint_stays_beside_the_newest_ones(tmp_path):
    saver = BestSaver(tmp_path, starts=[0])
    saver.evaluate(step=2, loss=0.5)
    saver.join()
    for step in (3, 4, 5):
        saver.save(step=step, generation=1)
    saver.evaluate(step=5, loss=0.7)
    assert saver.join() == [2, 5]
    saver.evaluate(step=6, loss=0.4)
    assert saver.join() == [6]


def test_evaluation_that_is_no_better_saves_nothing(tmp_path):
    saver = BestSaver(tmp_path, starts=[0])
    for step, loss in ((2, 0.5), (3, 0.5), (4, math.nan), (5, 0.6)):
        saver.evaluate(step=step, loss=loss)
    assert saver.join() == [2]


def test_next_generation_at_the_same_step_saves_the_best_that_its_dead_rank_0_could_not(tmp_path):
    first, second = BestSaver(tmp_path, starts=[0]), BestSaver(tmp_path, starts=[0, 4])
    first.evaluate(step=2, loss=0.5)
    first.join()
    first.loop.step = 4
    first.loop.judge.take(4, {"loss": 0.3})  # and here it dies
    second.loop.step = 4
    second.loop.judge.load_state_dict(first.loop.judge.state_dict())
    second.checkpointer.after_eval(second.group)
    assert second.join() == [4]


def test_when_the_best_is_lost_the_next_one_that_beats_what_is_durable_is_saved(tmp_path):
    first, second = BestSaver(tmp_path, starts=[0]), BestSaver(tmp_path, starts=[0, 5])
    first.evaluate(step=2, loss=0.5)
    first.join()
    second.loop.judge.load_state_dict(first.loop.judge.state_dict())
    second.loop.judge.take(4, {"loss": 0.3})  # its weights are gone: the job stands at step 5
    second.evaluate(step=6, loss=0.6)
    assert second.join() == [2]
    second.evaluate(step=8, loss=0.4)
    assert second.join() == [8]
    [warning] = [m["text"] for m in second.told if m["op"] == "log"]
    assert warning == (
        "step 8 is saved as the best that is left: the weights of step 4 never became durable"
    )


class SlowStore(LocalStore):
    """Does not begin to write before it may."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.may_write = threading.Event()

    def begin(self, step: int) -> str:
        assert self.may_write.wait(60)
        return super().begin(step)


def test_best_state_waits_for_the_checkpoint_in_flight_and_training_does_not(tmp_path):
    saver = BestSaver(tmp_path, starts=[0])
    store = saver.checkpointer._store = SlowStore(tmp_path)
    for step, loss in ((1, 0.9), (2, 0.5), (3, 0.4)):
        saver.evaluate(step=step, loss=loss)  # returns although nothing can be written
    assert store.list_steps() == []
    store.may_write.set()
    assert saver.join() == [3]
    committed = [m["record"]["step"] for m in saver.told if m["op"] == "checkpoint_committed"]
    assert committed == [1, 3]  # step 2 had made room for what was better


def test_generation_that_was_given_up_removes_nothing_of_a_later_one(tmp_path):
    old, new = BestSaver(tmp_path, starts=[0]), BestSaver(tmp_path, starts=[0, 9])
    store = old.checkpointer._store = SlowStore(tmp_path)
    old.evaluate(step=9, loss=0.5)
    new.evaluate(step=10, loss=0.4)
    new.save(step=11, generation=2)
    store.may_write.set()
    assert old.join() == [9, 10, 11]  # the best of the later one is among them
