"""A checkpoint holds the complete state, and opens with plain safetensors."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import LocalStore
from etrain_jupyter.storage.checkpoints.base import open_newest, open_step
from etrain_jupyter.trainer.loop.best_tracker import Judge
from etrain_jupyter.trainer.loop.schedule import Mark, WorkPlan
from etrain_jupyter.trainer.state.checkpointer import Checkpointer
from etrain_jupyter.trainer.state.parts import EXTRA_PART
from etrain_jupyter.trainer.state.restoring import restore
from etrain_jupyter.wire import messages


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
        self.is_save_agreed = False
        self.last_step_s = 0.1
        self.marks = (Mark(0, 0), Mark(1, 2))
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
    assert [type(message) for message in told] == [messages.CheckpointWritten]
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


def test_config_of_a_transformers_model_lies_beside_its_weights(tmp_path):
    saved = Loop(with_scaler=False)
    saved.workload.model.config = SimpleNamespace(to_json_string=lambda: '{"hidden_size": 4}')
    saved.workload.model.save_pretrained = print

    files = save_and_restore(tmp_path, saved, Loop(with_scaler=False))

    config = json.loads(files["config.json"].read_text())
    assert config == {"architectures": ["Net"], "hidden_size": 4}


def test_model_that_is_none_of_transformers_has_no_config(tmp_path):
    saved = Loop(with_scaler=False)
    saved.workload.model.config = {"hidden_size": 4}  # of its own, for its own use

    files = save_and_restore(tmp_path, saved, Loop(with_scaler=False))

    assert "config.json" not in files


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
    assert "generation 1 wrote it after it had been given up" in later.told[-1].text


def test_checkpoint_with_steps_that_the_log_cannot_be_told_of_is_passed_over(tmp_path):
    writer = Saver(tmp_path, starts=[0])
    for step in (2, 5):
        writer.save(step=step, generation=1)
    reader = Saver(tmp_path, starts=[0])
    assert reader.restore(logged_step=2) == 2
    assert "nobody can tell the log of its step 3" in reader.told[-1].text
    assert reader.restore(logged_step=4) == 5


def test_only_untrustworthy_checkpoints_are_an_error_that_names_them(tmp_path):
    Saver(tmp_path, starts=[0]).save(step=5, generation=1)
    with pytest.raises(CheckpointError, match=r"step_00000005: generation 1 wrote it after"):
        Saver(tmp_path, starts=[0, 2]).restore(logged_step=5)


def test_given_up_generation_leaves_the_store_alone_once_a_later_one_writes(tmp_path):
    later = Saver(tmp_path, starts=[0, 2])
    assert isinstance(later.save(step=3, generation=2), messages.CheckpointWritten)
    refused = Saver(tmp_path, starts=[0]).save(step=9, generation=1)
    assert isinstance(refused, messages.CheckpointNotWritten)
    assert "generation 1 was given up: generation 2 has saved step 3" in refused.error
    assert LocalStore(tmp_path).list_steps() == [3]


def test_step_that_a_given_up_generation_has_saved_is_saved_anew(tmp_path):
    Saver(tmp_path, starts=[0]).save(step=3, generation=1)
    later = Saver(tmp_path, starts=[0, 2])
    assert isinstance(later.save(step=3, generation=2), messages.CheckpointWritten)
    assert LocalStore(tmp_path).read_manifest(3).generation == 2


def test_step_that_another_rank_has_saved_is_not_saved_twice(tmp_path):
    Saver(tmp_path, starts=[0]).save(step=2, generation=1)
    assert isinstance(
        Saver(tmp_path, starts=[0, 2]).save(step=2, generation=2), messages.CheckpointWritten
    )
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
    [warning] = [m.text for m in second.told if isinstance(m, messages.TextLogged)]
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
    committed = [m.record["step"] for m in saver.told if isinstance(m, messages.CheckpointWritten)]
    assert committed == [1, 3]  # step 2 had made room for what was better


def test_generation_that_was_given_up_removes_nothing_of_a_later_one(tmp_path):
    old, new = BestSaver(tmp_path, starts=[0]), BestSaver(tmp_path, starts=[0, 9])
    store = old.checkpointer._store = SlowStore(tmp_path)
    old.evaluate(step=9, loss=0.5)
    new.evaluate(step=10, loss=0.4)
    new.save(step=11, generation=2)
    store.may_write.set()
    assert old.join() == [9, 10, 11]  # the best of the later one is among them


def test_copy_in_flight_is_not_written_over_by_the_next_one(tmp_path):
    saver = BestSaver(tmp_path, starts=[0])
    saver.checkpointer._config = config_of({"best": {"metric": "loss"}, "keep": 9})
    bias = saver.loop.workload.model.head.bias.data

    def evaluate(step: int) -> None:
        bias.fill_(step)
        saver.evaluate(step=step, loss=1 / step)

    evaluate(1)
    saver.join()  # its copy is free now
    store = saver.checkpointer._store = SlowStore(tmp_path)
    evaluate(2)
    evaluate(3)  # while that of step 2 is being written
    store.may_write.set()
    assert saver.join() == [1, 2, 3]
    evaluate(4)
    assert saver.join() == [1, 2, 3, 4]
    saved = [open_step(store, step)[1]["model.safetensors"] for step in (1, 2, 3, 4)]
    assert [load_file(path)["head.bias"].unique().tolist() for path in saved] == [
        [1],
        [2],
        [3],
        [4],
    ]


class DeafStore(LocalStore):
    """Answers nothing before it may, and tells whether it was asked."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.asked_by: set[str] = set()
        self.may_answer = threading.Event()

    def list_steps(self) -> list[int]:
        self.asked_by.add(threading.current_thread().name)
        assert self.may_answer.wait(60)
        return super().list_steps()


def test_store_that_does_not_answer_never_makes_training_wait(tmp_path):
    BestSaver(tmp_path, starts=[0]).evaluate(step=1, loss=0.9)
    saver = BestSaver(tmp_path, starts=[0, 5])
    store = saver.checkpointer._store = DeafStore(tmp_path)
    for step, loss in ((6, 0.5), (7, 0.7), (8, 0.4)):
        saver.evaluate(step=step, loss=loss)
        saver.checkpointer.ask()
        saver.checkpointer.after_step(saver.group)
    assert store.asked_by <= {"etrain-checkpoint"}
    store.may_answer.set()
    assert saver.join() == [8]
    committed = [m.record["step"] for m in saver.told if isinstance(m, messages.CheckpointWritten)]
    assert committed == [6, 8]


def test_evaluation_that_is_no_better_than_what_is_durable_is_dropped_by_the_writer(tmp_path):
    first, second = BestSaver(tmp_path, starts=[0]), BestSaver(tmp_path, starts=[0, 3])
    first.evaluate(step=2, loss=0.5)
    first.join()
    second.loop.judge.load_state_dict(first.loop.judge.state_dict())
    second.evaluate(step=4, loss=0.6)  # it does not know yet that step 2 is durable
    assert second.join() == [2]
    assert second.told == []


class ReadOnlyStore(LocalStore):
    """Takes checkpoints and lets none go."""

    def prune(self, keep_steps):
        raise CheckpointError("old checkpoints cannot be removed: access denied")


def test_checkpoint_counts_though_old_ones_cannot_be_removed(tmp_path):
    saver = Saver(tmp_path, starts=[0])
    saver.checkpointer._store = ReadOnlyStore(tmp_path)
    for step in (1, 2, 3):
        saver.save(step=step, generation=1)
    kinds = [type(message) for message in saver.told]
    assert kinds.count(messages.CheckpointWritten) == 3
    [warning] = [message.text for message in saver.told if isinstance(message, messages.TextLogged)]
    assert warning == "old checkpoints cannot be removed: access denied. Training goes on"


class TidyStore(LocalStore):
    """Removes what is old, and something is left over."""

    notice = "uploads cannot be listed"


def test_what_a_clean_up_left_over_is_said_once(tmp_path):
    """Review R3: the removal worked, and the job's log has what it could not do."""
    saver = Saver(tmp_path, starts=[0])
    saver.checkpointer._store = TidyStore(tmp_path)
    for step in (1, 2, 3):
        saver.save(step=step, generation=1)
    [warning] = [message.text for message in saver.told if isinstance(message, messages.TextLogged)]
    assert warning == "uploads cannot be listed. Training goes on"


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_pickle_with_a_manifest_that_fits_is_refused_and_not_run(tmp_path, name):
    for step in (2, 5):
        Saver(tmp_path, starts=[0]).save(step=step, generation=1)
    store, proof = LocalStore(tmp_path), tmp_path / "was_run"
    manifest = store.read_manifest(5)
    part = store.put_part(store.begin(5), name, pickle.dumps(Payload(proof)))
    parts = {**manifest.parts, name: part}
    text = dataclasses.replace(manifest, parts=parts).to_json()
    (tmp_path / "manifests" / "step_00000005.json").write_text(text)
    reader = Saver(tmp_path, starts=[0])
    assert reader.restore(logged_step=5) == 2
    assert "step_00000005: " in reader.told[-1].text
    assert name in reader.told[-1].text
    assert not proof.exists()


class Outage(LocalStore):
    """Takes nothing as long as it is down."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.is_down = True

    def begin(self, step: int) -> str:
        if self.is_down:
            raise CheckpointError("the store is down")
        return super().begin(step)


def weights_of(store: LocalStore, step: int) -> list[float]:
    path = open_step(store, step)[1]["model.safetensors"]
    return load_file(path)["head.bias"].unique().tolist()


def best_in_an_outage(folder) -> tuple[BestSaver, Outage]:
    saver = BestSaver(folder, starts=[0])
    store = saver.checkpointer._store = Outage(folder)
    saver.loop.workload.model.head.bias.data.fill_(2)
    saver.evaluate(step=2, loss=0.5)
    saver.join()
    [failure] = [m for m in saver.told if isinstance(m, messages.CheckpointNotWritten)]
    assert failure.error.endswith("These weights are the best so far, and are tried again in 5 s")
    saver.loop.workload.model.head.bias.data.fill_(7)  # training goes on
    saver.loop.step = 3
    return saver, store


def test_best_weights_that_could_not_be_written_are_tried_again_by_themselves(tmp_path):
    saver, store = best_in_an_outage(tmp_path)
    store.is_down = False
    saver.checkpointer.after_step(saver.group)
    assert saver.join() == []  # not before its time
    saver.checkpointer._retry_at = 0.0
    saver.checkpointer.after_step(saver.group)
    assert saver.join() == [2]
    assert weights_of(store, 2) == [2]


def test_best_weights_follow_as_soon_as_the_store_takes_another_checkpoint(tmp_path):
    saver, store = best_in_an_outage(tmp_path)
    saver.checkpointer._config = config_of({"best": {"metric": "loss"}, "keep": 3})
    saver.save(step=3, generation=1)  # overwrites no copy that is still needed
    assert store.list_steps() == []
    store.is_down = False
    saver.save(step=4, generation=1)
    assert saver.join() == [2, 4]
    assert (weights_of(store, 2), weights_of(store, 4)) == ([2], [7])


def test_better_weights_take_the_place_of_those_that_could_not_be_written(tmp_path):
    saver, store = best_in_an_outage(tmp_path)
    store.is_down = False
    saver.evaluate(step=5, loss=0.4)
    assert saver.join() == [5]
    saver.checkpointer._retry_at = 0.0
    saver.checkpointer.after_step(saver.group)
    assert saver.join() == [5]


def test_worse_weights_are_not_saved_while_the_best_wait_for_the_store(tmp_path):
    saver, store = best_in_an_outage(tmp_path)
    store.is_down = False
    saver.evaluate(step=5, loss=0.6)
    assert saver.join() == []


def test_every_piece_of_a_part_is_a_sign_of_life_while_the_main_thread_waits(tmp_path):
    saver = Saver(tmp_path, starts=[0])
    beats: list[str] = []
    saver.loop.page = SimpleNamespace(beat=lambda phase="staging": beats.append(phase))
    saver.loop.workload.model.register_buffer("large", torch.zeros(4 << 20))  # four pieces
    saver.save(step=1, generation=1)
    assert beats.count("saving") >= 8  # four pieces, and the parts
    assert set(beats) == {"staging", "saving"}


def test_trainer_that_ends_says_that_it_waits_for_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("etrain_jupyter.trainer.state.checkpointer.CLOSE_TELLS_S", 0.01)
    saver = BestSaver(tmp_path, starts=[0])
    store = saver.checkpointer._store = SlowStore(tmp_path)
    saver.evaluate(step=1, loss=0.5)
    closing = threading.Thread(target=saver.checkpointer.close)
    closing.start()
    while not saver.told:
        closing.join(0.01)
    assert "this trainer ends when its checkpoint is written" in saver.told[0].text
    store.may_write.set()
    closing.join()
    assert store.list_steps() == [1]


def test_defect_while_a_checkpoint_is_written_is_told(tmp_path, monkeypatch):
    """Review R2: the writing thread ended silently, and the coordinator waited for minutes."""
    saver = Saver(tmp_path, starts=[0])

    def fail(*_):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(saver.checkpointer, "_commit", fail)
    told = saver.save(step=2, generation=1)
    assert isinstance(told, messages.CheckpointNotWritten)
    assert told.step == 2
    assert told.error == "ZeroDivisionError: a mistake"
    monkeypatch.undo()
    assert isinstance(saver.save(step=4, generation=1), messages.CheckpointWritten)
