"""What a rank reports of its own failures."""

from __future__ import annotations

import pytest
import torch

from etrain_jupyter.ranks import train_loop, trainer
from etrain_jupyter.ranks.control.channel import FrameDecoder, encode
from etrain_jupyter.ranks.gradients import step_header
from etrain_jupyter.ranks.group.pending import MOST_TEXT, text_of
from etrain_jupyter.ranks.group.process_group import BroadcastStore, RankGroup
from etrain_jupyter.ranks.state.checkpointer import Checkpointer
from etrain_jupyter.ranks.state.moving_buffers import MovingBuffers
from etrain_jupyter.ranks.train_loop import OUT_OF_MEMORY
from etrain_jupyter.ranks.trainer import DISCONNECTED, failure_of
from tests.unit.ranks.trainer_rig import TrainerRig


def group_of_two() -> RankGroup:
    store = BroadcastStore(lambda key, value: None)
    return RankGroup(generation=1, rank=0, world_size=2, store=store, host="127.0.0.1")


# Review G2: the report of a failed generation had no text.


def test_report_of_an_abort_has_no_error_since_another_rank_has_it():
    group = group_of_two()
    group.abort()
    assert failure_of(group, RuntimeError("Connection closed by peer")) == {}


@pytest.mark.parametrize("why", [OUT_OF_MEMORY, DISCONNECTED])
def test_report_excuses_what_says_nothing_about_the_connections(why):
    group = group_of_two()
    group.abort(why)
    assert failure_of(group, RuntimeError(why)) == {"error": why, "is_excused": True}


@pytest.mark.parametrize(
    ("text", "backend"),
    [("[gloo/transport/tcp/pair.cc:547] Connection closed", "gloo"), ("NCCL error in: a", "nccl")],
)
def test_report_has_the_error_of_a_collective_that_torch_started_by_itself(text, backend):
    assert failure_of(group_of_two(), RuntimeError(text)) == {"error": text, "backend": backend}


def test_text_of_a_report_is_bounded_and_can_be_sent():
    text = text_of(RuntimeError(f"bad file \udce9 {'x' * 10_000}"))
    assert len(text) == MOST_TEXT
    [message] = FrameDecoder().feed(encode({"error": text}))
    assert message["error"].startswith("bad file \\udce9 xxx")


# Review G4: the first synchronization after a failing kernel is in our files, and so every CUDA
# error of the notebook's code was taken for a defect of ours: "trainer exited with code 1".

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
    """Stands for a device: once broken, every call that would reach it fails."""

    def __init__(self, monkeypatch, text: str = ASSERT) -> None:
        self.is_broken = False
        self._text = text
        places = [(step_header, "stack_means"), (trainer, "take_state"), (Checkpointer, "save_now")]
        places += [(train_loop, "digest_of"), (MovingBuffers, "put_back")]
        places += [(MovingBuffers, "moved_since")]
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


def test_device_side_assert_in_a_step_is_the_notebooks_error_with_its_code(rigs, monkeypatch):
    gpu = Gpu(monkeypatch)
    rig = rigs().start()
    rig.wait_for("hello")
    gpu.is_broken = True
    rig.form()
    told = rig.wait_for("user_error", "report")
    assert told["op"] == "user_error"
    assert told["progress"] == [-1, 0], "its state cannot be read any more"
    assert "device-side assert triggered" in told["error"]
    assert "targets of CrossEntropyLoss must be 0 to classes - 1" in told["error"]
    assert "CUDA_LAUNCH_BLOCKING=1" in told["error"]
    assert "Cell In[3], line 12, in loss" in told["traceback"]
    assert "Cell In[3], line 9, in forward" in told["traceback"]
    assert rig.has_ended()
    assert rig.crash is None
    assert gpu.calls == ["stack_means"], "CUDA was used again"


def test_device_side_assert_in_the_warm_up_is_the_notebooks_error(rigs, monkeypatch):
    gpu = Gpu(monkeypatch)
    gpu.is_broken = True
    rig = rigs().start()
    told = rig.wait_for("user_error")
    assert (told["generation"], told["progress"]) == (0, [-1, 0])
    assert "device-side assert" in told["error"]
    assert rig.has_ended()
    assert rig.crash is None


def test_error_of_the_machines_gpu_ends_the_trainer_alone(rigs, monkeypatch):
    gpu = Gpu(monkeypatch, "CUDA error: uncorrectable ECC error encountered")
    rig = rigs().start()
    rig.wait_for("hello")
    gpu.is_broken = True
    rig.form()
    told = rig.wait_for("log", "user_error")
    assert told["text"] == (
        "the GPU failed, and this trainer ends: CUDA error: uncorrectable ECC error encountered"
    )
    assert rig.has_ended()
    assert "ECC" in str(rig.crash)
    assert gpu.calls == ["stack_means"], "CUDA was used again"
