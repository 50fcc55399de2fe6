from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import (
    BestReached,
    EvalCompleted,
    EvalScored,
    Event,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobResumed,
    JobStatusChanged,
    LogLine,
    RankTimed,
    StepCompleted,
    UserErrorRaised,
    WorkerLeft,
    WorkerLost,
    event_from_dict,
)
from etrain_jupyter.notebook.job.history import History, LatestValues, peek_log, phases_of
from tests.unit.log.spent import NOTHING_ELSE, made


def step(number: int, **changes: Any) -> StepCompleted:
    values: dict[str, Any] = {
        **{"job_id": "j", "time": float(number), "generation": 1, "step": number},
        **{"loss": 1 / number, "world_size": 2, "samples_per_s": 100.0},
    }
    return made(StepCompleted, **values | changes)


def evaluation(number: int, loss: float, **metrics: float) -> EvalCompleted:
    return EvalCompleted(
        job_id="j",
        time=0.0,
        step=number,
        epoch=0,
        samples=9,
        loss=loss,
        duration_s=0.1,
        metrics=metrics,
    )


def test_columns_have_equal_length_for_any_mix_of_measurements() -> None:
    history = History()
    history.add_step(step(1))
    history.add_step(step(2, metrics={"accuracy": 0.5}))
    history.add_eval(evaluation(2, 0.7, accuracy=0.6))
    history.add_step(step(3))

    frame = pd.DataFrame(history.columns())

    assert list(frame) == [
        *("step", "epoch", "samples", "loss", "lr", "world_size", "generation", "samples_per_s"),
        *("time", "data_s", "compute_s", "communication_s", "optimizer_s"),
        *("accuracy", "eval_loss", "eval_accuracy"),
    ]
    assert frame["step"].tolist() == [1, 2, 3]
    assert frame["accuracy"].isna().tolist() == [True, False, True]
    assert frame["eval_loss"].tolist()[1] == 0.7
    assert frame["eval_accuracy"].isna().tolist() == [True, False, True]


def test_evaluation_after_later_steps_is_written_into_the_row_of_its_step() -> None:
    history = History()
    for number in (1, 2, 3):
        history.add_step(step(number))
    history.add_eval(evaluation(2, 0.7))
    history.add_eval(evaluation(3, 0.6))
    scored = EvalScored(
        job_id="j", time=9.0, step=2, samples=9, duration_s=0.5, scores={"map": 0.25}
    )
    history.add_eval(scored)

    values, scores = history.columns()["eval_loss"], history.columns()["eval_map"]

    assert math.isnan(values[0])
    assert values[1:] == [0.7, 0.6]
    assert [math.isnan(value) for value in scores] == [True, False, True]
    assert scores[1] == 0.25


def test_metric_of_evaluations_alone_has_one_column() -> None:
    latest = LatestValues()
    latest.add([step(1, metrics={"accuracy": 0.5}), step(2, metrics={"accuracy": 0.6})])
    latest.add([evaluation(2, 0.7, accuracy=0.4, f1=0.3)])
    columns = latest.columns()
    assert "f1" not in columns
    assert columns["eval_f1"][1] == 0.3
    assert math.isnan(columns["eval_f1"][0])
    assert {len(column) for column in columns.values()} == {2}
    assert latest.metrics["eval_f1"] == 0.3


def test_evaluation_before_the_first_step_has_no_row() -> None:
    history = History()
    history.add_eval(evaluation(0, 0.7))

    assert set(map(len, history.columns().values())) == {0}


def test_step_committed_again_replaces_all_later_steps() -> None:
    history = History()
    for number in (1, 2, 3):
        history.add_step(step(number, metrics={"accuracy": 0.1}))
    history.add_step(step(2, loss=9.0, metrics={"accuracy": 0.2}))

    columns = history.columns()

    assert columns["step"] == [1, 2]
    assert columns["loss"] == [1.0, 9.0]
    assert columns["accuracy"] == [0.1, 0.2]


def test_restored_job_forgets_the_steps_after_its_checkpoint() -> None:
    view = LatestValues()
    view.add([step(1), step(2), step(3)])
    view.add([JobRestored(job_id="j", time=0.0, step=1, num_undone=2)])

    assert view.step == 1
    assert view.columns()["step"] == [1]


def test_metric_called_like_a_column_keeps_the_columns_equal() -> None:
    history = History()
    history.add_step(step(1, metrics={"loss": 5.0}))

    columns = history.columns()

    assert (columns["loss"], columns["metric_loss"]) == ([1.0], [5.0])


def test_200_000_steps_are_folded_and_returned() -> None:
    """A fold whose cost grew with the history would exceed the limit of a test by far."""
    view = LatestValues()
    events: list[Event] = [step(n, metrics={"accuracy": 0.5}) for n in range(1, 200_001)]

    view.add(events)
    columns = view.columns()

    assert columns["step"] == list(range(1, 200_001))
    assert columns["accuracy"] == [0.5] * 200_000


def test_latest_values_follow_the_events() -> None:
    view = LatestValues()
    view.add(
        [
            made(JobPlanned, job_id="j", num_train_samples=64, total_steps=4),
            JobStatusChanged(job_id="j", time=0.0, status="running"),
            formed(3, ["a", "b"]),
            step(2, metrics={"accuracy": 0.25}),
            evaluation(2, 0.7, accuracy=0.5),
        ]
    )

    assert (view.status, view.step, view.total_steps) == ("running", 2, 4)
    assert (view.world_size, view.generation) == (2, 3)
    assert view.metrics == {"loss": 0.5, "accuracy": 0.25, "eval_loss": 0.7, "eval_accuracy": 0.5}


def test_peek_reads_the_two_ends_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, fsync_every_s=None)
    planned = made(JobPlanned, job_id="j", total_steps=5000)
    log.append([planned, JobStatusChanged(job_id="j", time=0.0, status="waiting")])
    log.append([LogLine(job_id="j", time=0.0, level="info", worker="", text="x" * 90)] * 500)
    log.append([JobStatusChanged(job_id="j", time=0.0, status="running")])
    log.append([step(n) for n in range(1, 2001)])
    log.close()

    view = peek_log(path)

    assert path.stat().st_size > 3 * 64 * 1024
    assert (view.status, view.step, view.total_steps) == ("running", 2000, 5000)


def formed(generation: int, ranks: list[str]) -> GenerationFormed:
    return made(GenerationFormed, job_id="j", generation=generation, ranks=ranks, step=1)


def test_peek_counts_the_workers_of_a_generation_that_formed_between_the_two_ends(
    tmp_path: Path,
) -> None:
    log = EventLog(tmp_path / "events.jsonl", fsync_every_s=None)
    log.append([JobStatusChanged(job_id="j", time=0.0, status="running"), formed(1, ["a"])])
    log.append([step(n, world_size=1) for n in range(1, 1001)])
    log.append([formed(2, ["a", "b", "c"])])
    log.append([step(n, world_size=3, generation=2) for n in range(1001, 2001)])
    log.close()

    view = peek_log(log.path)

    assert log.path.stat().st_size > 3 * 64 * 1024
    assert (view.world_size, view.generation, view.step) == (3, 2, 2000)


def test_paused_job_counts_the_remaining_ranks() -> None:
    view = LatestValues()
    view.add([formed(1, ["a", "b", "c"]), step(1, world_size=3)])
    view.add([WorkerLost(job_id="j", time=0.0, worker="b", cause="killed")])
    view.add([JobStatusChanged(job_id="j", time=0.0, status="paused")])
    assert view.world_size == 2

    view.add([WorkerLeft(job_id="j", time=0.0, worker="a", reason="preempted")])
    view.add([WorkerLeft(job_id="j", time=0.0, worker="d", reason="never a rank")])
    assert view.world_size == 1


def test_peek_finds_the_newest_state_behind_many_printed_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", fsync_every_s=None)
    said = LogLine(job_id="j", time=0.0, level="info", worker="", text="x" * 90)
    log.append([JobStatusChanged(job_id="j", time=0.0, status="waiting"), formed(1, ["a"])])
    log.append([said] * 2000)
    log.append([formed(2, ["a", "b"]), step(7, world_size=2, generation=2)])
    log.append([said] * 2000)
    log.close()

    view = peek_log(log.path)

    assert (view.status, view.world_size, view.step) == ("running", 2, 7)


def test_peek_at_a_missing_log_gives_status_submitted(tmp_path: Path) -> None:
    assert peek_log(tmp_path / "none").status == "submitted"


def test_restore_drops_later_best_steps_and_the_end_sets_the_total_steps() -> None:
    common = {"job_id": "j", "time": 1.0}
    view = LatestValues()
    for number, value in ((2, 0.5), (4, 0.9)):
        view.add([BestReached(**common, step=number, metric="accuracy", value=value)])
    assert [best.step for best in view.best] == [2, 4]

    view.add([JobRestored(**common, step=3, num_undone=2)])
    assert [best.step for best in view.best] == [2]

    view.total_steps = 100
    view.add([step(5), JobStatusChanged(**common, status="finished", reason="early stopping")])
    assert (view.step, view.total_steps) == (5, 5)


def test_resumed_job_has_one_history() -> None:
    view = LatestValues()
    common: dict[str, Any] = {"job_id": "j", "time": 5.0}
    view.add([step(number) for number in (1, 2, 3)])
    view.add(
        [
            UserErrorRaised(**common, error="ValueError: x", traceback="", workers=["w0"]),
            JobStatusChanged(**common, status="failed", reason="ValueError: x"),
        ]
    )
    assert view.is_terminal

    view.add(
        [
            JobResumed(**common, from_status="failed", step=3, min_workers=2, max_workers=3),
            JobStatusChanged(**common, status="submitted"),
            JobRestored(**common, generation=2, step=2, num_undone=1),
            step(3, generation=2, loss=7.0),
        ]
    )

    assert (view.status, view.reason, view.is_terminal) == ("submitted", "", False)
    assert (view.user_error, view.workers) == (None, (2, 3))
    assert view.columns()["step"] == [1, 2, 3]
    assert view.columns()["loss"][-1] == 7.0


def test_peek_at_a_resumed_job_gives_its_newest_status(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    common: dict[str, Any] = {"job_id": "j", "time": 5.0}
    log.append([step(1), JobStatusChanged(**common, status="stopped")])
    log.append(
        [
            JobResumed(**common, from_status="stopped", step=1, min_workers=1, max_workers=1),
            JobStatusChanged(**common, status="submitted"),
        ]
    )

    view = peek_log(log.path)

    assert (view.status, view.is_terminal, view.step, view.world_size) == ("submitted", False, 1, 0)
    log.close()


def timed(worker: str, world_size: int, samples: int, elapsed_s: float, **more: Any) -> RankTimed:
    spent = {"data_s": 0.0, "compute_s": elapsed_s, "communication_s": 0.0, "optimizer_s": 0.0}
    return RankTimed(
        job_id="j",
        time=0.0,
        worker=worker,
        rank=0,
        world_size=world_size,
        step=4,
        num_steps=2,
        samples=samples,
        elapsed_s=elapsed_s,
        **{**NOTHING_ELSE, **spent, **more},
    )


def test_efficiency_is_relative_to_the_throughput_of_a_single_worker():
    events = [timed("w0", 1, 100, 1.0), timed("w0", 2, 60, 1.0), timed("w1", 2, 80, 1.0)]
    one, other = phases_of(events)
    assert (one["worker"], one["samples"], one["num_steps"]) == ("w0", 160, 4)
    assert one["samples_per_s"] == 80.0
    assert other["efficiency"] == pytest.approx(0.8)


def test_without_a_single_worker_baseline_only_communication_lowers_the_efficiency():
    [record] = phases_of([timed("w0", 4, 60, 2.0, compute_s=1.5, communication_s=0.5)])
    assert record["efficiency"] == pytest.approx(0.75)
    assert (record["compute_s"], record["communication_s"]) == (1.5, 0.5)


def test_no_events_give_no_record_and_zero_time_gives_zero_efficiency():
    assert phases_of([]) == []
    [record] = phases_of([timed("w0", 2, 0, 0.0, evaluation_s=1.0)])
    assert (record["efficiency"], record["evaluation_s"]) == (0.0, 1.0)


def test_event_survives_the_log():
    event = timed("w0", 2, 8, 1.0)
    assert event_from_dict(event.to_dict()) == event_from_dict(event.to_json_dict()) == event


def test_metrics_on_a_gpu_are_unknown():
    timed_on_gpu = timed("w0", 2, 8, 1.0, wait_s=0.25, metrics_s=None)
    [record] = phases_of([timed("w0", 2, 8, 1.0, wait_s=0.25, metrics_s=0.5), timed_on_gpu])
    assert record["wait_s"] == 0.5
    assert math.isnan(record["metrics_s"])
    [record] = phases_of([timed("w0", 2, 8, 1.0, metrics_s=0.5)] * 2)
    assert record["metrics_s"] == 1.0
