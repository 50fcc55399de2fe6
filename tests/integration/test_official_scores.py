"""Mean average precision and SQuAD's scores with ``eval.score``: the same for any ranks and kills.

The models are tiny: their weights only decide which boxes are shifted and by how much, or how
certain an answer is. The scores come from the field's own implementations, and each result
contains a digest of all records, so that a difference in any bit of a prediction is found.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.log.events import EvalScored, GenerationFormed
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import LONG, ROOT, long
from tests.integration.conftest import until

pytestmark = pytest.mark.timeout(400)  # real processes on a machine that may be busy

SQUAD = ROOT.parent / "shared" / "data" / "squad"
BATCH, STEPS = 16, 4

FOLDER = Path(tempfile.mkdtemp())
CALLS = FOLDER / "calls"
"""One line for each call of ``predict`` in an evaluation: the process ID."""
SLOW = FOLDER / "slow"
"""While this file exists, ``predict`` is slow but uses no CPU time."""


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """Remove the files before and after each test."""
    for file in (CALLS, SLOW):
        file.unlink(missing_ok=True)
    yield
    for file in (CALLS, SLOW):
        file.unlink(missing_ok=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def make_train() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    return x, (x.sum(dim=1) > 0).long()


def features(count: int) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(4))


def note_call(size: int) -> None:
    if size > 2:  # not in the warm-up
        with CALLS.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if SLOW.exists():
            time.sleep(0.1)


def digest_of(records: list[Any]) -> int:
    data = json.dumps(records, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:6], "big")


# --- mean average precision ---

NUM_IMAGES = 300


def boxes_in(image: int) -> list[tuple[list[float], int]]:
    """Return the boxes (x, y, width, height) and classes of an image."""
    chance = random.Random(image)
    lows, highs = (0, 0, 20, 20), (400, 400, 200, 200)
    return [
        ([chance.uniform(*ends) for ends in zip(lows, highs, strict=True)], chance.randint(1, 3))
        for _ in range(chance.randint(1, 5))
    ]


def make_images() -> list[tuple[torch.Tensor, int]]:
    return [(x, image) for image, x in enumerate(features(NUM_IMAGES))]


def detect(model: nn.Module, batch: Any) -> list[dict[str, Any]]:
    x, images = batch
    note_call(len(images))
    records = []
    for image, (shift, certainty) in zip(images.tolist(), model(x).tolist(), strict=True):
        found = [
            {
                "bbox": [box[0] + 0.6 * shift * box[2], box[1], box[2], box[3]],
                "score": certainty + 0.01 * number,
                "category_id": label,
            }
            for number, (box, label) in enumerate(boxes_in(image))
        ]
        records.append({"image_id": image, "found": found})
    return records


def mean_average_precision(records: list[dict[str, Any]]) -> dict[str, float]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    assert [record["image_id"] for record in records] == list(range(NUM_IMAGES))
    truth = COCO()
    boxes = [
        {"image_id": image, "bbox": box, "category_id": label, "area": box[2] * box[3]}
        for image in range(NUM_IMAGES)
        for box, label in boxes_in(image)
    ]
    truth.dataset = {
        "info": {},
        "images": [{"id": image} for image in range(NUM_IMAGES)],
        "categories": [{"id": label} for label in (1, 2, 3)],
        "annotations": [{**box, "id": i, "iscrowd": 0} for i, box in enumerate(boxes, 1)],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        found = truth.loadRes(
            [{"image_id": r["image_id"], **one} for r in records for one in r["found"]]
        )
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    names = ("map", "map_50", "map_75", "map_small")
    scores = {name: float(v) for name, v in zip(names, evaluation.stats[:4], strict=True)}
    return {**scores, "digest": digest_of(records)}


# --- SQuAD 2.0 ---

OFFICIAL = {"exact": 78.742, "f1": 81.775}
"""Result of SQuAD's own script for the published answers of BERT in ``pred-v2.0-bert-single``."""


def questions() -> list[dict[str, Any]]:
    data = json.loads((SQUAD / "dev-v2.0.rebuilt.json").read_text())["data"]
    return [q for article in data for text in article["paragraphs"] for q in text["qas"]]


class Windows(torch.utils.data.Dataset[Any]):
    """Two windows of each document: the answer is in one of them, and a decoy in the other.

    The windows of a document are half the set apart, so that no batch, and hardly any rank, has
    both.
    """

    def __init__(self) -> None:
        answers = json.loads((SQUAD / "pred-v2.0-bert-single.json").read_text())
        ids = [question["id"] for question in questions()]
        self.rows = [
            (id, answers[id] if window == number % 2 else "a decoy", window == number % 2)
            for window in range(2)
            for number, id in enumerate(ids)
        ]
        self.x = features(len(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        id, text, is_best = self.rows[index]
        return {"x": self.x[index], "id": id, "text": text, "is_best": float(is_best)}


def answer(model: nn.Module, batch: Any) -> list[dict[str, Any]]:
    note_call(len(batch["id"]))
    # The weights move the certainty by less than the windows differ.
    certainty = torch.tanh(model(batch["x"])[:, 0]) + 4 * batch["is_best"]
    rows = zip(batch["id"], batch["text"], certainty.tolist(), strict=True)
    return [{"id": id, "text": text, "certainty": number} for id, text, number in rows]


def squad_scores(records: list[dict[str, Any]]) -> dict[str, float]:
    from torchmetrics.functional.text import squad

    best: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["id"] not in best or record["certainty"] > best[record["id"]]["certainty"]:
            best[record["id"]] = record
    asked = questions()
    # SQuAD 2.0 has questions without an answer, which torchmetrics does not know: a word that
    # occurs in no answer stands for it, as the answer and as the prediction.
    predictions = [
        {"id": q["id"], "prediction_text": best[q["id"]]["text"] or "unanswerable" * 2}
        for q in asked
    ]
    targets = [
        {"id": q["id"], "answers": {"text": texts or ["unanswerable" * 2], "answer_start": [0]}}
        for q in asked
        for texts in [[one["text"] for one in q["answers"]]]
    ]
    scores = squad(predictions, targets)
    return {
        "exact": float(scores["exact_match"]),
        "f1": float(scores["f1"]),
        "digest": digest_of(records),
    }


# --- the jobs ---

Make = Callable[..., TrainingJob]

KINDS: dict[str, dict[str, Any]] = {
    "detection": {"eval": make_images, "predict": detect, "score": mean_average_precision},
    "squad": {"eval": Windows, "predict": answer, "score": squad_scores},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "detection":
        pytest.importorskip("pycocotools", reason="platform: pycocotools is not installed")
    else:
        pytest.importorskip("torchmetrics", reason="libraries: torchmetrics is not installed")
        if not SQUAD.exists():
            pytest.skip(f"data: SQuAD is not in {SQUAD}")
    return str(request.param)


def body(kind: str, *, workers: int) -> dict[str, Any]:
    keys = KINDS[kind]
    return {
        "model": Net,
        "data": {"train": make_train, "eval": keys["eval"]},
        "loss": F.cross_entropy,
        "eval": {"predict": keys["predict"], "score": keys["score"], "loss": False},
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "batch": {"global": BATCH, "micro": BATCH if kind == "detection" else 256},
        "reproducible": {"shards": 4},
        "steps": STEPS,
        "workers": {"min": workers, "max": workers},
    }


def scores_of(job: TrainingJob) -> dict[str, float]:
    assert job.wait(timeout=200) == "finished", job
    events = list(job.events())
    assert_invariants(events)
    [scores] = [event.scores for event in events if isinstance(event, EvalScored)]
    return scores


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, float]]:
    """Scores of the jobs with one worker, by kind; the first test of a kind computes them."""
    return {}


def expected(kind: str, references: dict[str, Any], submit: Make) -> dict[str, float]:
    if kind not in references:
        references[kind] = scores_of(submit(**body(kind, workers=1)))
    return references[kind]


def kill_in_mid_evaluation(job: TrainingJob, *, num_calls: int) -> None:
    """Kill the rank that called ``predict`` last, after some calls by all ranks together."""
    known = num_generations(job)
    until(lambda: len(calls()) >= num_calls, "an evaluation")
    os.kill(calls()[-1], signal.SIGKILL)
    until(lambda: num_generations(job) > known, "the next generation")


def calls() -> list[int]:
    return [int(line) for line in CALLS.read_text().split()] if CALLS.exists() else []


def num_generations(job: TrainingJob) -> int:
    return sum(isinstance(event, GenerationFormed) for event in job.events())


def test_one_worker_gets_the_official_scores(
    submit: Make, references: dict[str, Any], kind: str
) -> None:
    scores = expected(kind, references, submit)
    if kind == "squad":
        assert {name: round(scores[name], 3) for name in OFFICIAL} == OFFICIAL
    else:
        assert 0.05 < scores["map"] < scores["map_50"] < 1.0


@pytest.mark.parametrize("workers", [pytest.param(2, marks=LONG), 4])
def test_scores_do_not_depend_on_workers_or_on_a_kill_in_mid_evaluation(
    submit: Make, references: dict[str, Any], kind: str, workers: int
) -> None:
    reference = expected(kind, references, submit)
    CALLS.unlink(missing_ok=True)
    SLOW.touch()
    job = submit(**body(kind, workers=workers))
    if workers == 4:  # with 2 workers, the calm job; the long test kills in both
        kill_in_mid_evaluation(job, num_calls=8)
    SLOW.unlink(missing_ok=True)
    assert scores_of(job) == reference
    assert num_generations(job) >= (2 if workers == 4 else 1)


@long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_scores_survive_kills_at_random_moments_of_the_evaluation(
    submit: Make, references: dict[str, Any], kind: str, workers: int, seed: int
) -> None:
    reference = expected(kind, references, submit)
    chance = np.random.default_rng(seed)
    CALLS.unlink(missing_ok=True)
    SLOW.touch()
    job = submit(**body(kind, workers=workers))
    most = 7 if kind == "detection" else 40
    for _ in range(2):
        goal = len(calls()) + int(chance.integers(1, most))  # two kills end before the last part
        kill_in_mid_evaluation(job, num_calls=goal)
    SLOW.unlink()
    assert scores_of(job) == reference
