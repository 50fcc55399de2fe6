"""A checkpoint holds the complete state, and opens with plain safetensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from etrain_jupyter.checkpoints import LocalStore
from etrain_jupyter.checkpoints.base import open_newest
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import CheckpointError
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
