"""Reports of a rank's failures."""

from __future__ import annotations

import contextlib

import pytest
import torch

from etrain_jupyter.trainer import step_header
from etrain_jupyter.trainer.control.failures import DISCONNECTED, Failure, failure_of
from etrain_jupyter.trainer.group.pending import MAX_TEXT, text_of
from etrain_jupyter.trainer.group.process_group import BroadcastStore, CommunicationError, RankGroup
from etrain_jupyter.trainer.loop import train_loop
from etrain_jupyter.trainer.micro_batch import OUT_OF_MEMORY
from etrain_jupyter.trainer.state import state_sync, transfer
from etrain_jupyter.trainer.state.background_digest import BackgroundDigest
from etrain_jupyter.trainer.state.capture import take_state
from etrain_jupyter.trainer.state.checkpointer import Checkpointer
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.state.transfer import send_state
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.channel import FrameDecoder, frame
from etrain_jupyter.wire.codec import encode
from tests.unit.trainer.trainer_rig import TrainerRig


def group_of_two() -> RankGroup:
    store = BroadcastStore(lambda key, value: None)
    return RankGroup(generation=1, rank=0, world_size=2, store=store, host="127.0.0.1")


# Review G2: the report of a failed generation had no text.


def test_report_of_an_abort_has_no_error_since_another_rank_has_it():
    group = group_of_two()
    group.abort()
    assert failure_of(group, RuntimeError("Connection closed by peer")) == Failure()


@pytest.mark.parametrize("why", [OUT_OF_MEMORY, DISCONNECTED])
def test_report_excuses_errors_that_are_unrelated_to_connections(why):
    group = group_of_two()
    group.abort(why)
    assert failure_of(group, RuntimeError(why)) == Failure(error=why, is_excused=True)


@pytest.mark.parametrize(
    ("text", "backend"),
    [("[gloo/transport/tcp/pair.cc:547] Connection closed", "gloo"), ("NCCL error in: a", "nccl")],
)
def test_report_has_the_error_of_a_collective_that_torch_started_by_itself(text, backend):
    assert failure_of(group_of_two(), RuntimeError(text)) == Failure(error=text, backend=backend)


def test_text_of_a_report_is_bounded_and_valid_utf_8():
    text = text_of(RuntimeError(f"bad file \udce9 {'x' * 10_000}"))
    assert len(text) == MAX_TEXT
    [message] = FrameDecoder().feed(frame(encode(m.TextLogged(level="error", text=text))))
    assert message["text"].startswith("bad file \\udce9 xxx")


# Review G4: the first synchronization after a failing kernel is in our files, so every CUDA error
# of the notebook's code was mistaken for our defect: "trainer exited with code 1".

ASSERT = (
    "CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect."
)


@pytest.fixture
def rigs(tmp_path):
    made: list[TrainerRig] = []

    def make(*args, **keys) -> TrainerRig:
        made.append(TrainerRig(tmp_path / "run", *args, **keys))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


class Gpu:
    """Fake device: once broken, every call that would use it fails."""

    def __init__(self, monkeypatch, text: str = ASSERT) -> None:
        self.is_broken = False
        self._text = text
        places = [(step_header, "stack_means"), (state_sync, "take_state")]
        places += [(Checkpointer, "save_now")]
        places += [(BackgroundDigest, "begin"), (RunningBuffers, "put_back")]
        places += [(RunningBuffers, "moved_since")]
        self.calls: list[str] = []
        for owner, name in places:
            monkeypatch.setattr(owner, name, self._guard(name, getattr(owner, name)))

    def _guard(self, name, real):
        def call(*args, **keys):
            if self.is_broken:
                self.calls.append(name)
                raise device_error(self._text)
            return real(*args, **keys)

        return call


def device_error(text: str) -> Exception:
    return getattr(torch, "AcceleratorError", RuntimeError)(text)


def test_trainer_reports_the_phases_of_its_warm_up(rigs):
    rig = rigs(compile=True).start()

    said = [rig.wait_for(m.WarmUpBegun, m.TrainerHello) for _ in range(4)]

    assert [message.phase for message in said[:3]] == ["build", "trial", "compile"]
    assert isinstance(said[3], m.TrainerHello)


def test_device_side_assert_in_a_step_is_the_notebooks_error_with_its_code(rigs, monkeypatch):
    gpu = Gpu(monkeypatch)
    rig = rigs().start()
    rig.wait_for(m.TrainerHello)
    gpu.is_broken = True
    rig.form()
    told = rig.wait_for(m.UserCodeFailed, m.GenerationLeft)
    assert isinstance(told, m.UserCodeFailed)
    assert told.progress == (-1, 0), "its state cannot be read any more"
    assert "device-side assert triggered" in told.error
    assert "targets of CrossEntropyLoss must be 0 to classes - 1" in told.error
    assert "CUDA_LAUNCH_BLOCKING=1" in told.error
    assert "Cell In[3], line 12, in loss" in told.traceback
    assert "Cell In[3], line 9, in forward" in told.traceback
    assert rig.has_ended()
    assert rig.crash is None
    assert gpu.calls == ["stack_means"], "CUDA was used again"


def test_device_side_assert_in_the_warm_up_is_the_notebooks_error(rigs, monkeypatch):
    gpu = Gpu(monkeypatch)
    gpu.is_broken = True
    rig = rigs().start()
    told = rig.wait_for(m.UserCodeFailed)
    assert (told.generation, told.progress) == (0, (-1, 0))
    assert "device-side assert" in told.error
    assert rig.has_ended()
    assert rig.crash is None


def test_error_of_the_machines_gpu_ends_the_trainer_alone(rigs, monkeypatch):
    gpu = Gpu(monkeypatch, "CUDA error: uncorrectable ECC error encountered")
    rig = rigs().start()
    rig.wait_for(m.TrainerHello)
    gpu.is_broken = True
    rig.form()
    told = rig.wait_for(m.TextLogged, m.UserCodeFailed)
    assert told.text == (
        "the GPU failed, so this trainer exits: CUDA error: uncorrectable ECC error encountered"
    )
    assert rig.has_ended()
    assert "ECC" in str(rig.crash)
    assert gpu.calls == ["stack_means"], "CUDA was used again"


# Review G1: memory that ran out while the state was received failed the job as the notebook's
# error, although rank 0 held the newest state.


def newest_state(rig: TrainerRig, *, step: int):
    """Return the state that rank 0 sends: of a model like the trainer's, at some step."""
    torch.manual_seed(5)
    loop = rig.trainer._job.loop
    model = torch.nn.Module()
    model.layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    header, tensors = take_state(model, optimizer)
    counters = {**loop.state.counters(), "step": step, "position": 8 * step}
    return {"counters": counters, "records": [], **header}, tensors


def run_out_in(monkeypatch, *, times: int) -> list[str]:
    """Make the first allocations of the state fail; return the requested names."""
    real, asked = transfer.new_tensor, []

    def new_tensor(entry, device):
        asked.append(entry.name)
        if len(asked) <= times:
            raise torch.OutOfMemoryError(f"no memory for {entry.name}")
        return real(entry, device)

    monkeypatch.setattr(transfer, "new_tensor", new_tensor)
    return asked


def join(rig: TrainerRig, generation: int, *, step: int, is_sent: bool = True):
    """Make the trainer join as rank 1 and receive; return its next report."""
    with rig.peers(generation, 2, behind=(1,), logged_step=step) as [sender]:
        with contextlib.suppress(CommunicationError):
            if is_sent:
                send_state(sender, *newest_state(rig, step=step), [1])
            else:
                sender.abort("rank 0 is lost")
        return rig.wait_for(m.GenerationJoined, m.GenerationLeft, m.UserCodeFailed, m.TextLogged)


def test_new_rank_without_memory_receives_the_state_again_and_exits_the_second_time(
    rigs, monkeypatch
):
    run_out_in(monkeypatch, times=2)
    rig = rigs().start()
    rig.wait_for(m.TrainerHello)
    assert "retrying with the old state dropped" in join(rig, 1, step=4).text
    told = rig.wait_for(m.GenerationLeft, m.UserCodeFailed)
    assert (told.why, told.progress) == ("failed", (-1, 0))
    assert told.is_excused
    assert "no memory for" in told.error
    assert "batch: {micro: auto}" in told.error
    assert "this trainer exits" in join(rig, 2, step=4).text
    assert rig.has_ended()
    assert isinstance(rig.crash, torch.OutOfMemoryError)


def test_survivor_that_is_behind_drops_its_state_if_memory_runs_out(rigs, monkeypatch):
    rig = rigs().start()
    rig.wait_for(m.TrainerHello)
    rig.form(1)
    assert rig.wait_for(m.GenerationLeft).progress == (4, 0)
    run_out_in(monkeypatch, times=1)
    assert "retrying with the old state dropped" in join(rig, 2, step=5).text
    assert rig.wait_for(m.GenerationLeft, m.UserCodeFailed).progress == (-1, 0)
    told = join(rig, 3, step=5)
    assert isinstance(told, m.GenerationJoined)
    assert told.step == 5


def test_survivor_that_is_behind_keeps_its_state_until_the_new_one_is_complete(rigs):
    rig = rigs().start()
    rig.wait_for(m.TrainerHello)
    rig.form(1)
    rig.wait_for(m.GenerationLeft)
    told = join(rig, 2, step=5, is_sent=False)
    assert (told.why, told.progress) == ("failed", (4, 0))
    told = join(rig, 3, step=5)
    assert isinstance(told, m.GenerationJoined)
    assert told.step == 5


@pytest.mark.parametrize(("world_size", "keep"), [(2, True), (3, False)])
def test_older_state_is_kept_only_if_no_other_rank_has_the_newest(
    rigs, monkeypatch, world_size, keep
):
    rig = rigs().start()
    rig.wait_for(m.TrainerHello)
    rig.form(1)
    rig.wait_for(m.GenerationLeft)
    asked: list[bool] = []

    def receive(*args, keep, on_overwrite, **keys):
        asked.append(keep)
        raise CommunicationError("rank 0 is lost")

    monkeypatch.setattr(state_sync, "receive_state", receive)
    with rig.peers(2, world_size, behind=(1,), logged_step=5):
        rig.wait_for(m.GenerationLeft)
    assert asked == [keep]


def test_rank_with_the_newest_state_keeps_it_if_memory_runs_out_while_it_forms(rigs, monkeypatch):
    rig = rigs().start()
    rig.wait_for(m.TrainerHello)
    rig.form(1)
    rig.wait_for(m.GenerationLeft)

    def wrap(self, group):
        raise torch.OutOfMemoryError("no memory for the buckets")

    monkeypatch.setattr(train_loop.TrainLoop, "wrap", wrap)
    for generation in (2, 3, 4):
        rig.form(generation)
        told = rig.wait_for(m.GenerationLeft, m.UserCodeFailed)
        assert (told.why, told.progress) == ("failed", (4, 0))
        assert "no memory for the buckets" in told.error
        assert not told.is_excused


def test_rank_keeps_the_starts_that_the_coordinator_leaves_out(rigs):
    rig = rigs().start()
    rig.wait_for(m.TrainerHello)
    for generation, starts in (
        (1, {}),
        (2, {"starts": (0,)}),
        (3, {"starts": (4,), "num_starts": 1}),
    ):
        rig.form(generation, **starts)
        rig.wait_for(m.GenerationLeft)
    assert rig.trainer._job.checkpointer.starts == [0, 4, 4]


def test_job_whose_keys_are_invalid_here_is_reported_as_an_error(rigs):
    rig = rigs()
    rig.trainer._launch.config["optimizer"] = {"name": "NoSuchOptimizer"}

    told = rig.start().wait_for(m.UserCodeFailed)

    assert told.generation == 0
    assert "validation error for TrainConfig" in told.error
