"""An exception of our own code stops nothing else, and is seen where the job is watched.

Review R2: one exception in a tick ended the ticker, silently and for all jobs; one in a report
ended the worker that had sent it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.head.coordinator import coordinator as coordinator_module
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.head.jobs import reports
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q
from tests.unit.head.coordinator.rig import Rig, put_bundle


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig(tmp_path, monkeypatch)
    made.survive_defects()
    return made


def fail(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("a mistake")


def errors(rig: Rig) -> list[str]:
    return [event.text for event in rig.events(events.LogLine) if event.level == "error"]


async def submit_another(rig: Rig) -> HostedJob:
    order: dict[str, Any] = {
        "job_id": "k",
        "name": "k",
        "run_dir": str(rig.folder / "k"),
        "config": {},
    }
    order |= put_bundle(order)
    await rig.coordinator._kernel_requests.submit(q.SubmitJob(job={**order, "max_workers": 1}))
    return rig.coordinator._jobs["k"]


async def test_exception_in_the_tick_of_one_job_does_not_affect_other_jobs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start("w1")
    other = await submit_another(rig)
    ticked: list[HostedJob] = []
    monkeypatch.setattr(
        rig.coordinator._injector,
        "tick",
        lambda job: fail() if job is rig.job else ticked.append(job),
    )
    rig.tick()

    assert ticked == [other]
    [text] = errors(rig)
    assert text.startswith(
        "a tick failed: ZeroDivisionError: a mistake. This is a defect in etrain"
    )
    assert not [e for e in other.job_log.since(0, 100) if e["event"] == "LogLine"]


async def test_ticker_continues_after_an_exception(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_module, "TICK_S", 0.0)
    third = asyncio.Event()
    calls: list[int] = []

    def tick() -> None:
        calls.append(1)
        if len(calls) == 3:
            third.set()
        fail()

    monkeypatch.setattr(rig.coordinator, "tick", tick)
    ticker = asyncio.create_task(rig.coordinator._tick_often())
    await asyncio.wait_for(third.wait(), 10)
    ticker.cancel()
    assert [r.getMessage() for r in caplog.records] == [
        "the cluster: a tick failed: ZeroDivisionError: a mistake"
    ]


async def test_report_whose_handler_raises_is_acknowledged_and_later_ones_are_handled(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start("w1")
    monkeypatch.setattr(reports.TrainerMessages, "_on_text", fail)
    rig.tell("w1", m.TextLogged, number=1, level="info", text="hi")
    rig.tick()
    monkeypatch.undo()
    rig.commit("w1", 1)

    assert [order.number for order in rig.orders("w1", m.AcknowledgeReports)] == [1]
    assert rig.job.state.step == 1
    assert "handling TextLogged of tls://w1 failed: ZeroDivisionError" in errors(rig)[0]


async def test_failing_command_does_not_prevent_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start("w1", "w2")
    monkeypatch.setattr(m, "BreakGeneration", fail)
    rig.tell("w2", m.TrainerExited, cause="killed")

    assert [event.worker for event in rig.events(events.WorkerLost)] == ["w2"]
    assert len(rig.orders("w2", m.LaunchTrainer)) == 2
    assert "carrying out AbortGeneration failed" in errors(rig)[0]


async def test_repeated_defect_is_logged_less_and_less_often(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start("w1")
    monkeypatch.setattr(rig.coordinator._injector, "tick", fail)
    for number in range(4 * 100):
        if number % 4 == 0:
            rig.beat("w1", beats=number)
        rig.tick()
    texts = errors(rig)
    assert len(texts) == 4  # at once, after 10, 30 and 70 s
    assert "more times since it was last logged" in texts[-1]
    assert rig.job.state.status == "running"


async def test_failed_request_is_reported_to_its_caller(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start("w1")
    monkeypatch.setattr(m, "LeaveGeneration", fail)
    with pytest.raises(
        RequestError, match="pause may be incomplete, because of a defect in etrain"
    ):
        await rig.control("pause")


async def test_failing_cost_report_does_not_prevent_the_end_from_being_logged(rig: Rig) -> None:
    await rig.start("w1")
    rig.job.before_end = fail
    rig.job.handle(s.StopRequested(now=True))
    assert rig.events(events.JobStatusChanged)[-1].status == "stopped"
