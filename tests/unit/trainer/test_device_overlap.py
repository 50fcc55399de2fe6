"""The training thread does not wait for a GPU between the passes, with a fake for the device.

Review G7: copies of the loss, the fingerprint and the running buffers waited for the device before
each backward pass.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.trainer import step
from etrain_jupyter.trainer.group.cuda_buckets import copies_for
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from etrain_jupyter.trainer.step_header import NUM_COUNTS, RequestFlags, StepHeader
from tests.unit.trainer.peers import connected
from tests.unit.trainer.rank_processes import Generation, Job, Outcome, rank_processes

NONE = RequestFlags(is_change_pending=False, is_eval_due=False)
PATIENCE_S = 30.0


class LateCopies:
    """A device whose copies have no values until it has caught up."""

    def __init__(self) -> None:
        self.caught_up = threading.Event()
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.error = ""

    def start(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.full_like(tensor.detach(), -(1 << 20))
        self._pairs.append((copy, tensor.detach().clone()))
        return copy

    def moment(self) -> Callable[[], None]:
        pairs, self._pairs = self._pairs, []

        def wait() -> None:
            assert self.caught_up.wait(PATIENCE_S), "the training thread waits for the device"
            if self.error:
                raise RuntimeError(self.error)
            for copy, value in pairs:
                copy.copy_(value)

        return wait


def header_of(copies: Any, loss: float = 0.25) -> StepHeader:
    header = StepHeader(num_means=2, num_fields=2, copies=copies)
    header.add(0, torch.tensor([3, 4]).numpy(), torch.tensor(loss), [torch.tensor(2.0)])
    header.add(0, torch.tensor([5]).numpy(), torch.tensor(loss), [torch.tensor(1.0)])
    return header


def fill(fields_F: Any) -> None:
    fields_F[:] = 9.0, 81.0


def sent_by_peer(peer: Any, *, num_means: int = 2) -> torch.Tensor:
    """Receive the header as a rank that adds zeros."""
    zeros = torch.zeros(NUM_COUNTS + 2 + num_means, dtype=torch.float64)
    peer.all_reduce(zeros)
    return zeros


def test_header_is_sent_when_the_device_has_caught_up():
    copies = LateCopies()
    with connected() as (group, peer):
        header = header_of(copies)
        header.start(group, NONE, fill)
        receiving = threading.Thread(target=sent_by_peer, args=(peer,))
        receiving.start()
        receiving.join(0.1)
        assert receiving.is_alive(), "it was sent without its values"
        copies.caught_up.set()
        header.wait()
        receiving.join(PATIENCE_S)
    assert header.means() == [0.5, 3.0]
    assert header.num_samples == 3
    assert header.is_own_loss_finite
    assert header.fields_F.tolist() == [9.0, 81.0]


def test_header_of_a_single_rank_needs_no_peer():
    copies = LateCopies()
    store: Any = None
    group = RankGroup(generation=1, rank=0, world_size=1, store=store, host="127.0.0.1")
    header = header_of(copies, loss=float("nan"))
    header.start(group, NONE, fill)
    copies.caught_up.set()
    header.wait()
    assert not header.is_own_loss_finite
    assert header.means()[1] == 3.0


def test_abort_does_not_wait_for_a_device_that_hangs():
    copies = LateCopies()
    with connected() as (group, _):
        header = header_of(copies)
        header.start(group, NONE, fill)
        threading.Timer(0.1, group.abort, ["a peer is lost"]).start()
        with pytest.raises(CommunicationError, match="a peer is lost"):
            header.wait()
        copies.caught_up.set()


def test_error_of_the_device_is_the_cause_of_the_failure():
    copies = LateCopies()
    copies.error = "CUDA error: device-side assert triggered"
    copies.caught_up.set()
    with connected() as (group, _):
        header = header_of(copies)
        header.start(group, NONE, fill)
        with pytest.raises(CommunicationError, match="device-side assert") as found:
            header.wait()
    assert str(found.value.__cause__) == copies.error


def test_values_in_host_memory_are_not_copied():
    assert copies_for("cpu") is None
    assert copies_for(torch.device("cuda", 0)) is not None


# --- real ranks ---

NUM_SAMPLES, BATCH = 90, 16


class AfterBackward(LateCopies):
    """A device that catches up when the training thread has queued the gradients."""

    def __init__(self) -> None:
        super().__init__()
        sum_bucket = RankGroup.ddp_hook

        @functools.wraps(sum_bucket)
        def summed(group: RankGroup, bucket: Any) -> Any:
            future = sum_bucket(group, bucket)
            self.caught_up.set()
            return future

        RankGroup.ddp_hook = summed  # type: ignore[method-assign]


def names(*, is_late: bool) -> dict[str, Any]:
    def copies_of_step(_: Any) -> LateCopies:
        device.caught_up.clear()
        return device

    if is_late:
        device = AfterBackward()
        step.copies_for = copies_of_step  # type: ignore[assignment]
    x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(7))
    return {
        "model": lambda: nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)
        ),
        "loss": F.cross_entropy,
        "data.train": (x, torch.arange(NUM_SAMPLES) % 3),
    }


def train(*, is_late: bool, **keys: Any) -> Outcome:
    config = {
        "model": "model",
        "data": {"train": "data.train"},
        "loss": "loss",
        "optimizer": {"name": "SGD", "lr": 0.05},
        "batch": {"global": BATCH},
        "epochs": 3,
        **keys,
    }
    history = [
        Generation(members=(0, 1, 2), until=5, lost=2),
        Generation(members=(0, 1), until=9),
        Generation(members=(0, 1, 2)),
    ]
    job = Job(config=config, names=functools.partial(names, is_late=is_late), history=history)
    with rank_processes(3) as processes:
        return processes.train(job)[0]


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_ranks_that_do_not_wait_for_the_device_compute_the_same(compression):
    late = train(is_late=True, compression=compression)
    early = train(is_late=False, compression=compression)
    assert late.digest == early.digest
    assert late.records("step") == early.records("step") != []
    assert late.ends == early.ends == ["failed", "planned", "done"]
