from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.log import events as t
from etrain_jupyter.notebook.dashboard.event_text import describe
from etrain_jupyter.notebook.dashboard.job_view import JobView, controls_of
from etrain_jupyter.notebook.dashboard.snapshot import (
    BestValue,
    ChartList,
    CostSummary,
    EventLine,
    Snapshot,
    TimeSplit,
)
from tests.unit.log.spent import NOTHING_ELSE, PLAIN_STEP
from tests.unit.log.test_event_log import events_of
from tests.unit.notebook.dashboard.scripted_job import JOB_ID, Script

EVENTS = list(Script(num_steps=60).events())


def view_of(events: list[t.Event]) -> JobView:
    view = JobView(JOB_ID)
    view.add(events)
    return view


def until(kind: type[t.Event], count: int = 1) -> list[t.Event]:
    """The scripted events up to the ``count``-th of that kind."""
    seen = itertools.accumulate(isinstance(event, kind) for event in EVENTS)
    return [event for event, number in zip(EVENTS, seen, strict=True) if number < count] + [
        [event for event in EVENTS if isinstance(event, kind)][count - 1]
    ]


def state_of(snapshot: Snapshot, worker: str) -> tuple[str, int | None]:
    row = next(row for row in snapshot.workers if row.worker == worker)
    return row.state, row.rank


def test_snapshot_of_a_finished_job_matches_its_log() -> None:
    snapshot = view_of(EVENTS).snapshot()

    assert snapshot.status == "finished"
    assert (snapshot.step, snapshot.total_steps, snapshot.progress) == (60, 60, 1.0)
    assert (snapshot.world_size, snapshot.max_workers, snapshot.generation) == (4, 4, 6)
    assert (snapshot.num_lost, snapshot.num_preempted, snapshot.num_undone) == (1, 1, 1)
    assert snapshot.eval.step == 60
    assert snapshot.checkpoint.step == 60
    assert snapshot.eta_s is None
    assert [marker.kind for marker in snapshot.markers] == [
        "join",
        "lost",
        "join",
        "notice",
        "left",
        "join",
        "checkpoint",
    ]


@given(cuts=st.sets(st.integers(min_value=0, max_value=len(EVENTS))))
def test_the_snapshot_does_not_depend_on_batching(cuts: set[int]) -> None:
    whole, pieces = view_of(EVENTS), JobView(JOB_ID)

    places = sorted({0, len(EVENTS)} | cuts)
    for start, end in itertools.pairwise(places):
        pieces.add(EVENTS[start:end])
        pieces.snapshot()  # looking changes nothing

    assert pieces.snapshot() == whole.snapshot()
    for name, (x, y) in whole.curves.to_dict().items():
        np.testing.assert_array_equal(pieces.curves.to_dict()[name][0], x)
        np.testing.assert_array_equal(pieces.curves.to_dict()[name][1], y)


def test_events_seen_before_are_skipped() -> None:
    view = view_of(EVENTS)
    before = view.snapshot()

    view.add(EVENTS)

    assert view.snapshot() == before


def test_events_read_back_from_the_log_give_the_same_snapshot() -> None:
    lines = [json.dumps(event.to_json_dict()) for event in EVENTS]

    replayed = view_of([t.event_from_dict(json.loads(line)) for line in lines])

    assert replayed.snapshot() == view_of(EVENTS).snapshot()


def test_rank_of_a_lost_worker_is_reassigned_to_a_survivor() -> None:
    lost = view_of(until(t.WorkerLost)).snapshot()
    formed = view_of(until(t.GenerationFormed, 3)).snapshot()

    assert state_of(lost, "w1") == ("lost", None)
    assert state_of(formed, "w2") == ("training", 1)
    assert formed.world_size == 3


def test_each_worker_counts_the_steps_that_it_took_part_in() -> None:
    rows = {row.worker: row.steps for row in view_of(EVENTS).snapshot().workers}

    assert rows == {"w0": 60, "w1": 24, "w2": 29, "w3": 50, "w4": 33, "w5": 15}


def test_event_text_uses_singular_and_plural() -> None:
    script = Script(num_steps=60)
    events = [*script.begin(), *script.form(["w0"], "start"), *script.form(["w0", "w1"], "join")]

    texts = [event.text for event in view_of(events).snapshot().events]

    assert [text.partition(": ")[2].partition(" from")[0] for text in texts[-2:]] == [
        "1 worker continues",
        "2 workers continue",
    ]


def test_worker_with_a_notice_trains_until_it_leaves() -> None:
    assert state_of(view_of(until(t.PreemptionNoticed)).snapshot(), "w2") == ("leaving", 1)
    assert state_of(view_of(until(t.WorkerLeft)).snapshot(), "w2") == ("left", None)


def test_worker_at_risk_keeps_training_and_is_listed_and_marked() -> None:
    script = Script(num_steps=60)
    events = [*script.begin(), *script.form(["w0"], "start"), *script.complete(1)]
    before = state_of(view_of(events).snapshot(), "w0")
    events.append(script.make(t.RebalanceRecommended, worker="w0"))

    snapshot = view_of(events).snapshot()

    assert state_of(snapshot, "w0") == before
    assert snapshot.events[-1].text == (
        "w0 is likely to be preempted; it keeps training, and a checkpoint is saved"
    )
    assert [(m.kind, m.text) for m in snapshot.markers if m.kind == "notice"] == [
        ("notice", "w0 likely to be preempted")
    ]


def test_injected_fault_is_listed_and_marked() -> None:
    script = Script(num_steps=60)
    events = [*script.begin(), *script.form(["w0"], "start"), *script.complete(1)]
    events.append(script.make(t.FaultInjected, worker="w0", fault="hold_gil", step=1))

    snapshot = view_of(events).snapshot()

    assert snapshot.events[-1].text == "Fault hold_gil injected into w0"
    assert [(m.kind, m.text) for m in snapshot.markers if m.kind == "notice"] == [
        ("notice", "Fault hold_gil injected into w0")
    ]


def test_world_size_is_a_staircase_over_steps() -> None:
    x, y = view_of(EVENTS).curves.to_dict()["world_size"]

    assert x.tolist() == [0, 10, 24, 27, 39, 45]
    assert y.tolist() == [2, 4, 3, 4, 3, 4]


def test_a_job_that_waits_for_workers_has_none() -> None:
    script = Script(num_steps=60)
    events = [*script.begin(), *script.form(["w0"], "start"), *script.complete(1)]
    events.append(script.make(t.WorkerLost, worker="w0", cause="machine gone"))
    events.append(script.make(t.JobStatusChanged, status="waiting", reason="0 of 1 workers"))

    snapshot = view_of(events).snapshot()

    assert (snapshot.world_size, snapshot.reason) == (0, "0 of 1 workers")


def paused_script() -> tuple[Script, list[t.Event]]:
    """Two ranks that step and pause."""
    script = Script(num_steps=60)
    events = [*script.begin(), *script.form(["w0", "w1"], "start")]
    events.append(script.make(t.JobStatusChanged, status="running"))
    events += [*script.complete(1), *script.complete(2)]
    return script, events


def test_a_paused_job_has_workers_that_wait_and_no_throughput() -> None:
    script, events = paused_script()
    events.append(script.make(t.JobStatusChanged, status="paused"))

    snapshot = view_of(events).snapshot()

    rows = [(row.worker, row.rank, row.state, row.note) for row in snapshot.workers]
    assert rows == [("w0", None, "waiting", "paused"), ("w1", None, "waiting", "paused")]
    assert (snapshot.world_size, snapshot.samples_per_s) == (2, 0.0)


def test_a_worker_that_is_lost_while_the_job_pauses_or_is_paused_is_not_counted() -> None:
    script, events = paused_script()
    events.append(script.make(t.WorkerLost, worker="w0", cause="killed"))
    events.append(script.make(t.JobStatusChanged, status="paused"))
    view = view_of(events)

    assert view.snapshot().world_size == 1

    view.add([script.make(t.WorkerLost, worker="w1", cause="killed")])
    assert view.snapshot().world_size == 0


def test_resuming_adds_no_newcomers() -> None:
    script, events = paused_script()
    events.append(script.make(t.JobStatusChanged, status="paused"))
    events += script.form(["w0", "w1"], "resume")
    events += [script.make(t.JobStatusChanged, status="running"), *script.complete(3)]

    snapshot = view_of(events).snapshot()

    assert [(row.state, row.steps) for row in snapshot.workers] == [("training", 3)] * 2
    assert [marker.kind for marker in snapshot.markers] == ["paused", "resumed"]
    assert snapshot.samples_per_s > 0


def test_a_job_that_waited_for_its_first_workers_was_not_resumed() -> None:
    script = Script(num_steps=60)
    events = [*script.begin(), script.make(t.JobStatusChanged, status="waiting")]
    events += script.form(["w0"], "start")
    events += [script.make(t.JobStatusChanged, status="running"), *script.complete(1)]

    assert view_of(events).snapshot().markers == ()


def test_a_silent_scheduler_is_the_reason_and_changes_nothing_else() -> None:
    script, events = paused_script()
    events.append(script.make(t.JobStatusChanged, status="paused"))
    view = view_of(events)
    before = view.snapshot()
    aside = {"job_id": JOB_ID, "time": script.now + 30, "status": "paused"}

    view.add([t.JobStatusChanged(**aside, reason="its scheduler cannot be reached, retrying")])
    silent = view.snapshot()
    view.add([t.JobStatusChanged(**aside)])

    assert (silent.status, silent.reason) == (
        "paused",
        "its scheduler cannot be reached, retrying",
    )
    assert dataclasses.replace(silent.events[-1], id=0, time=0.0) == EventLine(
        id=0,
        seq=0,
        time=0.0,
        kind="JobStatusChanged",
        level="warning",
        text="Paused: its scheduler cannot be reached, retrying",
    )
    assert view.snapshot().reason == ""
    assert (silent.markers, silent.workers) == (before.markers, before.workers)


def test_resuming_from_an_older_step_removes_the_later_steps() -> None:
    script = Script(num_steps=60)
    events = [*script.begin(), *script.form(["w0"], "start")]
    events += [event for step in range(1, 31) for event in script.complete(step)]
    script.step = 20
    events += script.form(["w9"], "resume")
    view = view_of(events)

    assert view.snapshot().step == 20
    assert view.rewinds == 1
    assert view.curves.to_dict()["loss"][0].tolist() == list(range(1, 21))

    view.add(script.complete(21))
    assert view.curves.to_dict()["loss"][0].tolist() == list(range(1, 22))


def test_undone_steps_are_kept_in_a_limited_curve_of_their_own() -> None:
    script = Script(num_steps=6000)
    view = view_of([*script.begin(), *script.form(["w0"], "start")])
    view.add([event for step in range(1, 31) for event in script.complete(step)])
    script.step = 20
    view.add(script.form(["w0"], "resume"))
    assert view.curves.to_dict()["undone.loss"][0].tolist() == list(range(20, 31))

    view.add([event for step in range(21, 26) for event in script.complete(step)])
    script.step = 22
    view.add(script.form(["w0"], "resume"))
    steps, values = view.curves.to_dict()["undone.loss"]
    assert steps.tolist() == list(range(22, 31)), "the newest of each step"
    assert len(values) == len(steps)
    assert {name for name in view.curves.to_dict() if name.startswith("undone.")} == {
        "undone.loss",
        "undone.metrics.accuracy",
    }

    view.add([event for step in range(23, 6000) for event in script.complete(step)])
    script.step = 22
    view.add(script.form(["w0"], "resume"))
    assert len(view.curves.to_dict()["undone.loss"][0]) <= 1002


@pytest.mark.parametrize("batch", [1, 20])
def test_the_remaining_time_ignores_stalls_and_batched_clocks(batch: int) -> None:
    script = Script(num_steps=1000)
    events = [*script.begin(), *script.form(["w0"], "start")]
    events.append(script.make(t.JobStatusChanged, status="running"))
    clock = script.now
    for step in range(1, 101):
        clock += 0.1 + (30 if step == 50 else 0)  # one long stall
        if step % batch == 0:
            script.now = clock
        events += [e for e in script.complete(step) if isinstance(e, t.StepCompleted)]
        script.now = clock if step % batch == 0 else events[-1].time - 0.08

    eta_s = view_of(events).snapshot().eta_s

    assert eta_s == pytest.approx(90, rel=0.35)


def test_nan_loss_survives_json() -> None:
    script = Script()
    step = {"epoch": 0, "first": 0, "samples": 4, "sample_checksum": 0, "lr": 0.1}
    events = [
        script.make(
            t.StepCompleted,
            step=1,
            loss=float("nan"),
            world_size=1,
            samples_per_s=1.0,
            **step,
            **PLAIN_STEP,
        )
    ]

    text = json.dumps(view_of(events).snapshot().to_json(), allow_nan=False)

    assert json.loads(text)["loss"] == "NaN"


def test_the_charts_are_known_before_the_first_step() -> None:
    snapshot = view_of(EVENTS[:1]).snapshot()

    assert snapshot.charts == ChartList(metrics=("accuracy",), has_eval=True)


def test_metrics_returned_by_a_step_have_charts_from_the_first_step_on() -> None:
    view = view_of([event for event in EVENTS if isinstance(event, t.JobSubmitted)])
    configured = view.snapshot().charts.metrics
    steps = [event for event in EVENTS if isinstance(event, t.StepCompleted)][:3]

    view.add([dataclasses.replace(event, metrics={"mlm": 0.5, "sop": 0.1}) for event in steps])

    assert view.snapshot().charts.metrics == (*configured, "mlm", "sop")


def test_a_metric_of_evaluations_alone_has_no_value_at_steps() -> None:
    view = view_of(EVENTS)
    [last] = [event for event in EVENTS if isinstance(event, t.EvalCompleted)][-1:]
    view.add([dataclasses.replace(last, seq=10**9, metrics={"f1": 0.25})])

    snapshot = view.snapshot()

    assert "f1" not in snapshot.metrics
    assert snapshot.eval.metrics == {"f1": 0.25}
    assert "metrics.f1" not in view.curves.to_dict()
    assert view.curves.to_dict()["eval.f1"][1].tolist() == [0.25]


@pytest.mark.parametrize("has_loss", [True, False])
def test_scores_join_the_evaluation_of_their_step(has_loss: bool) -> None:
    events = [e for e in EVENTS if has_loss or not isinstance(e, t.EvalCompleted)]
    view = view_of(events)
    [last] = [event for event in EVENTS if isinstance(event, t.EvalCompleted)][-1:]
    common = {"job_id": last.job_id, "time": last.time, "seq": 10**9}
    scored = t.EvalScored(**common, step=last.step, samples=9, duration_s=1.0, scores={"map": 0.5})

    view.add([scored])

    snapshot = view.snapshot()
    before = last.metrics if has_loss else {}
    assert snapshot.eval.step == last.step
    assert snapshot.eval.loss == (last.loss if has_loss else None)
    assert snapshot.eval.metrics == {**before, "map": 0.5}
    assert view.curves.to_dict()["eval.map"][1].tolist() == [0.5]
    assert "map" in snapshot.charts.metrics
    assert snapshot.events[-1].text == f"Scored the evaluation of step {last.step:,}: map 0.5"


def exhibit(step: int, name: str) -> t.ExhibitStored:
    common: dict[str, Any] = {"job_id": JOB_ID, "time": 1.0}
    return t.ExhibitStored(
        **common, step=step, name=name, format="text", size_bytes=1, digest="0" * 64
    )


def test_exhibits_are_listed_by_name_with_their_steps() -> None:
    removed = t.ExhibitsRemoved(job_id=JOB_ID, time=1.0, step=10, files=[], reason="old")
    view = view_of([exhibit(20, "b"), exhibit(10, "b"), exhibit(20, "a"), exhibit(20, "../x")])
    before = view.snapshot()
    view.add([removed, exhibit(30, "b")])

    assert [(one.name, one.steps) for one in before.exhibits] == [("a", (20,)), ("b", (10, 20))]
    assert [(one.name, one.steps) for one in view.snapshot().exhibits] == [
        ("a", (20,)),
        ("b", (20, 30)),
    ]
    assert view.snapshot().events == ()
    assert json.loads(json.dumps(view.snapshot().to_json()))["exhibits"][0] == {
        "name": "a",
        "steps": [20],
    }


def test_number_of_exhibits_in_a_snapshot_is_limited() -> None:
    many = [exhibit(step, f"n{number}") for step in range(400) for number in range(2)]
    names = [exhibit(1000, f"m{number}") for number in range(60)]

    few = view_of(many).snapshot().exhibits
    assert [len(one.steps) for one in few] == [300, 300]
    assert few[0].steps[-1] == 399
    assert len(view_of(names).snapshot().exhibits) == 50


def test_unknown_event_of_a_newer_version_is_listed() -> None:
    event = t.event_from_dict(
        {"event": "WorkerSang", "job_id": JOB_ID, "time": 1.0, "seq": 1, "song": "la"}
    )

    assert view_of([event]).snapshot().events[0].text == ("WorkerSang (written by a newer version)")


@pytest.mark.parametrize("kind", sorted(t.Event.kinds))
@given(data=st.data())
def test_every_kind_of_event_is_described_or_omitted_explicitly(
    kind: str, data: st.DataObject
) -> None:
    line = describe(data.draw(events_of(t.Event.kinds[kind])))

    assert line is None or line.text != kind


def test_a_long_run_is_folded_fast_enough_to_attach_to() -> None:
    script = Script(num_steps=20_000)

    view = view_of(list(script.events()))

    assert len(view.snapshot().events) == 120 + 3
    assert len(view.curves.to_dict()["loss"][0]) == 20_000


def test_job_that_ended_early_is_complete_and_has_a_reason() -> None:
    common: dict[str, Any] = {"job_id": JOB_ID, "time": EVENTS[-1].time}
    reason = (
        "early stopping: accuracy has not improved in 3 evaluations since its best, 0.9 at step 10"
    )
    steps = until(t.StepCompleted, 20)
    best = t.BestReached(**common, step=10, metric="accuracy", value=0.9)
    stopped = t.EarlyStopped(
        **common,
        step=20,
        metric="accuracy",
        best=0.9,
        best_step=10,
        num_evals=3,
        reason=reason,
    )
    ended = t.JobStatusChanged(**common, status="finished", reason=reason)
    snapshot = view_of([*steps, best, stopped, ended]).snapshot()

    assert (snapshot.status, snapshot.reason) == ("finished", reason)
    assert (snapshot.step, snapshot.total_steps, snapshot.progress) == (20, 20, 1.0)
    assert snapshot.eta_s is None
    assert snapshot.best == BestValue(step=10, metric="accuracy", value=0.9)
    texts = [entry.text for entry in snapshot.events]
    assert texts[-3] == "Best so far: accuracy 0.9 at step 10"
    assert texts[-2].startswith("Early stopping: accuracy has not improved in 3 evaluations")


def test_best_value_of_undone_steps_is_dropped() -> None:
    common: dict[str, Any] = {"job_id": JOB_ID, "time": 1.0}
    best = t.BestReached(**common, step=10, metric="loss", value=0.9)
    restored = t.JobRestored(**common, step=9, num_undone=1)

    assert view_of([best]).snapshot().best is not None
    assert view_of([best, restored]).snapshot().best is None


def test_nan_loss_is_listed_with_its_workers() -> None:
    told = t.LossNotFinite(
        job_id=JOB_ID, time=1.0, step=7, loss=float("nan"), ranks=[1], workers=["w2"]
    )
    [entry] = view_of([told]).snapshot().events

    assert entry.level == "error"
    assert entry.text == "The loss of step 7 is nan on w2: no worker updated its weights"


def test_global_batch_grows_with_the_workers_if_each_has_a_fixed_batch() -> None:
    script = Script(num_steps=60)
    events = [
        dataclasses.replace(event, global_batch_size=32, per_worker_batch_size=32)
        if isinstance(event, t.JobPlanned)
        else event
        for event in script.begin()
    ]
    before = view_of(events).snapshot().global_batch_size
    events += [*script.form(["w0", "w1", "w2"], "start"), *script.complete(1)]

    assert (before, view_of(events).snapshot().global_batch_size) == (32, 96)


def test_resumed_job_is_active_again_and_keeps_its_curves() -> None:
    view = view_of(EVENTS)
    seq = EVENTS[-1].seq
    common = {"job_id": JOB_ID, "time": 9e9, "generation": 6}
    ended = view.snapshot()
    resumed = t.JobResumed(
        **common, seq=seq + 1, from_status="finished", step=60, min_workers=1, max_workers=2
    )

    view.add([resumed, t.JobStatusChanged(**common, seq=seq + 2, status="submitted")])

    snapshot = view.snapshot()
    assert (ended.ended_at is None, snapshot.ended_at) == (False, None)
    assert (snapshot.status, snapshot.step, snapshot.world_size) == ("submitted", 60, 0)
    assert (snapshot.min_workers, snapshot.max_workers) == (1, 2)
    assert {row.state for row in snapshot.workers} <= {"left", "lost"}
    assert {row.rank for row in snapshot.workers} == {None}
    assert len(view.curves.to_dict()["loss"][0]) == 60
    assert snapshot.markers[-1].text == "Resumed on pool local"
    assert snapshot.events[-2].text.startswith("Resumed on pool local for 1 to 2 workers")


def test_samples_and_time_of_each_step_are_removed_by_a_rewind() -> None:
    script = Script(num_steps=60)
    events = [*script.begin(), *script.form(["w0"], "start")]
    began = script.now
    events += [event for step in range(1, 11) for event in script.complete(step)]
    view = view_of(events)
    steps, samples = view.curves.to_dict()["samples"]
    elapsed = view.curves.to_dict()["elapsed_s"][1]

    assert steps.tolist() == list(range(1, 11))
    assert samples.tolist() == [256 * step for step in range(1, 11)]
    assert elapsed[-1] == pytest.approx(script.now - began, rel=1e-5)

    script.step = 4
    view.add([script.make(t.JobRestored, step=4, num_undone=6)])
    script.now += 100
    view.add(script.complete(5))

    assert view.curves.to_dict()["samples"][1].tolist() == [256, 512, 768, 1024, 1280]
    assert view.curves.to_dict()["elapsed_s"][1][-1] > 100
    assert view.snapshot().markers[-1].text.endswith(", 6 steps will be trained again")


def test_elapsed_time_continues_if_the_clock_is_set_back() -> None:
    script = Script(num_steps=60)
    view = view_of([*script.begin(), *script.form(["w0"], "start"), *script.complete(1)])
    before = view.snapshot().elapsed_s

    script.now -= 3600
    events = list(script.complete(2))
    view.add(events)

    last, elapsed = events[-1].time - events[0].time, view.curves.to_dict()["elapsed_s"][1]
    assert view.snapshot().elapsed_s == pytest.approx(before + last)
    assert elapsed[-1] >= elapsed[-2] > 0


def test_rewind_cuts_the_world_size_over_steps_but_not_over_time() -> None:
    script = Script(num_steps=60)
    events = [*script.begin(), *script.form(["w0", "w1"], "start"), *script.complete(9)]
    events += script.form(["w0"], "lost")
    script.step = 3
    events.append(script.make(t.JobRestored, step=3, num_undone=6))
    events += script.form(["w0", "w1"], "join")
    view = view_of(events)

    assert view.curves.to_dict()["time.world_size"][1].tolist() == [2, 1, 2]
    assert view.curves.to_dict()["world_size"][1].tolist() == [2]


def timed(script: Script, worker: str, **spent: float) -> t.Event:
    return script.make(
        t.RankTimed,
        **{"worker": worker, "rank": 0, "world_size": 2, "step": 2, "num_steps": 2},
        **{"samples": 512, "elapsed_s": 4.0, "compute_s": 1.0, "optimizer_s": 0.2},
        **{"data_s": 0.0, "communication_s": 0.0, **NOTHING_ELSE, **spent},
    )


def test_worker_has_a_time_split_and_what_it_waits_for() -> None:
    script, events = paused_script()
    events += [timed(script, "w0", data_s=2.0), timed(script, "w1", communication_s=1.2)]
    rows = view_of(events).snapshot().workers

    assert rows[0].split == TimeSplit(
        step=2,
        num_steps=2,
        samples_per_s=128.0,
        shares={
            "data": 0.5,
            "compute": 0.25,
            "communication": 0.0,
            "optimizer": 0.05,
            "other": pytest.approx(0.2),
        },
    )
    assert [row.waits_for for row in rows] == ["data, 50 %", "other ranks, 30 %"]


def test_snapshot_of_many_workers_has_one_page_with_those_that_do_not_train() -> None:
    script = Script()
    names = [f"w{number}" for number in range(1000)]
    events = [*script.begin(), *script.form(names, "start")]
    for worker in ("w900", "w950"):
        events.append(script.make(t.WorkerLost, worker=worker, cause="gone", detected_s=0.1))

    snapshot = view_of(events).snapshot()

    shown = [row.worker for row in snapshot.workers]
    assert shown == [*names[:98], "w900", "w950"]
    assert snapshot.num_more_workers == 900


def test_worker_that_does_not_train_waits_for_something_and_has_no_split() -> None:
    script, events = paused_script()
    events.append(script.make(t.WorkerJoined, worker="w9"))
    events.append(script.make(t.JobStatusChanged, status="paused"))

    rows = view_of(events).snapshot().workers

    assert [(row.worker, row.split, row.waits_for) for row in rows] == [
        ("w0", None, "the job to be resumed"),
        ("w1", None, "the job to be resumed"),
        ("w9", None, "its trainer to start"),
    ]


def test_cost_is_known_once_the_pool_reports_it() -> None:
    script, events = paused_script()
    assert view_of(events).snapshot().cost is None

    events.append(script.make(t.CostUpdated, spent_usd=1.5, on_demand_usd=4.0, wasted_usd=0.25))

    assert view_of(events).snapshot().cost == CostSummary(
        spent_usd=1.5, saved_usd=2.5, wasted_usd=0.25
    )


def test_many_checkpoints_do_not_displace_an_error() -> None:
    script, events = paused_script()
    events.append(script.make(t.WorkerLost, worker="w1", cause="killed"))
    saved = {"manifest": "m", "size_bytes": 1, "stall_s": 0.0, "duration_s": 0.1}
    events += [script.make(t.CheckpointCommitted, step=step, **saved) for step in range(500)]

    listed = view_of(events).snapshot().events

    assert (len(listed), listed[0].text) == (121, "w1 lost (killed)")
    assert [event.seq for event in listed] == sorted(event.seq for event in listed)


@pytest.mark.parametrize(
    ("status", "num_training", "possible"),
    [
        ("submitted", 0, {"pause", "scale", "stop"}),
        ("running", 2, {"pause", "checkpoint", "scale", "preempt", "stop"}),
        ("paused", 0, {"resume", "scale", "stop"}),
        ("waiting", 0, {"pause", "scale", "stop"}),
        ("finished", 0, set()),
        ("stopped", 0, {"resume"}),
        ("failed", 0, {"resume"}),
    ],
)
def test_possible_requests_follow_from_the_status(
    status: str, num_training: int, possible: set[str]
) -> None:
    controls = controls_of(status, num_training=num_training)

    assert {request for request, why_not in controls.items() if not why_not} == possible
    assert all(why_not.endswith(".") for why_not in controls.values() if why_not)


def test_startup_is_in_the_snapshot_until_the_first_step_and_then_in_the_events() -> None:
    before = view_of(until(t.WorkerWarmed)).snapshot()
    after = view_of(until(t.StepCompleted)).snapshot()

    assert [(stage.name, stage.took_s) for stage in before.startup][:2] == [
        ("workers", pytest.approx(0.1)),
        ("torch", pytest.approx(2.5)),
    ]
    begun = [stage for stage in before.startup if stage.since is not None]
    assert (begun[-1].name, begun[-1].took_s) == ("first step", None)
    assert after.startup == ()
    [line] = [line.text for line in after.events if line.text.startswith("First step")]
    assert line.startswith("First step after 2.7 s: workers 100 ms, torch 2.5 s, first step ")


def test_waiting_for_the_first_workers_is_no_warning() -> None:
    script = Script()
    submitted = next(iter(script.begin()))
    waiting = script.make(t.JobStatusChanged, status="waiting", reason="0 of min 1 workers")

    view = view_of([submitted, waiting])
    assert view.snapshot().events[-1].level == "info"

    view.add([script.make(t.WorkerLost, worker="w0", cause="killed")])
    view.add([script.make(t.JobStatusChanged, status="waiting", reason="w0 was lost")])
    assert view.snapshot().events[-1].level == "warning"
