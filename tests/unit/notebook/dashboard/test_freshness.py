from __future__ import annotations

import dataclasses

import pytest

from etrain_jupyter.log import events as t
from etrain_jupyter.notebook.dashboard.html import render_html, render_text
from etrain_jupyter.notebook.dashboard.job_view import JobView
from etrain_jupyter.notebook.dashboard.pace import trouble_of
from etrain_jupyter.notebook.dashboard.snapshot import CheckpointDue
from tests.unit.log.spent import PLAIN_STEP
from tests.unit.notebook.dashboard.scripted_job import JOB_ID, Script

START = 1000.0


def job(every: str | None, *, steps: int = 40, step_s: float = 2.0) -> tuple[JobView, Script]:
    """A job of 200 steps an epoch that runs for ``steps`` without a checkpoint."""
    script, view = Script(start=START), JobView(JOB_ID)
    events = list(script.begin())
    config = {"checkpoint": {"every": every}}
    events[0] = dataclasses.replace(events[0], config=config)
    script.now = START
    view.add([*events, *script.form(["w0", "w1"], "start")])
    script.now = START
    view.add([script.make(t.JobStatusChanged, status="running")])
    view.add([step_at(script, number, START + number * step_s) for number in range(1, steps + 1)])
    return view, script


def step_at(script: Script, step: int, time: float) -> t.Event:
    script.now = time
    values = {"samples": 1, "sample_checksum": 0, "loss": 1.0, "lr": 0.1, "world_size": 2}
    return script.make(
        t.StepCompleted, step=step, epoch=0, first=0, samples_per_s=1.0, **values, **PLAIN_STEP
    )


def committed(script: Script, step: int, duration_s: float = 1.0) -> t.Event:
    return script.make(
        t.CheckpointCommitted,
        step=step,
        manifest="m",
        size_bytes=1,
        stall_s=0.0,
        duration_s=duration_s,
    )


def due(view: JobView) -> CheckpointDue:
    return view.snapshot().checkpoint_due


@pytest.mark.parametrize(
    ("every", "limit_s"),
    [("10 steps", 60.0), ("15.0 s", 45.0), ("1.0 s", 30.0), ("0.5 epochs", 600.0)],
)
def test_a_checkpoint_is_overdue_after_three_intervals(every: str | None, limit_s: float) -> None:
    view, _ = job(every)

    assert due(view) == CheckpointDue(since=START, limit_s=pytest.approx(limit_s))
    assert trouble_of(view.snapshot(), START + limit_s) == ""
    assert trouble_of(view.snapshot(), START + limit_s + 1) == "overdue"


def test_auto_has_no_limit_before_the_first_checkpoint_and_then_the_chosen_one() -> None:
    view, script = job(None)
    assert due(view).limit_s is None

    chosen = {"interval_s": 20.0, "cost_s": 0.1, "loss_rate_per_h": 0.1}
    view.add([script.make(t.CheckpointIntervalChosen, **chosen)])

    assert due(view).limit_s == 60.0


def test_nothing_is_overdue_before_the_pace_is_known() -> None:
    view, _ = job("10 steps", steps=2)

    assert trouble_of(view.snapshot(), START + 1e6) == ""


def test_checkpoint_restarts_the_clock_and_adds_its_own_duration() -> None:
    view, script = job("10 steps")
    script.now = START + 100
    view.add([committed(script, 40, duration_s=7.0)])

    assert due(view) == CheckpointDue(since=START + 100, limit_s=pytest.approx(67.0))


def test_time_without_training_does_not_count() -> None:
    view, script = job("10 steps")
    script.now = START + 100
    view.add([script.make(t.JobStatusChanged, status="paused")])

    assert trouble_of(view.snapshot(), START + 1e6) == ""

    script.now = START + 1e6
    view.add([script.make(t.JobStatusChanged, status="running")])
    assert trouble_of(view.snapshot(), START + 1e6 + 59) == ""


def test_a_failure_shows_until_the_next_success_also_after_the_end() -> None:
    view, script = job("10 steps")
    view.add([script.make(t.CheckpointFailed, step=30, error="no space")])
    view.add([script.make(t.JobStatusChanged, status="finished")])

    assert due(view).failed == "step 30: no space"
    assert trouble_of(view.snapshot(), START) == "failed"

    view.add([committed(script, 40)])
    assert trouble_of(view.snapshot(), START) == ""


def test_html_and_text_name_an_overdue_checkpoint() -> None:
    view, script = job("10 steps", steps=20)
    view.add([committed(script, 20)])
    script.now += 100
    view.add([step_at(script, 21, script.now)])

    said = "checkpoint overdue, the newest is from step 20, 1.7 min old"
    assert f"{said}</p>" in render_html(view.snapshot(), view.curves.to_dict())
    assert said in render_text(view.snapshot())


def test_html_and_text_do_not_mention_a_timely_checkpoint() -> None:
    view, script = job("10 steps")
    view.add([committed(script, 40)])

    assert "overdue" not in render_html(view.snapshot(), view.curves.to_dict())
    assert "checkpoint" not in render_text(view.snapshot())
