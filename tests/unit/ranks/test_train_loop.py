"""The step in one process: equal to a plain loop, undone when it breaks, exact in its counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.elastic.ledger import checksum_of, epoch_order
from etrain_jupyter.ranks.process_group import BroadcastStore, CommunicationError, RankGroup
from etrain_jupyter.ranks.schedule import WorkPlan
from etrain_jupyter.ranks.state import digest_of
from etrain_jupyter.ranks.train_loop import TrainLoop
from etrain_jupyter.ranks.workload import WorkloadError, build_workload, seed_all

NUM_SAMPLES, BATCH = 50, 16


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(NUM_SAMPLES, 4, generator=generator), torch.arange(NUM_SAMPLES) % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float()


class Names:
    """An opened bundle."""

    def __init__(self, **names) -> None:
        self.names = {
            "model": Net,
            "data.train": make_data(),
            "data.eval": make_data(),
            "loss": F.cross_entropy,
            "metrics.accuracy": accuracy,
            **names,
        }

    def evaluate(self, key: str):
        return self.names[key]


def make_loop(*, micro: int | None = None, names: Names | None = None, **keys):
    config = TrainConfig.model_validate(
        {
            "model": "Net",
            "data": {"train": "d", "eval": "d"},
            "loss": "f",
            "metrics": {"accuracy": "a"},
            "optimizer": {"name": "AdamW", "lr": 0.01},
            "batch": {"global": BATCH} | ({"micro": micro} if micro else {}),
            "epochs": 2,
            **keys,
        }
    )
    sent: list[dict] = []
    workload = build_workload(config, names or Names(), torch.device("cpu"))
    loop = TrainLoop(workload, config, WorkPlan.of(config, workload), sent.append)
    loop.warm_up()
    return loop, sent


def alone(generation: int = 1) -> RankGroup:
    store = BroadcastStore(lambda key, value: None)
    return RankGroup(generation=generation, rank=0, world_size=1, store=store, host="")


def run(loop: TrainLoop) -> str:
    group = alone()
    return loop.run(group, loop.wrap(group))


def plain_loop() -> nn.Module:
    """What a careful person writes by hand for the same job."""
    seed_all(0, step=0, rank=0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = make_data()
    step = 0
    for epoch in range(2):
        order = epoch_order(seed=0, epoch=epoch, num_samples=NUM_SAMPLES)
        for first in range(0, NUM_SAMPLES, BATCH):
            rows = torch.as_tensor(order[first : first + BATCH])
            step += 1
            seed_all(0, step=step, rank=0)
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_one_rank_equals_the_plain_loop_to_the_last_bit():
    loop, _ = make_loop()
    assert run(loop) == "done"
    assert digest_of(loop.workload.model) == digest_of(plain_loop())


def test_micro_steps_change_nothing_but_rounding():
    whole, _ = make_loop(names=Names(model=lambda: nn.Linear(4, 3)))
    parts, _ = make_loop(names=Names(model=lambda: nn.Linear(4, 3)), micro=5)
    run(whole)
    run(parts)
    for a, b in zip(
        whole.workload.model.parameters(), parts.workload.model.parameters(), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-6)


def test_records_prove_which_samples_were_trained():
    loop, sent = make_loop()
    run(loop)
    records = [m["record"] for m in sent if m["op"] == "step"]
    assert [r["samples"] for r in records] == [16, 16, 16, 2] * 2
    assert [(r["epoch"], r["first"]) for r in records[3:5]] == [(0, 48), (1, 0)]
    whole = checksum_of(epoch_order(seed=0, epoch=0, num_samples=NUM_SAMPLES))
    assert sum(r["sample_checksum"] for r in records[:4]) == whole
    evals = [m["record"] for m in sent if m["op"] == "eval"]
    assert [(e["step"], e["samples"]) for e in evals] == [(4, 50), (8, 50)]
    digests = [m for m in sent if m["op"] == "weights"]
    assert [m["step"] for m in digests] == [4, 8]


def test_evaluation_is_the_mean_over_all_samples_however_they_are_batched():
    loop, sent = make_loop(epochs=1)
    run(loop)
    [told] = [m["record"] for m in sent if m["op"] == "eval"]
    x, y = make_data()
    model = loop.workload.model.eval()
    with torch.no_grad():
        expected = F.cross_entropy(model(x), y).item()
        correct = accuracy(model(x), y).mean().item()
    assert told["loss"] == pytest.approx(expected, abs=1e-6)
    assert told["metrics"]["accuracy"] == pytest.approx(correct)


def test_change_that_is_pending_ends_the_run_after_the_step():
    loop, _ = make_loop()
    loop.change_pending.set()
    assert run(loop) == "planned"
    assert loop.progress == (1, 0)


def test_step_that_breaks_is_undone():
    calls = []

    def fragile(output, target):
        calls.append(1)
        if len(calls) == 4:  # the warm-up pass is the first
            raise CommunicationError("a peer is lost")
        return F.cross_entropy(output, target)

    loop, _ = make_loop(names=Names(loss=fragile))
    before: list[str] = []
    loop.after_step.append(lambda _: before.append(digest_of(loop.workload.model)))
    with pytest.raises(CommunicationError):
        run(loop)
    assert loop.progress == (2, 0)
    assert loop.in_step
    assert digest_of(loop.workload.model) == before[-1]  # BatchNorm's statistics too
    assert all(p.grad is None for p in loop.workload.model.parameters())
    loop.in_step = False
    assert run(loop) == "done"
    assert digest_of(loop.workload.model) == digest_of(plain_loop())


def test_loader_that_delivers_other_samples_is_seen_in_the_records():
    loop, sent = make_loop(epochs=1)
    deliver = loop.workload.train.batches

    def shifted(shares):
        return deliver((share + 1) % NUM_SAMPLES for share in shares)

    loop.workload.train.batches = shifted
    run(loop)
    first = next(m["record"] for m in sent if m["op"] == "step")
    due = epoch_order(seed=0, epoch=0, num_samples=NUM_SAMPLES)[:BATCH]
    assert first["sample_checksum"] == checksum_of((due + 1) % NUM_SAMPLES)
    assert first["sample_checksum"] != checksum_of(due)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"loss": lambda o, t: 3.5}, "loss returned 3.5, a float"),
        ({"loss": lambda o, t: o}, r"shape \(16, 3\) for 16 samples"),
        ({"loss": lambda o, t: F.cross_entropy(o.detach(), t)}, "does not depend on the model"),
        ({"model": lambda: None}, "model gave None, a NoneType"),
        ({"model": nn.Flatten}, "nothing to train"),
        ({"metrics.accuracy": lambda o, t: o[:2]}, r"metric 'accuracy' returned shape \(2, 3\)"),
    ],
)
def test_objects_that_do_not_fit_are_named_before_training(names, text):
    with pytest.raises(WorkloadError, match=text):
        make_loop(names=Names(**names))


def test_optimizer_value_that_torch_refuses_is_named():
    options = {"betas": [2.0, 0.9]}
    with pytest.raises(WorkloadError, match=r"AdamW does not take .*\[2.0, 0.9\].*Invalid beta"):
        make_loop(optimizer={"name": "AdamW", "lr": 0.01, "options": options})


def test_frozen_modules_stay_frozen_after_an_evaluation():
    loop, _ = make_loop()
    norm = loop.workload.model.layers[1]
    norm.eval()
    run(loop)
    assert not norm.training
    assert loop.workload.model.training
