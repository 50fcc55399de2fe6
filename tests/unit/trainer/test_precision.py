"""bf16 and fp16 train like a plain loop, and skip an overflow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.trainer.group.process_group import CommunicationError
from etrain_jupyter.trainer.precision import Precision
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.wire import messages
from tests.unit.trainer.loop.test_train_loop import BATCH, PLAIN, Names, Net, make_loop
from tests.unit.trainer.loop.test_train_loop import run as run_loop
from tests.unit.trainer.plain_loop import DTYPES, train_plainly


def steep_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """So steep that the first scale of fp16 is too large."""
    return 50.0 * F.cross_entropy(output, target)


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    pairs = zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", DTYPES)
def test_loop_equals_the_plain_one_of_torchs_manual_bit_for_bit(name, clip):
    loop, _ = make_loop(precision=name, clip_grad_norm=clip)
    assert run_loop(loop) == "done"
    plain = train_plainly(replace(PLAIN, precision=name, clip=clip))
    assert_same_weights(loop.workload.model, plain.model)


def test_overflow_skips_the_step_halves_the_scale_and_is_logged():
    loop, sent = make_loop(precision="fp16", names=Names(loss=steep_loss))
    run_loop(loop)
    plain = train_plainly(replace(PLAIN, precision="fp16", loss=steep_loss))
    skipped = plain.skipped
    assert skipped
    assert_same_weights(loop.workload.model, plain.model)
    steps = [m for m in sent if isinstance(m, dict)]
    assert [r["step"] for r in steps if r["skipped"]] == skipped
    assert (
        len(steps) == loop.state.plan.total_steps
    )  # the samples of skipped steps count as trained
    told = [m.text for m in sent if isinstance(m, messages.TextLogged)]
    assert len(told) == len(skipped)
    assert told[0].startswith(f"step {skipped[0]}: gradients overflowed in fp16")
    assert loop.workload.precision.loss_scale == 65536.0 / 2 ** len(skipped)


def test_memory_that_runs_out_in_an_update_does_not_break_the_next_step_of_fp16(monkeypatch):
    # Review G5: "unscale_() has already been called", as an error of the notebook.
    loop, _ = make_loop(precision="fp16", batch={"global": BATCH, "micro": "auto"}, steps=4)
    optimizer, once = loop.workload.optimizer, []
    step = optimizer.step

    def run_out(*args, **keys):
        if not once:
            once.append(True)
            raise torch.OutOfMemoryError("no memory for the first moments")
        return step(*args, **keys)

    monkeypatch.setattr(optimizer, "step", run_out)
    with pytest.raises(CommunicationError, match="out of memory"):
        run_loop(loop)
    loop.steps.is_torn = loop.steps.in_step = False  # no weight was updated yet
    assert run_loop(loop) == "done"
    assert loop.step == 4
    assert loop.workload.precision.loss_scale == 65536.0


def test_loss_scale_is_part_of_the_state():
    first, second = Precision("fp16"), Precision("fp16")
    state = first.extras["scaler"].state_dict()
    second.extras["scaler"].load_state_dict({**state, "scale": 8.0})
    assert second.loss_scale == 8.0
    assert not Precision("bf16").extras


def test_fp32_changes_nothing():
    precision, loss = Precision(), torch.ones((), requires_grad=True)
    assert precision.scale(loss) is loss
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


class WithoutHalf(Net):
    """Error of torch on a device without a kernel for half precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")
        return super().forward(x)


class WithoutHalfBackwards(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        output.register_hook(self.fail)
        return output

    def fail(self, gradient: torch.Tensor) -> None:
        raise RuntimeError("\"mkldnn_backward\" not implemented for 'Half'")


@pytest.mark.parametrize("model", [WithoutHalf, WithoutHalfBackwards])
def test_device_without_fp16_is_reported_before_training(model):
    with pytest.raises(WorkloadError, match=r"fp16.* cpu .*for 'Half'.*write precision: bf16"):
        make_loop(precision="fp16", names=Names(model=model))


def test_error_of_the_notebook_is_not_changed():
    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match=r"^something else$"):
        make_loop(precision="fp16", names=Names(loss=broken))
