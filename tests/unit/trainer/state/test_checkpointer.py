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
from etrain_jupyter.trainer.boundary import Boundary
from etrain_jupyter.trainer.group.rendezvous import BroadcastStore
from etrain_jupyter.trainer.state.checkpointer import Checkpointer
from etrain_jupyter.trainer.state.parts import EXTRA_PART
from etrain_jupyter.trainer.state.restoring import restore
from etrain_jupyter.trainer.state.train_state import BestTracker, Mark, WorkPlan
from etrain_jupyter.wire import messages


class Net(nn.Module):
    """Weights in another memory format, tied weights, and a buffer outside of ``state_dict``."""

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


class State:
    """The state of a job, without training."""

    def __init__(self, *, with_scaler: bool, config: TrainConfig | None = None) -> None:
        model = Net()
        extras = {"scaler": torch.amp.GradScaler("cpu", init_scale=64.0)} if with_scaler else {}
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        self.config = config or config_of({})
        self.workload = SimpleNamespace(
            model=model, optimizer=optimizer, extras=extras, shards=None
        )
        self.plan = WorkPlan(
            num_train=10, num_eval=0, global_batch_size=2, steps_per_epoch=5, total_steps=5
        )
        self.step = 0
        self.position = 0
        self.is_done = False
        self.marks = (Mark(0, 0), Mark(1, 2))
        self.best_tracker = BestTracker(self.config)

    def counters(self) -> dict[str, int]:
        return {"step": self.step}

    def set_counters(self, counters: dict[str, int]) -> None:
        self.step = counters["step"]

    def train(self) -> None:
        for parameter in self.workload.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.workload.optimizer.step()
        self.step += 1


def save_and_restore(folder, saved: State, fresh: State) -> dict:
    sent: list[dict] = []
    store = LocalStore(folder)
    Checkpointer(store=store, state=saved, job_id="job", send=sent.append).save_now(1)
    assert [type(message) for message in sent] == [messages.CheckpointWritten]
    files = open_newest(store, job_id="job").files
    restore(fresh, files)
    return files


def test_restored_trainer_continues_exactly(tmp_path):
    saved, fresh = State(with_scaler=True), State(with_scaler=True)
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
    saved = State(with_scaler=False)
    files = save_and_restore(tmp_path, saved, State(with_scaler=False))
    told = saved.workload.model.state_dict()
    opened = load_file(files["model.safetensors"])
    assert sorted(opened) == sorted(told)
    assert all(torch.equal(opened[name], told[name]) for name in told)


def test_checkpoint_without_a_scaler_does_not_change_a_new_one(tmp_path):
    saved, fresh = State(with_scaler=False), State(with_scaler=True)
    save_and_restore(tmp_path, saved, fresh)
    assert fresh.workload.extras["scaler"].get_scale() == 64.0


def test_config_of_a_transformers_model_is_stored_next_to_its_weights(tmp_path):
    saved = State(with_scaler=False)
    saved.workload.model.config = SimpleNamespace(to_json_string=lambda: '{"hidden_size": 4}')
    saved.workload.model.save_pretrained = print

    files = save_and_restore(tmp_path, saved, State(with_scaler=False))

    config = json.loads(files["config.json"].read_text())
    assert config == {"architectures": ["Net"], "hidden_size": 4}


def test_model_of_another_library_has_no_config(tmp_path):
    saved = State(with_scaler=False)
    saved.workload.model.config = {"hidden_size": 4}  # its own attribute, for another purpose

    files = save_and_restore(tmp_path, saved, State(with_scaler=False))

    assert "config.json" not in files


def test_checkpoint_keeps_the_records_that_the_log_may_not_have_yet(tmp_path):
    saved, fresh = State(with_scaler=False), State(with_scaler=False)
    saved.train()
    common = {"store": LocalStore(tmp_path), "job_id": "job"}
    records = [{"step": 1, "loss": 0.5}]
    writer = Checkpointer(
        state=saved, send=lambda _: None, records_after=lambda step: records, **common
    )
    reader = Checkpointer(state=fresh, send=lambda _: None, **common)
    assert reader.restorer.newest(logged_step=0) is None
    writer.save_now(1)
    assert reader.restorer.newest(logged_step=0) == records


class Page:
    """Fake progress page that records the phase of each heartbeat."""

    def __init__(self) -> None:
        self.beats: list[str] = []

    def beat(self, phase: str = "staging") -> None:
        self.beats.append(phase)


class Saver:
    """A checkpointer of one generation, and the messages that it sent."""

    def __init__(
        self, folder, *, starts: list[int], checkpoint: dict | None = None, store=LocalStore
    ) -> None:
        self.state = State(with_scaler=False, config=config_of(checkpoint or {}))
        self.page = Page()
        self.sent: list[dict] = []
        self.store = store(folder)
        self.checkpointer = Checkpointer(
            store=self.store,
            state=self.state,
            job_id="job",
            send=self.sent.append,
            records_after=lambda step: [{"step": self.state.step}],
            starts=starts,
            page=self.page,
        )

    def save(self, *, step: int, generation: int) -> dict:
        self.state.step = step
        self.checkpointer.save_now(generation)
        return self.sent[-1]

    def restore(self, *, logged_step: int) -> int:
        self.checkpointer.restorer.newest(logged_step=logged_step)
        return self.state.step


def test_checkpoint_of_a_fenced_generation_is_skipped(tmp_path):
    cut_off = Saver(tmp_path, starts=[0])
    for step in (2, 3):
        cut_off.save(step=step, generation=1)
    later = Saver(tmp_path, starts=[0, 2])
    assert later.restore(logged_step=3) == 2
    assert "generation 1 wrote it after it had been abandoned" in later.sent[-1].text


def test_checkpoint_with_a_gap_to_the_log_is_skipped(tmp_path):
    writer = Saver(tmp_path, starts=[0])
    for step in (2, 5):
        writer.save(step=step, generation=1)
    reader = Saver(tmp_path, starts=[0])
    assert reader.restore(logged_step=2) == 2
    assert "it has no record of step 3, and the log ends at 2" in reader.sent[-1].text
    assert reader.restore(logged_step=4) == 5


def test_error_lists_the_checkpoints_if_all_are_invalid(tmp_path):
    Saver(tmp_path, starts=[0]).save(step=5, generation=1)
    with pytest.raises(CheckpointError, match=r"step_00000005: generation 1 wrote it after"):
        Saver(tmp_path, starts=[0, 2]).restore(logged_step=5)


def test_fenced_generation_does_not_write_once_a_later_one_has(tmp_path):
    later = Saver(tmp_path, starts=[0, 2])
    assert isinstance(later.save(step=3, generation=2), messages.CheckpointWritten)
    refused = Saver(tmp_path, starts=[0]).save(step=9, generation=1)
    assert isinstance(refused, messages.CheckpointNotWritten)
    assert "generation 1 was abandoned: generation 2 has saved step 3" in refused.error
    assert LocalStore(tmp_path).list_steps() == [3]


def test_invalid_checkpoint_of_the_same_step_is_replaced(tmp_path):
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
    """A rank 0 that evaluates, and keeps the newest checkpoints and the best one."""

    def __init__(self, folder, *, starts: list[int], keep: int = 1, store=LocalStore) -> None:
        checkpoint = {"best": {"metric": "loss"}, "keep": keep}
        super().__init__(folder, starts=starts, checkpoint=checkpoint, store=store)
        self.group = SimpleNamespace(rank=0, generation=len(starts))

    def evaluate(self, *, step: int, loss: float) -> None:
        self.state.step = step
        self.state.best_tracker.take(step, {"loss": loss})
        self.checkpointer.after_eval(self.group)

    def reach_boundary(self) -> None:
        self.checkpointer.after_step(Boundary(group=self.group, step_s=0.1))

    def wait(self) -> list[int]:
        """Return the steps that are durable once nothing is written any more."""
        self.checkpointer.wait()
        return self.store.list_steps()


def test_best_checkpoint_is_kept_in_addition_to_the_newest_ones(tmp_path):
    saver = BestSaver(tmp_path, starts=[0])
    saver.evaluate(step=2, loss=0.5)
    saver.wait()
    for step in (3, 4, 5):
        saver.save(step=step, generation=1)
    saver.evaluate(step=5, loss=0.7)
    assert saver.wait() == [2, 5]
    saver.evaluate(step=6, loss=0.4)
    assert saver.wait() == [6]


def test_evaluation_that_is_not_better_saves_nothing(tmp_path):
    saver = BestSaver(tmp_path, starts=[0])
    for step, loss in ((2, 0.5), (3, 0.5), (4, math.nan), (5, 0.6)):
        saver.evaluate(step=step, loss=loss)
    assert saver.wait() == [2]


def test_next_generation_at_the_same_step_saves_the_best_that_its_dead_rank_0_could_not(tmp_path):
    first, second = BestSaver(tmp_path, starts=[0]), BestSaver(tmp_path, starts=[0, 4])
    first.evaluate(step=2, loss=0.5)
    first.wait()
    first.state.step = 4
    first.state.best_tracker.take(4, {"loss": 0.3})  # and then it dies
    second.state.step = 4
    second.state.best_tracker.load_state_dict(first.state.best_tracker.state_dict())
    second.checkpointer.after_eval(second.group)
    assert second.wait() == [4]


def test_when_the_best_is_lost_the_next_one_that_beats_what_is_durable_is_saved(tmp_path):
    first, second = BestSaver(tmp_path, starts=[0]), BestSaver(tmp_path, starts=[0, 5])
    first.evaluate(step=2, loss=0.5)
    first.wait()
    second.state.best_tracker.load_state_dict(first.state.best_tracker.state_dict())
    second.state.best_tracker.take(4, {"loss": 0.3})  # these weights are lost
    second.evaluate(step=6, loss=0.6)
    assert second.wait() == [2]
    second.evaluate(step=8, loss=0.4)
    assert second.wait() == [8]
    [warning] = [m.text for m in second.sent if isinstance(m, messages.TextLogged)]
    assert warning == (
        "step 8 is saved as the best remaining step: the weights of step 4 never became durable"
    )


class SlowStore(LocalStore):
    """Blocks every write until ``may_write`` is set."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.may_write = threading.Event()

    def begin(self, step: int) -> str:
        assert self.may_write.wait(60)
        return super().begin(step)


def test_best_state_waits_for_the_checkpoint_in_flight_and_training_does_not(tmp_path):
    saver = BestSaver(tmp_path, starts=[0], store=SlowStore)
    store = saver.store
    for step, loss in ((1, 0.9), (2, 0.5), (3, 0.4)):
        saver.evaluate(step=step, loss=loss)  # returns although nothing can be written
    assert store.list_steps() == []
    store.may_write.set()
    assert saver.wait() == [3]
    committed = [m.record["step"] for m in saver.sent if isinstance(m, messages.CheckpointWritten)]
    assert committed == [1, 3]  # step 2 was replaced by the better step 3


def test_fenced_generation_removes_no_checkpoint_of_a_later_one(tmp_path):
    old = BestSaver(tmp_path, starts=[0], store=SlowStore)
    new = BestSaver(tmp_path, starts=[0, 9])
    old.evaluate(step=9, loss=0.5)
    new.evaluate(step=10, loss=0.4)
    new.save(step=11, generation=2)
    old.store.may_write.set()
    assert old.wait() == [9, 10, 11]  # including the best of the later one


def test_copy_in_flight_is_not_overwritten_by_the_next_one(tmp_path):
    saver = BestSaver(tmp_path, starts=[0], keep=9, store=SlowStore)
    store = saver.store
    bias = saver.state.workload.model.head.bias.data

    def evaluate(step: int) -> None:
        bias.fill_(step)
        saver.evaluate(step=step, loss=1 / step)

    store.may_write.set()
    evaluate(1)
    saver.wait()  # its copy is free now
    store.may_write.clear()
    evaluate(2)
    evaluate(3)  # while that of step 2 is being written
    store.may_write.set()
    assert saver.wait() == [1, 2, 3]
    evaluate(4)
    assert saver.wait() == [1, 2, 3, 4]
    saved = [open_step(store, step)[1]["model.safetensors"] for step in (1, 2, 3, 4)]
    assert [load_file(path)["head.bias"].unique().tolist() for path in saved] == [
        [1],
        [2],
        [3],
        [4],
    ]


class DeafStore(LocalStore):
    """Blocks every request until ``may_answer`` is set, and records the requesting threads."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.asked_by: set[str] = set()
        self.may_answer = threading.Event()

    def list_steps(self) -> list[int]:
        self.asked_by.add(threading.current_thread().name)
        assert self.may_answer.wait(60)
        return super().list_steps()


def test_unresponsive_store_never_blocks_training(tmp_path):
    BestSaver(tmp_path, starts=[0]).evaluate(step=1, loss=0.9)
    saver = BestSaver(tmp_path, starts=[0, 5], store=DeafStore)
    store = saver.store
    for step, loss in ((6, 0.5), (7, 0.7), (8, 0.4)):
        saver.evaluate(step=step, loss=loss)
        saver.checkpointer.request()
        saver.reach_boundary()
    assert store.asked_by <= {"etrain-checkpoint_0"}
    store.may_answer.set()
    assert saver.wait() == [8]
    committed = [m.record["step"] for m in saver.sent if isinstance(m, messages.CheckpointWritten)]
    assert committed == [6, 8]


def test_evaluation_that_is_no_better_than_what_is_durable_is_dropped_by_the_writer(tmp_path):
    first, second = BestSaver(tmp_path, starts=[0]), BestSaver(tmp_path, starts=[0, 3])
    first.evaluate(step=2, loss=0.5)
    first.wait()
    second.state.best_tracker.load_state_dict(first.state.best_tracker.state_dict())
    second.evaluate(step=4, loss=0.6)  # it does not know yet that step 2 is durable
    assert second.wait() == [2]
    assert second.sent == []


class ReadOnlyStore(LocalStore):
    """Accepts checkpoints but cannot remove any."""

    def prune(self, keep_steps):
        raise CheckpointError("old checkpoints cannot be removed: access denied")


def test_checkpoint_counts_even_if_old_ones_cannot_be_removed(tmp_path):
    saver = Saver(tmp_path, starts=[0], store=ReadOnlyStore)
    for step in (1, 2, 3):
        saver.save(step=step, generation=1)
    kinds = [type(message) for message in saver.sent]
    assert kinds.count(messages.CheckpointWritten) == 3
    [warning] = [message.text for message in saver.sent if isinstance(message, messages.TextLogged)]
    assert warning == "old checkpoints cannot be removed: access denied. Training continues"


class TidyStore(LocalStore):
    """Removes old checkpoints, with a notice."""

    notice = "uploads cannot be listed"


def test_incomplete_clean_up_is_logged_once(tmp_path):
    """Review R3: the removal succeeded, and the log has the notice."""
    saver = Saver(tmp_path, starts=[0], store=TidyStore)
    for step in (1, 2, 3):
        saver.save(step=step, generation=1)
    [warning] = [message.text for message in saver.sent if isinstance(message, messages.TextLogged)]
    assert warning == "uploads cannot be listed. Training continues"


class Payload:
    """Creates a file when it is unpickled."""

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
    assert "step_00000005: " in reader.sent[-1].text
    assert name in reader.sent[-1].text
    assert not proof.exists()


class Outage(LocalStore):
    """Refuses writes while ``is_down`` is set."""

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


def best_in_an_outage(folder, *, keep: int = 1) -> tuple[BestSaver, Outage]:
    saver = BestSaver(folder, starts=[0], keep=keep, store=Outage)
    store = saver.store
    saver.state.workload.model.head.bias.data.fill_(2)
    saver.evaluate(step=2, loss=0.5)
    saver.wait()
    [failure] = [m for m in saver.sent if isinstance(m, messages.CheckpointNotWritten)]
    assert failure.error.endswith("These are the best weights so far; the next attempt is in 5 s")
    saver.state.workload.model.head.bias.data.fill_(7)  # training continues
    saver.state.step = 3
    return saver, store


def test_best_weights_that_could_not_be_written_are_retried_after_the_back_off(tmp_path):
    saver, store = best_in_an_outage(tmp_path)
    store.is_down = False
    saver.reach_boundary()
    assert saver.wait() == []  # not before the back-off has elapsed
    saver.checkpointer._retry_at = 0.0
    saver.reach_boundary()
    assert saver.wait() == [2]
    assert weights_of(store, 2) == [2]


def test_best_weights_are_retried_as_soon_as_the_store_takes_another_checkpoint(tmp_path):
    saver, store = best_in_an_outage(tmp_path, keep=3)
    saver.save(step=3, generation=1)  # overwrites no copy that is still needed
    assert store.list_steps() == []
    store.is_down = False
    saver.save(step=4, generation=1)
    assert saver.wait() == [2, 4]
    assert (weights_of(store, 2), weights_of(store, 4)) == ([2], [7])


def test_better_weights_replace_those_that_could_not_be_written(tmp_path):
    saver, store = best_in_an_outage(tmp_path)
    store.is_down = False
    saver.evaluate(step=5, loss=0.4)
    assert saver.wait() == [5]
    saver.checkpointer._retry_at = 0.0
    saver.reach_boundary()
    assert saver.wait() == [5]


def test_worse_weights_are_not_saved_while_the_best_wait_for_the_store(tmp_path):
    saver, store = best_in_an_outage(tmp_path)
    store.is_down = False
    saver.evaluate(step=5, loss=0.6)
    assert saver.wait() == []


def test_every_piece_of_a_part_sends_a_heartbeat_while_the_main_thread_waits(tmp_path):
    saver = Saver(tmp_path, starts=[0])
    saver.state.workload.model.register_buffer("large", torch.zeros(4 << 20))  # four pieces
    saver.save(step=1, generation=1)
    assert saver.page.beats.count("saving") >= 8  # four pieces, and the parts
    assert set(saver.page.beats) == {"staging", "saving"}


def test_trainer_that_exits_logs_that_it_waits_for_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("etrain_jupyter.trainer.state.checkpointer.CLOSE_LOG_AFTER_S", 0.01)
    saver = BestSaver(tmp_path, starts=[0], store=SlowStore)
    store = saver.store
    saver.evaluate(step=1, loss=0.5)
    closing = threading.Thread(target=saver.checkpointer.close)
    closing.start()
    while not saver.sent:
        closing.join(0.01)
    assert "this trainer exits once its checkpoint is written" in saver.sent[0].text
    store.may_write.set()
    closing.join()
    assert store.list_steps() == [1]


def test_defect_while_a_checkpoint_is_written_is_reported(tmp_path, monkeypatch):
    """Review R2: the writer thread ended silently, and the coordinator waited for minutes."""
    saver = Saver(tmp_path, starts=[0])

    def fail(*_):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(saver.checkpointer._writer, "_commit", fail)
    told = saver.save(step=2, generation=1)
    assert isinstance(told, messages.CheckpointNotWritten)
    assert told.step == 2
    assert told.error == "ZeroDivisionError: a mistake"
    monkeypatch.undo()
    assert isinstance(saver.save(step=4, generation=1), messages.CheckpointWritten)


def test_wants_save_gives_the_same_answer_twice_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("etrain_jupyter.trainer.state.sharded_write.SHARDED_BYTES", 1)
    store = SimpleNamespace(is_remote=True)
    saver = Saver(tmp_path, starts=[0], checkpoint={"every": "2 steps"}, store=lambda _: store)
    saver.checkpointer.begin(
        SimpleNamespace(rank=0, world_size=2), BroadcastStore(lambda key, value: None)
    )
    saver.checkpointer._num_bytes = 1
    due, not_due = (Mark(1, 2), Mark(2, 4)), (Mark(2, 4), Mark(3, 6))
    assert [saver.checkpointer.wants_save(*due) for _ in range(3)] == [True] * 3
    # Step 2 is undone, so nothing is due after another step.
    assert [saver.checkpointer.wants_save(*not_due) for _ in range(3)] == [False] * 3
    assert not saver.checkpointer._policy.is_owed


def test_scheduled_checkpoint_is_not_replaced_by_a_best_state_of_the_same_boundary(tmp_path):
    saver = BestSaver(tmp_path, starts=[0], keep=9, store=SlowStore)
    saver.checkpointer.request()
    saver.reach_boundary()
    for step in (1, 2):
        saver.evaluate(step=step, loss=1 / step)
    saver.store.may_write.set()
    assert saver.wait() == [0, 2]


def test_unsaved_best_weights_stay_in_memory_while_the_store_is_down(tmp_path):
    saver, store = best_in_an_outage(tmp_path, keep=3)
    for step in (3, 4):
        saver.save(step=step, generation=1)
    store.is_down = False
    saver.save(step=5, generation=1)
    assert saver.wait() == [2, 5]
    assert weights_of(store, 2) == [2]
