"""bf16 and fp16 train what a careful person's own loop trains, and skip an overflow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.elastic.ledger import epoch_order
from etrain_jupyter.ranks.precision import Precision
from etrain_jupyter.ranks.seeds import seed_all
from tests.unit.ranks.test_train_loop import BATCH, NUM_SAMPLES, Names, Net, make_data, make_loop
from tests.unit.ranks.test_train_loop import run as run_loop

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def steep_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """So steep that the first scale of fp16 is too large."""
    return 50.0 * F.cross_entropy(output, target)


def plain_loop(name: str, loss, *, clip: float | None = None) -> tuple[nn.Module, list[int]]:
    """What torch's own manual says; return the model and the steps that were skipped."""
    seed_all(0, step=0, rank=0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=name == "fp16")
    x, y = make_data()
    step, skipped = 0, []
    for epoch in range(2):
        order = epoch_order(seed=0, epoch=epoch, num_samples=NUM_SAMPLES)
        for first in range(0, NUM_SAMPLES, BATCH):
            rows = torch.as_tensor(order[first : first + BATCH])
            step += 1
            seed_all(0, step=step, rank=0)
            with torch.autocast("cpu", dtype=DTYPES[name]):
                value = loss(model(x[rows]), y[rows])
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                skipped.append(step)
            optimizer.zero_grad()
    return model, skipped


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    pairs = zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", DTYPES)
def test_loop_equals_the_plain_one_of_torchs_manual_bit_for_bit(name, clip):
    loop, _ = make_loop(precision=name, clip_grad_norm=clip)
    assert run_loop(loop) == "done"
    assert_same_weights(loop.workload.model, plain_loop(name, F.cross_entropy, clip=clip)[0])


def test_overflow_skips_the_step_halves_the_scale_and_is_told():
    loop, sent = make_loop(precision="fp16", names=Names(loss=steep_loss))
    run_loop(loop)
    expected, skipped = plain_loop("fp16", steep_loss)
    assert skipped
    assert_same_weights(loop.workload.model, expected)
    steps = [m["record"] for m in sent if m["op"] == "step"]
    assert [r["step"] for r in steps if r["skipped"]] == skipped
    assert len(steps) == loop.plan.total_steps  # their samples count as trained
    told = [m["text"] for m in sent if m["op"] == "log"]
    assert len(told) == len(skipped)
    assert told[0].startswith(f"step {skipped[0]}: gradients overflowed in fp16")
    assert loop.workload.precision.loss_scale == 65536.0 / 2 ** len(skipped)


def test_scale_goes_where_the_weights_go():
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
