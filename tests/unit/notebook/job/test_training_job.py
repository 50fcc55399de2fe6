from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from etrain_jupyter.errors import (
    CheckpointError,
    ConfigError,
    EtrainError,
    JobFailedError,
    JobLostError,
    PoolError,
)
from etrain_jupyter.log.blocks import Events
from etrain_jupyter.log.events import (
    BestReached,
    CheckpointCommitted,
    Event,
    GenerationFormed,
    JobPlanned,
    StepCompleted,
    UserErrorRaised,
    WarmUpReached,
    WorkerJoined,
)
from etrain_jupyter.log.segments import read_log
from etrain_jupyter.notebook.job import followed_job, waiting
from etrain_jupyter.notebook.job.link import NoAnswerError
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.storage.checkpoints import LocalStore, Manifest
from etrain_jupyter.wire.requests import Request, WorkerList
from tests.unit.log.spent import made
from tests.unit.notebook.job.fakes import FakeLink, new_job, status

_made: list[TrainingJob] = []


@pytest.fixture(autouse=True)
def _stop_following(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(followed_job, "RESPONSE_S", 0.05)
    yield
    while _made:
        _made.pop()._feed.close()


def make_job(tmp_path: Path, link: FakeLink | None, *events: Event) -> TrainingJob:
    _made.append(new_job(tmp_path, link, *events))
    return _made[-1]


def test_latest_values_are_read_from_the_log(tmp_path: Path) -> None:
    formed = made(GenerationFormed, job_id="digits-1", generation=2, ranks=["a", "b"], step=4)
    job = make_job(tmp_path, FakeLink(), status("running"), formed)

    assert (job.id, job.name, job.status) == ("digits-1", "digits", "running")
    assert (job.step, job.world_size, job.generation) == (4, 2, 2)
    assert [event.seq for event in job.events()] == [1, 2, 3]
    assert repr(job) == "<TrainingJob digits-1: running, step 4, 2 workers>"


def test_result_is_a_summary(tmp_path: Path) -> None:
    job = make_job(tmp_path, None, status("finished"))

    assert job.wait() == "finished"
    summary = {"job_id": "digits-1", "status": "finished", "step": 0, "epoch": 0, "duration_s": 1.0}
    assert job.result() == summary
    assert job.workers() == []


def test_result_of_a_failed_job_raises_the_users_error(tmp_path: Path) -> None:
    raised = UserErrorRaised(
        job_id="digits-1",
        time=2.0,
        error="ValueError: bad loss",
        traceback="Cell In[3], line 2\nValueError: bad loss",
        workers=["a"],
    )
    job = make_job(tmp_path, None, status("running"), raised, status("failed"))

    with pytest.raises(
        JobFailedError, match="before its first step on a: ValueError: bad loss"
    ) as caught:
        job.result()

    assert caught.value.render()[0] == "Cell In[3], line 2"
    assert caught.value.__notes__ == ["Cell In[3], line 2\nValueError: bad loss"]
    assert str(caught.value).count("Nothing was saved.") == 1


def test_failure_reports_the_step_the_workers_and_the_newest_checkpoint(tmp_path: Path) -> None:
    common = {"job_id": "digits-1", "time": 2.0}
    saved = CheckpointCommitted(
        **common, step=7, manifest="m", size_bytes=1, stall_s=0.0, duration_s=0.1
    )
    stood = made(GenerationFormed, **common, ranks=["a", "b"], step=7)
    raised = UserErrorRaised(
        **common, error="data.train is empty. Fill it.", traceback="", workers=["a", "b"], step=7
    )
    job = make_job(tmp_path, None, stood, saved, raised, status("failed"))

    with pytest.raises(JobFailedError) as caught:
        job.result()

    assert str(caught.value) == (
        f"job {job.id} failed after step 7 on a and b: data.train is empty. Fill it. The weights "
        f"of step 7 are saved in {job.record.folder}; job.load_into(model) loads them. Fix the "
        f"cause and run the cell again with --resume {job.id} to continue from there; %etrain logs "
        "shows the workers' output."
    )


def test_job_whose_cluster_has_ended_fails_with_that_reason(tmp_path: Path) -> None:
    job = make_job(tmp_path, None, status("running"))

    for wait in (job.wait, job.result):
        with pytest.raises(JobLostError, match="is lost at step 0: its cluster has ended"):
            wait()
    assert job.lost == "its cluster has ended"
    assert "failed (its cluster has ended)" in repr(job)
    with pytest.raises(JobLostError, match=r"scale cannot reach .* has ended\. Nothing was saved"):
        job.scale(max=2)


def test_wait_and_await_raise_if_the_job_failed(tmp_path: Path) -> None:
    job = make_job(tmp_path, FakeLink(), status("running"), status("failed", seq=2))

    with pytest.raises(JobFailedError, match="failed before its first step"):
        job.wait()

    async def wait() -> str:
        return await job

    with pytest.raises(JobFailedError, match="failed before its first step"):
        asyncio.run(wait())


def test_wait_gives_up_after_its_timeout(tmp_path: Path) -> None:
    job = make_job(tmp_path, FakeLink(), status("running"))

    assert job.wait(timeout=0.05) == "running"


def test_wait_prints_the_stages_of_the_startup_as_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about: dict[str, Any] = {"job_id": "digits-1", "worker": "w1"}
    job = make_job(tmp_path, FakeLink(), WorkerJoined(**about, time=3.0))
    assert job.status == "submitted"  # the history is folded
    news = iter([WarmUpReached(**about, time=5.5, phase="build")])

    def wait_a_slice(slice_s: float) -> bool:
        event = next(news, None)
        job._view.add([event] if event else [])
        return event is None

    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: printed.append(text))
    monkeypatch.setattr(job._feed.ended, "wait", wait_a_slice)

    job.wait()

    assert printed == ["etrain: digits-1: workers 2.0 s", "etrain: digits-1: torch 2.5 s"]


def test_wait_prints_nothing_about_the_startup_of_a_job_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path, None, status("finished"))

    job.wait()

    assert capsys.readouterr().out == ""


def test_await_returns_when_the_job_has_ended(tmp_path: Path) -> None:
    link = FakeLink()
    job = make_job(tmp_path, link, status("running"))

    async def end_and_wait() -> str:
        asyncio.get_running_loop().call_later(0.1, link.tell, status("finished", seq=3))
        return await job

    assert asyncio.run(end_and_wait()) == "finished"


def test_requests_reach_the_coordinator(tmp_path: Path) -> None:
    link = FakeLink()
    job = make_job(tmp_path, link, status("running"))

    answers = [
        job.pause(),
        job.resume(),
        job.checkpoint(),
        job.scale(max=4),
        job.preempt("w1", notice_s=5),
        job.kill(),
        job.kill("w2", how="hold_gil"),
        job.chaos(mtbf_s=5, mode="stop", duration_s=60, seed=7),
        job.chaos(off=True),
        job.stop(now=True),
    ]

    assert set(answers) == {"done"}
    assert link.requests == [
        ("pause", {}),
        ("resume", {}),
        ("checkpoint", {}),
        ("scale", {"min": None, "max": 4}),
        ("preempt", {"worker": "w1", "notice_s": 5}),
        ("kill", {"worker": None}),
        ("fault", {"worker": "w2", "kind": "hold_gil"}),
        ("chaos", {"mtbf_s": 5, "mode": "stop", "duration_s": 60, "seed": 7}),
        ("chaos", {"off": True}),
        ("stop", {"now": True}),
    ]


def test_workers_of_a_paused_job_wait(tmp_path: Path) -> None:
    records = [{"worker": "a", "state": "reported"}, {"worker": "b", "state": "warm"}]
    job = make_job(
        tmp_path, FakeLink(lambda _: WorkerList(workers=tuple(records))), status("paused")
    )

    assert [worker["state"] for worker in job.workers()] == ["waiting", "warm"]


@pytest.mark.parametrize("notice_s", [-3.0, float("nan")])
def test_notice_in_the_past_is_refused(tmp_path: Path, notice_s: float) -> None:
    link = FakeLink()
    job = make_job(tmp_path, link, status("running"))

    with pytest.raises(ConfigError, match=r"notice_s=.* must be 0 or more"):
        job.preempt(notice_s=notice_s)
    assert link.requests == []


def test_ended_job_accepts_no_requests(tmp_path: Path) -> None:
    job = make_job(tmp_path, FakeLink(), status("finished"))

    assert job.stop() == "digits-1 has already finished"
    with pytest.raises(EtrainError, match="has finished: there is nothing to scale"):
        job.scale(max=2)


def test_wait_reports_a_silent_scheduler_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = FakeLink()
    job = make_job(tmp_path, link, status("running"))
    assert job.status == "running"
    contact = job._feed._contact
    troubles = iter(["", "its scheduler cannot be reached, retrying"] * 2)

    def wait_a_slice(slice_s: float) -> bool:
        contact.trouble = next(troubles, "over")
        return contact.trouble == "over"

    monkeypatch.setattr(job._feed.ended, "wait", wait_a_slice)

    assert job.wait() == "running"
    assert capsys.readouterr().out.splitlines()[:2] == [
        "etrain: digits-1 was running; its scheduler cannot be reached, retrying. Still waiting.",
        "etrain: the scheduler of digits-1 responds again.",
    ]


def test_silent_scheduler_is_the_reason_and_the_last_status_is_kept(tmp_path: Path) -> None:
    job = make_job(tmp_path, FakeLink(), status("running"))
    assert (job.status, job.reason) == ("running", "")

    job._feed._contact.trouble = "its scheduler cannot be reached"

    assert (job.status, job.reason) == ("running", "its scheduler cannot be reached")
    assert "running (its scheduler cannot be reached)" in repr(job)


def test_error_of_an_unanswered_request_warns_that_it_may_still_happen(tmp_path: Path) -> None:
    def stay_silent(request: Request[Any]) -> Any:
        raise NoAnswerError("the scheduler did not answer")

    job = make_job(tmp_path, FakeLink(stay_silent), status("running"))

    with pytest.raises(PoolError, match=r"kill was sent to job digits-1.* may still carry out"):
        job.kill()


class Interrupts:
    """A wait in which the interrupt key is pressed at given instants of a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *at: float, end: float) -> None:
        self.now, self._at, self._end = 0.0, list(at), end
        # Only the module's own name: the feed's thread needs the real clock.
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(waiting, "time", clock)

    def __call__(self, slice_s: float) -> bool:
        self.now += slice_s
        if self._at and self.now >= self._at[0]:
            self._at.pop(0)
            signal.raise_signal(signal.SIGINT)
        return self.now >= self._end


@pytest.mark.parametrize(
    ("at", "requests"),
    [
        ((1.0,), [("stop", {"now": False})]),
        ((1.0, 5.0), [("stop", {"now": False}), ("stop", {"now": True})]),
        ((1.0, 7.0), [("stop", {"now": False}), ("stop", {"now": False})]),
    ],
)
def test_second_interrupt_within_5_s_stops_without_a_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: tuple[float, ...],
    requests: list[tuple[str, dict[str, Any]]],
) -> None:
    link = FakeLink()
    job = make_job(tmp_path, link, status("running"))
    assert job.status == "running"
    monkeypatch.setattr(job._feed.ended, "wait", Interrupts(monkeypatch, *at, end=20.0))
    handler = signal.getsignal(signal.SIGINT)

    job.wait()

    assert link.requests == requests
    assert job.was_interrupted
    said = capsys.readouterr().out
    assert ("at once, without a checkpoint" in said) == (requests[-1][1]["now"])
    assert signal.getsignal(signal.SIGINT) is handler


def test_third_interrupt_leaves_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = FakeLink()
    job = make_job(tmp_path, link, status("running"))
    assert job.status == "running"
    presses = Interrupts(monkeypatch, 1.0, 2.0, 3.0, end=20.0)
    monkeypatch.setattr(job._feed.ended, "wait", presses)

    with pytest.raises(KeyboardInterrupt):
        job.wait()

    assert [args for _, args in link.requests] == [{"now": False}, {"now": True}]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_interrupt_has_the_same_effect_on_an_awaited_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, other = FakeLink(), FakeLink()
    job = make_job(tmp_path / "a", link, status("running"))
    second = make_job(tmp_path / "b", other, status("running"))

    async def press_twice() -> list[str]:
        both = asyncio.gather(job, second)
        await asyncio.sleep(0)
        for number in (1, 2):
            signal.raise_signal(signal.SIGINT)
            await until(lambda: min(len(link.requests), len(other.requests)) == number)  # noqa: B023
        link.tell(status("stopped", seq=3))
        await until(lambda: job.status == "stopped")
        assert not both.done()
        other.tell(status("stopped", seq=3))
        return await both

    assert asyncio.run(press_twice()) == ["stopped", "stopped"]
    twice = [("stop", {"now": False}), ("stop", {"now": True})]
    assert (link.requests, other.requests) == (twice, twice)
    assert job.was_interrupted
    assert capsys.readouterr().out.count("with a checkpoint. Interrupt again within 5 s") == 2


def test_third_interrupt_cancels_an_await(tmp_path: Path) -> None:
    link = FakeLink()
    job = make_job(tmp_path, link, status("running"))

    async def press_thrice() -> None:
        waiting = asyncio.ensure_future(job)
        await asyncio.sleep(0)
        for number in (1, 2, 3):
            signal.raise_signal(signal.SIGINT)
            await until(lambda: len(link.requests) == number or waiting.done())  # noqa: B023
        await waiting

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(press_thrice())

    assert [args for _, args in link.requests] == [{"now": False}, {"now": True}]


def test_cancelling_an_await_does_not_stop_the_job(tmp_path: Path) -> None:
    link = FakeLink()
    job = make_job(tmp_path, link, status("running"))

    async def give_up() -> None:
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(job, 0.05)
        assert signal.getsignal(signal.SIGINT) is before

    asyncio.run(give_up())

    assert link.requests == []
    assert not job.was_interrupted


def test_listener_may_read_the_job_status(tmp_path: Path) -> None:
    job = make_job(tmp_path, FakeLink(), status("running"))
    seen: list[str] = []
    came = threading.Event()

    def listen(events: list[Event]) -> None:
        seen.append(job.status)
        came.set()

    job.subscribe(listen)

    assert came.wait(5)
    assert seen == ["running"]


def test_job_without_a_dashboard_shows_a_table(tmp_path: Path) -> None:
    job = make_job(tmp_path, None, status("finished"))

    bundle = job._repr_mimebundle_()

    assert bundle["text/plain"].startswith("<TrainingJob digits-1: finished")
    assert "<td>digits-1</td>" in bundle["text/html"]


def test_control_characters_of_a_log_are_escaped(tmp_path: Path) -> None:
    reason = "\x1b]0;pwn\x07\x1b[2J\u202e"
    ended = dataclasses.replace(status("failed"), reason=reason)
    job = make_job(tmp_path, None, ended)

    shown = [repr(job), *job._repr_mimebundle_().values()]

    assert r"\x1b]0;pwn\x07" in repr(job)
    assert not [text for text in shown if set(text) & {"\x1b", "\x07", "\u202e"}]


STEP = made(StepCompleted, job_id="digits-1", time=2.0, generation=1, samples=10)


@pytest.mark.parametrize("layout", ["x", "1", "64:1x99999999999", "[" * 50])
def test_layout_that_no_set_has_is_an_error_of_the_audit(tmp_path: Path, layout: str) -> None:
    job = make_job(tmp_path, None, made(JobPlanned, job_id="digits-1", train_layout=layout), STEP)

    with pytest.raises(EtrainError, match="digits-1 cannot be audited"):
        job.audit()


@pytest.mark.parametrize(
    ("plan", "step", "problem"),
    [
        ({"total_samples": 0}, {"step": 2**62}, "steps of 1 of the epochs 0 to"),
        ({"num_train_samples": 2**40}, {}, "do not fit into memory"),
    ],
)
def test_audit_of_huge_numbers_ends(
    tmp_path: Path, plan: dict[str, int], step: dict[str, int], problem: str
) -> None:
    planned = made(JobPlanned, job_id="digits-1", **plan)
    job = make_job(tmp_path, None, planned, dataclasses.replace(STEP, **step))

    assert problem in " ".join(job.audit().problems)


def test_negative_rank_of_a_log_is_ignored(tmp_path: Path) -> None:
    values = {"ranks": ["a"], "trainer_pids": [1], "behind": [-(2**63)]}
    formed = made(GenerationFormed, job_id="digits-1", **values)
    job = make_job(tmp_path, None, made(JobPlanned, job_id="digits-1"), formed, STEP)

    assert job.audit().steps_committed == 1


def test_best_weights_of_a_job_that_keeps_none_are_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, None, status("finished"))

    with pytest.raises(CheckpointError, match="keeps no best checkpoint"):
        job.state_dict("best")
    with pytest.raises(ValueError, match="'last' or 'best'"):
        job.state_dict("newest")


def save_weights(job: TrainingJob, step: int, judged: list[list[Any]]) -> None:
    """Write a checkpoint whose only weight is its step, as a trainer does."""
    store = LocalStore(job.record.folder)
    folder = store.begin(step)
    state = {"extras": {"evaluations": {"best": judged}}}
    parts = {
        "model.safetensors": store.put_part(
            folder, "model.safetensors", save({"w": torch.tensor([float(step)])})
        ),
        "state.json": store.put_part(folder, "state.json", json.dumps(state).encode()),
    }
    facts = {"job_id": job.id, "generation": 1, "config_digest": "", "created": 1.0}
    assert store.commit(Manifest(step=step, parts=parts, **facts))


def best_step(job: TrainingJob) -> float:
    return float(job.state_dict("best")["w"])


def reached(step: int, value: float) -> Event:
    return BestReached(job_id="digits-1", time=1.0, step=step, metric="accuracy", value=value)


def test_weights_of_a_running_job_are_loaded_and_exported_with_their_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = FakeLink()
    job = make_job(tmp_path, link, status("running"))
    save_weights(job, 1200, [])
    said = "etrain: digits-1 is running at step 0; these are its weights of step 1,200.\n"

    assert float(job.state_dict()["w"]) == 1200
    assert capsys.readouterr().out == said
    job.export(tmp_path / "digits.safetensors")
    assert capsys.readouterr().out == said

    link.tell(status("finished", seq=3))
    job.wait()
    job.state_dict()
    assert capsys.readouterr().out == ""


def test_best_weights_are_those_of_the_best_step_that_was_saved(tmp_path: Path) -> None:
    told = [reached(2, 0.5), reached(4, 0.9)]
    job = make_job(tmp_path, None, *told, status("finished", reason="early stopping: enough"))
    job.record.config["checkpoint"] = {"best": {"metric": "accuracy", "mode": "max"}}
    save_weights(job, 2, [[2, 0.5]])
    assert best_step(job) == 2  # the better one is not durable yet
    save_weights(job, 4, [])  # begun before the evaluation: the log alone knows that it is best
    assert best_step(job) == 4
    save_weights(job, 6, [[4, 0.9], [2, 0.5], [6, 0.4]])
    assert best_step(job) == 4
    assert float(job.state_dict()["w"]) == 6
    assert job.best == {"step": 4, "metric": "accuracy", "value": 0.9}
    result = job.result()
    assert (result["best"], result["reason"]) == (job.best, "early stopping: enough")


def test_if_the_best_checkpoint_was_lost_the_best_remaining_one_is_loaded(tmp_path: Path) -> None:
    job = make_job(tmp_path, None, reached(4, 0.9), status("finished"))
    job.record.config["checkpoint"] = {"best": {"metric": "accuracy", "mode": "max"}}
    save_weights(job, 2, [[2, 0.5]])
    save_weights(job, 6, [[4, 0.9], [6, 0.8], [2, 0.5]])
    save_weights(job, 8, [[4, 0.9], [6, 0.8], [8, 0.7], [2, 0.5]])
    assert best_step(job) == 6


@pytest.mark.parametrize(
    "judged", [[[1, "a"], [2, 0.5]], [["x", 0.5]], [[1.5, 0.5]], [[1, 10**400]], [[[1], 0.5]]]
)
def test_evaluations_of_an_invalid_checkpoint_are_refused(
    tmp_path: Path, judged: list[list[Any]]
) -> None:
    job = make_job(tmp_path, None, status("stopped"))
    job.record.config["checkpoint"] = {"best": {"metric": "loss", "mode": "min"}}
    save_weights(job, 1, judged)

    with pytest.raises(CheckpointError, match=r"state\.json is invalid"):
        job.state_dict("best")
    assert [row["step"] for row in job.checkpoints()] == [1]


def test_best_weights_of_a_job_that_was_never_evaluated_are_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, None, status("stopped"))
    job.record.config["checkpoint"] = {"best": {"metric": "loss", "mode": "min"}}
    save_weights(job, 1, [])
    with pytest.raises(CheckpointError, match="no evaluation ran before its newest"):
        job.state_dict("best")


# --- properties do not block ---


def test_property_returns_the_logged_value_while_its_bucket_does_not_respond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(followed_job, "GLANCE_S", 0.05)
    has_waited = threading.Event()

    def read_bucket(record: object) -> None:
        answers.wait(30)
        has_waited.set()

    monkeypatch.setattr(followed_job, "try_refresh_log", read_bucket)
    job = make_job(tmp_path, FakeLink(), status("running"), formed(world_size=2, step=4))

    values = (job.step, job.world_size, job.status, job.reason, repr(job))

    assert not has_waited.is_set(), "the properties waited for the bucket"
    answers.set()
    assert values[:4] == (4, 2, "running", "")


def test_method_waits_until_a_long_log_on_this_machine_has_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_job, "CATCH_UP_S", 0.02)

    def read_slowly(path: Path, *, since: int = 0) -> Events:
        time.sleep(0.3)
        return read_log(path, since=since)

    monkeypatch.setattr("etrain_jupyter.notebook.job.feed.read_log", read_slowly)
    job = make_job(tmp_path, None, status("running"), formed(world_size=2), status("finished"))

    assert [event.seq for event in job.events()] == [1, 2, 3, 4]


# --- waiting for a condition ---


def formed(*, world_size: int, step: int = 0) -> Event:
    ranks = [f"w{rank}" for rank in range(world_size)]
    return made(GenerationFormed, job_id="digits-1", ranks=ranks, step=step)


def test_wait_returns_once_its_condition_holds(tmp_path: Path) -> None:
    link = FakeLink()
    job = make_job(tmp_path, link, status("running"), formed(world_size=2))
    seen: list[int] = []

    def is_grown(job: TrainingJob) -> bool:
        seen.append(job.world_size)
        if len(seen) == 2:
            link.tell(dataclasses.replace(formed(world_size=4), seq=4))
        return job.world_size == 4

    assert job.wait(until=is_grown, timeout=30) == "running"
    assert (seen[0], seen[-1]) == (2, 4)


def test_wait_raises_if_its_condition_does_not_hold_in_time(tmp_path: Path) -> None:
    job = make_job(tmp_path, FakeLink(), status("running"))

    with pytest.raises(EtrainError, match=r"does not hold after 0 s: <TrainingJob digits-1: runn"):
        job.wait(until=lambda job: job.world_size == 4, timeout=0.1)


def test_wait_raises_if_the_job_ends_before_its_condition_holds(tmp_path: Path) -> None:
    job = make_job(tmp_path, None, status("stopped", reason="the cluster was shut down by maria"))

    with pytest.raises(EtrainError, match=r"at step 0 \(the cluster was shut down by maria\), and"):
        job.wait(until=lambda job: job.world_size == 4)


def test_wait_raises_the_failure_of_a_job_that_fails_before_its_condition_holds(
    tmp_path: Path,
) -> None:
    job = make_job(tmp_path, None, status("failed", reason="out of memory"))

    with pytest.raises(JobFailedError, match="out of memory"):
        job.wait(until=lambda job: job.world_size == 4)


def test_a_condition_that_holds_at_the_end_is_enough(tmp_path: Path) -> None:
    job = make_job(tmp_path, None, formed(world_size=4), status("finished"))

    assert job.wait(until=lambda job: job.world_size == 4) == "finished"
