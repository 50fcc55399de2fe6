"""``eval.predict`` and ``eval.score`` on a real local pool, under kills, notices and errors."""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    BestReached,
    EarlyStopped,
    EvalCompleted,
    EvalScored,
    GenerationFormed,
    LogLine,
    StepCompleted,
    UserErrorRaised,
    WorkerLeft,
    WorkerLost,
)
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import LONG, long
from tests.integration.conftest import until

pytestmark = pytest.mark.timeout(400)  # real processes on a machine that may be busy

NUM_TRAIN, NUM_EVAL, BATCH = 64, 250, 16
NUM_PARTS = -(-NUM_EVAL // BATCH)

FOLDER = Path(tempfile.mkdtemp())
CALLS = FOLDER / "calls"
"""One line for each call of ``predict`` in an evaluation: process ID and first sample."""
SLOW = FOLDER / "slow"
"""While this file exists, ``predict`` is slow but uses no CPU time."""
HOLD = FOLDER / "hold"
"""While this file exists, ``score`` waits."""


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """Remove the files before and after each test."""
    for file in (CALLS, SLOW, HOLD):
        file.unlink(missing_ok=True)
    yield
    for file in (CALLS, SLOW, HOLD):
        file.unlink(missing_ok=True)


def make_train() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(NUM_TRAIN, 8, generator=torch.Generator().manual_seed(3))
    return x, (x.sum(dim=1) > 0).long()


def make_eval() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(NUM_EVAL, 8, generator=torch.Generator().manual_seed(4))
    y = (x.sum(dim=1) > 0).long()
    x[:, 0] = torch.arange(NUM_EVAL)  # the position, for ``predict`` to return
    return x, y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def predict(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    x, y = batch
    if len(x) > 2:  # not in the warm-up
        with CALLS.open("a") as file:
            file.write(f"{os.getpid()} {int(x[0, 0])}\n")
        if SLOW.exists():
            time.sleep(0.2)
    return {"logits": model(x), "position": x[:, 0].long(), "target": y}


def score(records: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    while HOLD.exists():
        time.sleep(0.02)
    positions = [int(record["position"]) for record in records]
    assert positions == list(range(NUM_EVAL)), positions
    data = b"".join(record["logits"].numpy().tobytes() for record in records)
    right = [int(record["logits"].argmax()) == int(record["target"]) for record in records]
    digest = int.from_bytes(hashlib.sha256(data).digest()[:6], "big")
    return {"exact_match": sum(right) / len(right), "digest": digest}


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": Net,
        "data": {"train": make_train, "eval": make_eval},
        "loss": F.cross_entropy,
        "eval": {"every": "4 steps", "predict": predict, "score": score},
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "batch": {"global": BATCH},
        "reproducible": {"shards": 4},
        "epochs": 2,
        "workers": {"min": 1, "max": 1},
        **changes,
    }


def found(job: TrainingJob, kind: type) -> list[Any]:
    return [event for event in job.events() if isinstance(event, kind)]


def finish(job: TrainingJob) -> None:
    assert job.wait(timeout=200) == "finished", job
    assert_invariants(job.events())


def scores_of(job: TrainingJob) -> dict[int, dict[str, float]]:
    return {event.step: event.scores for event in found(job, EvalScored)}


def calls() -> list[str]:
    return CALLS.read_text().splitlines() if CALLS.exists() else []


@pytest.fixture(scope="module")
def calm() -> dict[str, Any]:
    """Scores of the job with one worker; the first test computes them."""
    return {}


def expected(calm: dict[str, Any], submit: Any) -> dict[int, dict[str, float]]:
    if not calm:
        job = submit(**body())
        finish(job)
        calm.update(scores=scores_of(job))
    return calm["scores"]


def test_scores_are_in_the_log_the_history_and_the_result(submit, calm):
    scores = expected(calm, submit)
    assert list(scores) == [4, 8]
    assert 0.3 < scores[8]["exact_match"] <= 1.0
    assert scores[4]["digest"] != scores[8]["digest"]
    assert len(calls()) == 2 * NUM_PARTS


@pytest.mark.parametrize("num_workers", [2, pytest.param(4, marks=LONG)])
def test_scores_do_not_depend_on_the_number_of_workers(submit, calm, num_workers):
    job = submit(**body(workers={"min": num_workers, "max": num_workers}))
    finish(job)
    assert scores_of(job) == expected(calm, submit)
    assert job.metrics["eval_exact_match"] == calm["scores"][8]["exact_match"]
    assert job.history()["eval_digest"][3] == calm["scores"][4]["digest"]


def test_kill_in_mid_evaluation_costs_only_the_parts_of_the_victim(submit, calm):
    reference = expected(calm, submit)
    CALLS.unlink(missing_ok=True)
    SLOW.touch()
    job = submit(**body(workers={"min": 2, "max": 2}))
    until(lambda: len(calls()) >= 8, "calls of predict")
    victim = int(calls()[-1].split()[0])
    os.kill(victim, signal.SIGKILL)
    until(lambda: found(job, WorkerLost), "the loss")
    lost = [line for line in calls() if int(line.split()[0]) == victim]
    SLOW.unlink()
    finish(job)
    assert scores_of(job) == reference
    formed = found(job, GenerationFormed)
    assert len(formed) >= 2
    assert len(calls()) <= 2 * NUM_PARTS + len(lost)
    again = {line.split()[1] for line in lost}
    repeated = [line.split()[1] for line in calls() if int(line.split()[0]) != victim]
    assert again <= set(repeated)


def test_notice_in_mid_evaluation_is_honoured_before_its_end(submit, calm):
    reference = expected(calm, submit)
    CALLS.unlink(missing_ok=True)
    SLOW.touch()
    job = submit(**body(workers={"min": 1, "max": 2}, epochs=2))
    until(lambda: len(calls()) >= 4 and job.world_size == 2, "an evaluation by two ranks")
    leaver = next(w["worker"] for w in job.workers() if w["rank"] == 1)
    job.preempt(leaver)
    until(lambda: leaver in {e.worker for e in found(job, WorkerLeft)}, "the leave")
    SLOW.unlink()
    finish(job)
    events = job.events()
    left = next(e.seq for e in events if isinstance(e, WorkerLeft) and e.worker == leaver)
    evaluated = [e for e in events if isinstance(e, EvalCompleted)]
    begun = [e.step for e in events if isinstance(e, StepCompleted) and e.seq < left]
    interrupted = next(e for e in evaluated if e.step == begun[-1])
    assert left < interrupted.seq
    assert scores_of(job) == reference


class SlowNet(Net):
    """Notes and delays the batches of an evaluation as ``predict`` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and len(x) > 2:  # not in the warm-up
            with CALLS.open("a") as file:
                file.write(f"{os.getpid()} {int(x[0, 0])}\n")
            if SLOW.exists():
                time.sleep(0.2)
        return super().forward(x)


def test_notice_in_mid_evaluation_without_score_is_honoured_and_no_batch_is_repeated(submit):
    SLOW.touch()
    job = submit(**body(model=SlowNet, eval="4 steps", workers={"min": 1, "max": 2}))
    until(lambda: len(calls()) >= 7 and job.world_size == 2, "an evaluation by two ranks")
    leaver = next(w["worker"] for w in job.workers() if w["rank"] == 1)
    job.preempt(leaver)
    until(lambda: leaver in {e.worker for e in found(job, WorkerLeft)}, "the leave")
    SLOW.unlink()
    finish(job)
    events = job.events()
    left = next(e.seq for e in events if isinstance(e, WorkerLeft) and e.worker == leaver)
    evaluated = found(job, EvalCompleted)
    trained = [e.step for e in events if isinstance(e, StepCompleted) and e.seq < left]
    assert left < next(e.seq for e in evaluated if e.step == trained[-1])
    assert [(e.step, e.samples) for e in evaluated] == [(4, NUM_EVAL), (8, NUM_EVAL)]
    # The leaver's sums were handed over. Before, the trial pass compared a batch with its halves.
    assert len(calls()) == 2 * NUM_PARTS + 3


@long
def test_training_continues_while_score_runs_and_the_job_waits_for_the_last_scores(submit, calm):
    reference = expected(calm, submit)
    HOLD.touch()
    job = submit(**body(workers={"min": 2, "max": 2}))
    until(lambda: job.step == 8, "the next steps")  # the second evaluation waits
    waits = "waiting for eval.score, which is scoring the evaluation of step 4"
    until(lambda: waits in {e.text for e in found(job, LogLine)}, "the message")
    assert found(job, EvalScored) == []
    HOLD.unlink()
    finish(job)
    assert scores_of(job) == reference
    kinds = [type(e) for e in job.events() if isinstance(e, EvalScored | EvalCompleted)]
    assert kinds == [EvalCompleted, EvalScored, EvalCompleted, EvalScored]


@long
def test_survivor_scores_again_if_the_rank_that_was_scoring_dies(submit, calm):
    reference = expected(calm, submit)
    HOLD.touch()
    job = submit(**body(workers={"min": 2, "max": 2}))
    until(lambda: job.step == 8, "the next steps")
    first = next(w for w in job.workers() if w["rank"] == 0)
    os.kill(first["trainer_pid"], signal.SIGKILL)
    until(lambda: found(job, WorkerLost), "the loss")
    HOLD.unlink()
    finish(job)
    assert scores_of(job) == reference


def test_best_checkpoint_and_early_stopping_use_the_scores(submit):
    job = submit(
        **body(
            checkpoint={"best": {"metric": "exact_match", "mode": "max"}},
            early_stopping={"metric": "falling", "mode": "max", "patience": 2},
            eval={"every": "4 steps", "predict": predict, "score": falling_score},
            epochs=50,
            workers={"min": 2, "max": 2},
        )
    )
    finish(job)
    (stop,) = found(job, EarlyStopped)
    assert (stop.metric, stop.best_step, stop.step) == ("falling", 4, 12)
    assert found(job, BestReached)[0].metric == "exact_match"
    job.load_into(Net(), which="best")


def score_with_exhibits(records: list[Any]) -> dict[str, Any]:
    from matplotlib.figure import Figure

    scores = score(records)
    figure = Figure(figsize=(2, 1))
    figure.subplots().hist([int(record["logits"].argmax()) for record in records])
    wrong = [
        {"position": int(record["position"]), "target": int(record["target"])}
        for record in records
        if int(record["logits"].argmax()) != int(record["target"])
    ]
    report = f"{scores['exact_match']:.3f} of {len(records)}"
    return {**scores, "classes": figure, "report": report, "wrong": wrong[:5] or [{"none": 0}]}


def test_figure_text_and_table_are_stored_with_their_step(submit, calm):
    pytest.importorskip("matplotlib", reason="platform: matplotlib is not installed")
    reference = expected(calm, submit)
    evaluation = {"every": "4 steps", "predict": predict, "score": score_with_exhibits}
    job = submit(**body(eval=evaluation, workers={"min": 2, "max": 2}))
    finish(job)

    assert scores_of(job) == reference
    exhibits = job.exhibits()
    assert [(one.step, one.name, one.format) for one in exhibits] == [
        (step, name, format)
        for step in (4, 8)
        for name, format in (("classes", "png"), ("report", "text"), ("wrong", "table"))
    ]
    classes, report, wrong = (one.load() for one in exhibits[3:])
    assert classes[:4] == b"\x89PNG"
    assert report == f"{reference[8]['exact_match']:.3f} of {NUM_EVAL}"
    assert all(isinstance(value, int) for row in wrong for value in row.values())
    # Another kernel reads them from the run folder.
    again = TrainingJob(job.record, None)
    assert [one.load() for one in again.exhibits("report")] == [
        one.load() for one in job.exhibits("report")
    ]


NUM_SCORED = FOLDER / "scored"


def falling_score(records: list[Any]) -> dict[str, float]:
    with NUM_SCORED.open("a") as file:
        file.write(".")
    return {**score(records), "falling": -float(NUM_SCORED.stat().st_size)}


def broken_score(records: list[Any]) -> dict[str, float]:
    return {"f1": 1 / (len(records) - NUM_EVAL)}


def crashing_score(records: list[Any]) -> dict[str, float]:
    os.abort()


def wrong_score(records: list[Any]) -> dict[str, Any]:
    return {"f1": [0.5]}


def loss_score(records: list[Any]) -> dict[str, Any]:
    return {"loss": 1.0}


def short_predict(model: nn.Module, batch: Any) -> list[int]:
    return [0] * (len(batch[0]) if len(batch[0]) <= 2 else 3)


def no_predict(model: nn.Module, batch: Any) -> Any:
    return 7


@pytest.mark.parametrize(
    ("keys", "message", "line"),
    [
        ({"score": broken_score}, "eval.score raised ZeroDivisionError", "1 / (len(records)"),
        ({"score": crashing_score}, "eval.score crashed: .* was killed by SIGABRT", ""),
        ({"score": wrong_score}, r"eval.score returned \[0.5\] for 'f1', a list", ""),
        ({"score": loss_score}, "eval.score returned 'loss', which is also the loss", ""),
        ({"predict": short_predict}, "returned 3 records for a batch of 16 samples", ""),
        ({"predict": no_predict}, "eval.predict returned a int", ""),
    ],
)
@long
def test_error_in_predict_or_score_fails_the_job_with_a_clear_message(submit, keys, message, line):
    job = submit(**body(eval={**body()["eval"], **keys}, workers={"min": 2, "max": 2}))
    until(lambda: job.status in TERMINAL_STATUSES, "the end")
    assert job.status == "failed"
    error = found(job, UserErrorRaised)[-1]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error.error)
    assert line in error.traceback
