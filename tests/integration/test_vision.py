"""Train on images with several workers: augmentation, lost workers, and exact scores."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from etrain_jupyter.errors import JobFailedError
from etrain_jupyter.log.events import EvalScored, WeightsHashed, WorkerLost
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long, skip_without
from tests.integration.conftest import until

skip_without("torchvision")
skip_without("libraries")

from torchvision.models.detection import FCOS  # noqa: E402
from torchvision.models.detection.anchor_utils import AnchorGenerator  # noqa: E402
from torchvision.models.resnet import BasicBlock, ResNet  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

from etrain_jupyter.recipes import vision  # noqa: E402

pytestmark = pytest.mark.timeout(400)

CLASSES = ("background", "bright", "dark")
LOSSES = ("bbox_regression", "bbox_ctrness", "classification")


def sample_of(index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return an image of noise with a square; every eighth image is empty."""
    generator = torch.Generator().manual_seed(index)
    image = torch.randint(100, 140, (3, 32, 32), dtype=torch.uint8, generator=generator)
    num = int(index % 8 != 0)
    left, top = torch.randint(0, 20, (2,), generator=generator).tolist()
    if num:
        image[:, top : top + 12, left : left + 12] = 250 if index % 2 else 0
    boxes = torch.tensor([[left, top, left + 12.0, top + 12]])[:num]
    return image, {"boxes": boxes, "labels": torch.tensor([1 if index % 2 else 2])[:num]}


def small_detector() -> nn.Module:
    backbone = nn.Sequential(
        nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU()
    )
    backbone.out_channels = 32  # type: ignore[assignment]
    model: nn.Module = FCOS(
        backbone,
        num_classes=3,
        min_size=32,
        max_size=32,
        anchor_generator=AnchorGenerator(((8,),), ((1.0,),)),
        detections_per_img=5,
    )
    return model


def body(**changes: Any) -> dict[str, Any]:
    samples = [sample_of(index) for index in range(80)]
    flip = v2.RandomHorizontalFlip()
    return {
        "model": small_detector,
        "data": {
            "train": samples[:64],
            "eval": samples[64:],
            "collate": vision.detection.Batches(3, train=flip),
        },
        "step": vision.detection.step,
        "eval": {
            "every": "40 steps",
            "predict": vision.detection.predict,
            "score": vision.detection.score,
            "loss": False,
        },
        "optimizer": {"name": "AdamW", "lr": 3e-3},
        "clip_grad_norm": 5.0,
        "batch": {"global": 8},
        "steps": 40,
        "reproducible": {"shards": 4},
        "workers": {"min": 1, "max": 2},
        **changes,
    }


def scores_of(job: Any) -> list[dict[str, float]]:
    return [event.scores for event in job.events() if isinstance(event, EvalScored)]


def test_lost_worker_changes_neither_losses_nor_average_precision(submit: Any) -> None:
    alone = submit(**body(workers={"min": 1, "max": 1}))
    assert alone.wait(300) == "finished", alone
    job = submit(**body())
    until(lambda: job.status == "failed" or (job.step >= 4 and job.world_size == 2), "two ranks")
    os.kill(job.workers()[1]["trainer_pid"], signal.SIGKILL)

    assert job.wait(300) == "finished", job

    assert_invariants(job.events())
    assert [event for event in job.events() if isinstance(event, WorkerLost)] != []
    history, expected = job.history(), alone.history()
    assert all(history[name] == expected[name] for name in ("loss", *LOSSES))
    assert history["loss"][-1] < history["loss"][0]
    assert scores_of(job) == scores_of(alone)
    assert scores_of(job)[0]["map_50"] > 0.1


def test_invalid_box_fails_the_job_with_its_sample(submit: Any) -> None:
    samples = [sample_of(index) for index in range(16)]
    samples[11][1]["boxes"][0, 2] = 40
    keys = body(data={"train": samples, "collate": vision.detection.Batches(3)})
    del keys["eval"]

    job = submit(**{**keys, "workers": {"min": 1, "max": 1}})

    with pytest.raises(JobFailedError, match=r"sample 11 has the box .* not inside its image of"):
        job.wait(300)


NUM_KILLS = 4
SLOW = Path(tempfile.mkdtemp()) / "slow"
"""While this file exists, steps are slow, so that all workers are killed before the job ends."""


def photo_of(index: int) -> tuple[torch.Tensor, int]:
    """Return an image of noise, which is bright at one of its four sides."""
    generator = torch.Generator().manual_seed(index)
    image = torch.randint(0, 120, (3, 32, 32), dtype=torch.uint8, generator=generator)
    image[:, :8] += 100
    return image.rot90(index % 4, (1, 2)), index % 4


def small_net() -> nn.Module:
    """Return a ResNet of torchvision with 12 layers of BatchNorm."""
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4)


def photo_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if SLOW.exists():
        time.sleep(0.1)
    return nn.functional.cross_entropy(output, target)


def classify(submit: Any, num_workers: int) -> Any:
    samples = [photo_of(index) for index in range(100)]
    crop = v2.Compose([v2.RandomCrop(32, padding=4), v2.ColorJitter(brightness=0.3)])
    return submit(
        model=small_net,
        data={
            "train": samples[:76],
            "eval": samples[76:],
            "collate": vision.classification.Batches(4, train=crop),
        },
        loss=photo_loss,
        eval={
            "every": "20 steps",
            "predict": vision.classification.predict,
            "score": vision.classification.score,
        },
        optimizer={"name": "AdamW", "lr": 1e-3},
        batch={"global": 16},
        ema=0.95,
        steps=100,
        reproducible={"shards": 4},
        workers={"min": 1, "max": num_workers},
    )


@long
def test_four_kills_change_no_bit_of_weights_averages_and_scores(submit: Any) -> None:
    alone = classify(submit, 1)
    assert alone.wait(300) == "finished", alone
    SLOW.touch()
    job = classify(submit, 3)
    for number in range(NUM_KILLS):
        until(lambda: job.world_size >= 2, "two ranks")
        goal = job.step + 5
        until(lambda goal=goal: job.step >= goal, "five more steps")
        ranked = [worker for worker in job.workers() if worker["rank"] is not None]
        os.kill(ranked[number % len(ranked)]["trainer_pid"], signal.SIGKILL)
        until(lambda number=number: len(lost_in(job)) > number, "the loss")
    SLOW.unlink()
    assert job.wait(300) == "finished", job

    assert_invariants(job.events())
    assert len(lost_in(job)) == NUM_KILLS
    for weights in ("raw", "averaged"):
        one, other = (found.state_dict(weights=weights) for found in (alone, job))
        assert all(torch.equal(other[name], value) for name, value in one.items())
    assert digest_of(job) == digest_of(alone)
    assert job.history()["loss"] == alone.history()["loss"]
    assert scores_of(job) == scores_of(alone)
    assert scores_of(job)[-1]["accuracy"] > 0.7


def lost_in(job: Any) -> list[WorkerLost]:
    return [event for event in job.events() if isinstance(event, WorkerLost)]


def digest_of(job: Any) -> str:
    """Return the digest of the final weights and averages."""
    hashed: list[WeightsHashed] = [e for e in job.events() if isinstance(e, WeightsHashed)]
    return hashed[-1].digest
