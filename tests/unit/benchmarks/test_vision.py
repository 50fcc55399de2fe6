"""Runs of the benchmark ``vision``, and their comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.models import vision, vision_figure
from tests.capabilities import skip_without

SEED = 3


def run_of(policy: str, seed: int, score: float) -> dict[str, Any]:
    return {"task": "cells", "policy": policy, "seed": seed, "score": score}


def test_elastic_runs_are_compared_with_the_fixed_run_of_their_seed() -> None:
    runs = [
        run_of("ramp", 1, 0.75),
        run_of("ramp", 0, 0.5),
        run_of("ramp", 2, 0.5),  # has no fixed run
        run_of("fixed", 0, 0.75),
        run_of("fixed", 1, 0.5),
    ]

    assert vision.differences(runs, "cells", "ramp") == [-0.25, 0.25]
    assert "| -0.250 +0.250 |" in vision.table_of({"scores": runs})


@pytest.mark.parametrize("policy", ["global", "ramp"])
def test_phases_train_on_the_samples_of_the_fixed_run(policy: str) -> None:
    batches = {"global": 1, "ramp": None}[policy]

    phases = vision.phases_of(policy, 780)

    assert [size for size, _ in phases] == [1, 12, 4, 12, 2, 8]
    assert sum((batches or size) * steps for size, steps in phases) == 780
    assert len({steps for _, steps in phases}) == 1


def test_curve_is_the_mean_loss_over_equal_parts_of_the_samples() -> None:
    run = {"policy": "ramp", "sizes": [1, 1, 2], "losses": [4.0, 2.0, 1.0]}

    ends, losses = vision_figure.curve_of(run)

    assert (ends[29], ends[59]) == (0.5, 1.0)
    assert (losses[0], losses[29], losses[59]) == (4.0, 2.0, 1.0)


def test_emulated_run_equals_the_plain_loop_that_twelve_processes_reproduce() -> None:
    skip_without("torchvision")
    from benchmarks.models.vision_emulated import run_emulated
    from benchmarks.models.vision_work import VisionTask
    from tests.chaos.digits import digits, linear_factors, mlp, train_plainly

    def step(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def losses(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    task = VisionTask(
        name="digits",
        score="loss",
        model=mlp,
        batches=lambda: torch.utils.data.default_collate,
        step=step,
        predict=losses,
        score_records=lambda records: {"loss": torch.stack(records).mean().item()},
        lr=0.1,
        batch=16,
        epochs=1,
        decay="none",
    )
    samples = list(zip(*digits()[0], strict=True))

    run = run_emulated(
        task,
        "ramp",
        SEED,
        train=samples,
        test=samples,
        world_size_at=lambda step: 1 if step < 30 else 12,
    )

    sizes = ((1, 30), (12, len(run["losses"]) - 30))
    expected, _ = train_plainly(linear_factors(sizes, up=105), seed=SEED)
    assert sizes[1][1] == 5
    assert run["sizes"] == [size for size, num_steps in sizes for _ in range(num_steps)]
    assert run["scores"]["loss"] == pytest.approx(expected[35], rel=1e-4)
    assert run["losses"][-1] < run["losses"][0]
