from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from benchmarks.common import gate
from benchmarks.common.gate import Gate, RankGate
from benchmarks.steps.paired import Block, figures_of


def test_ranks_train_the_granted_steps_and_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gate.FOLDER, str(tmp_path))
    barrier = Gate(tmp_path, 2)
    steps = [0, 0]

    def train(rank: int, num_steps: int) -> None:
        own = RankGate()
        for _ in range(num_steps):
            own.pass_gate()
            steps[rank] += 1

    threads = [
        threading.Thread(target=train, args=(rank, gate.FREE_STEPS + 5), daemon=True)
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    barrier.wait(lambda: None, 10.0)
    assert steps == [gate.FREE_STEPS, gate.FREE_STEPS]

    assert barrier.run(3, lambda: None) > 0
    assert steps == [gate.FREE_STEPS + 3, gate.FREE_STEPS + 3]

    barrier.grant(2)
    for thread in threads:
        thread.join(10)
    assert steps == [gate.FREE_STEPS + 5, gate.FREE_STEPS + 5]


def test_gate_names_the_number_of_missing_ranks(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="0 of 2 ranks arrived at the gate within 0 s"):
        Gate(tmp_path, 2).wait(lambda: None, 0.0)


def test_error_of_a_side_ends_the_wait(tmp_path: Path) -> None:
    def check() -> None:
        raise RuntimeError("torchrun ended with code 1")

    with pytest.raises(RuntimeError, match="torchrun ended"):
        Gate(tmp_path, 1).wait(check, 60.0)


def test_evaluation_does_not_wait_at_the_gate() -> None:
    output = torch.tensor([[4.0, 0.0]])

    for _ in range(gate.FREE_STEPS + 1):
        loss = gate.gated_loss(output, torch.tensor([0]))

    assert loss.item() == pytest.approx(0.0181, abs=1e-3)


def test_ratio_is_the_median_of_the_pairs() -> None:
    def block(wall_s: float, **cpu_s: float) -> Block:
        return Block(wall_s=wall_s, cpu_s=cpu_s)

    found = figures_of(
        {
            "ours": [
                block(1.0, trainer=1.5, head=0.5),
                block(2.0, trainer=2.0),
                block(4.0, head=1.0),
            ],
            "ddp": [block(1.1, other=1.0), block(2.0, other=2.0), block(3.0, other=1.0)],
        },
        10,
    )

    assert found["ratio"] == pytest.approx(1.0)
    assert (found["low"], found["high"]) == (pytest.approx(0.75), pytest.approx(1.1))
    assert found["cpu"]["ratio"] == pytest.approx(1.0)
    assert found["ours"] == pytest.approx(640.0)
    assert found["cpu_ms_per_step"]["ours"] == {
        "head": pytest.approx(50.0),
        "trainer": pytest.approx(1e3 * 3.5 / 30),
    }
