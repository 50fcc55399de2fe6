"""Generations that break although no worker was lost: NCCL, then gloo, then the job fails."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.faults import HEALTHY_S, MAX_FAILED_FORMS, MAX_NCCL_FAILURES
from tests.unit.rules.story import Story

SHM = (
    "NCCL error in: NCCLUtils.cpp:77, unhandled system error, NCCL version 2.27.3\n"
    "ncclSystemError: System call (e.g. socket, malloc) failed.\nLast error:\n"
    "Error: failed to extend /dev/shm/nccl-5vNk2y to 33030532 bytes, No space left on device (28)"
)


def with_gpus(*workers: str, backend: str = "auto", **values) -> Story:
    """A job whose workers have a GPU each, in its first generation."""
    story = Story(**values)
    story.state = replace(story.state, backend=backend)
    story.send(s.WorkersAssigned(workers=workers))
    return warm(story, *workers)


def warm(story: Story, *workers: str) -> Story:
    for worker in workers:
        trainer = story.trainer(worker)
        story.send(s.TrainerWarm(trainer=trainer, device="cuda:0", gpu=f"GPU-{worker}"))
    return story


def break_off(story: Story, *, step: int = -1, error: str = "", backend: str = "", **values):
    """The first rank reports why its generation broke, the others only that it did."""
    told = {"error": error, "backend": backend}
    for member in story.state.in_phase("ranked"):
        story.send(
            s.TrainerReported(
                trainer=member.trainer,
                generation=story.state.generation,
                progress=(step, 0) if step >= 0 else s.NO_PROGRESS,
                why="failed",
                **told,
                **values,
            )
        )
        told = {}
    return story


def retry(story: Story) -> Story:
    """Wait until the next generation forms, or the job ends."""
    while story.state.phase == "gathering":
        story.wait(4.0)
    return story


def backends(story: Story) -> list[str]:
    return [form.backend for form in story.found(c.FormGeneration, ever=True)]


# Review G2: NCCL that could not connect was tried for ever, and its message was thrown away.


def test_after_two_nccl_failures_gloo_is_used_and_the_status_quotes_nccl():
    story = with_gpus("w1", "w2")
    for _ in range(MAX_NCCL_FAILURES):
        break_off(story, error=SHM, backend="nccl")
        assert story.found(events.LogLine)[0].text.endswith(f"(w1: {SHM})")
        retry(story)
    assert backends(story) == ["nccl", "nccl", "gloo"]
    assert [e.backend for e in story.found(events.GenerationFormed, ever=True)] == backends(story)
    assert story.state.status == "running"
    for words in (
        "NCCL failed 2 times in a row",
        "failed to extend /dev/shm/nccl-5vNk2y",
        "gradients now use gloo and host memory, which is slower",
        "NCCL_SHM_DISABLE=1",
    ):
        assert words in story.state.reason
    assert story.state.reason in [e.text for e in story.found(events.LogLine, ever=True)]
    story.formed()
    assert story.state.status == "running"


def test_waiting_job_explains_why_its_generation_did_not_form():
    story = break_off(break_off(with_gpus("w1", "w2"), error=SHM, backend="nccl"))
    assert story.state.status == "waiting"
    assert "although no worker was lost" in story.state.reason
    assert f"attempt 3 of {MAX_FAILED_FORMS} follows" in story.state.reason


def test_nccl_failure_during_training_counts_like_a_failed_connection():
    story = with_gpus("w1", "w2").formed()
    for step in (4, 5):
        story.send(s.StepsCommitted(step=step, step_s=0.1))
        break_off(story, step=step, error="ncclRemoteError: a peer vanished", backend="nccl")
        retry(story).formed()
    assert backends(story) == ["nccl", "nccl", "gloo"]


def test_nccl_hang_without_an_error_counts_as_a_failure():
    story = with_gpus("w1", "w2")
    for _ in range(2):
        retry(break_off(story))
    assert backends(story) == ["nccl", "nccl", "gloo"]


def test_failures_far_apart_do_not_disable_nccl():
    story = with_gpus("w1", "w2").formed()
    for step in range(1, 5):
        story.wait(HEALTHY_S + 1).send(s.StepsCommitted(step=step, step_s=0.1))
        retry(break_off(story, step=step, error="ncclRemoteError", backend="nccl")).formed()
    assert backends(story) == ["nccl"] * 5


def test_gloo_failures_do_not_count_against_nccl():
    story = with_gpus("w1", "w2")
    for _ in range(3):
        retry(break_off(story, error="Connection refused", backend="gloo"))
    assert backends(story) == ["nccl"] * 4


def test_broken_generation_with_a_lost_worker_does_not_count_as_a_failure():
    story = with_gpus("w1", "w2", "w3")
    for number in range(MAX_FAILED_FORMS + 1):
        names = [m.worker for m in story.state.in_phase("ranked")]
        story.send(s.WorkerGone(worker=names[-1], cause="gone"))
        break_off(story, error="ncclRemoteError", backend="nccl")
        assert story.state.faults.failed_forms.num == 0
        fresh = f"x{number}"
        left = tuple(m.worker for m in story.state.members.values())
        warm(story.send(s.WorkersAssigned(workers=(*left, fresh))), fresh)
        for member in story.state.in_phase("ranked"):
            if member.worker != fresh and story.state.phase == "changing":
                story.report(member.worker, step=-1)
        retry(story) if story.state.phase == "gathering" else None
    assert story.state.status == "running"
    assert set(backends(story)) == {"nccl"}


def test_nccl_is_retried_once_after_a_worker_of_the_failed_group_left():
    story = with_gpus("w1", "w2", "w3")
    for _ in range(2):
        retry(break_off(story, error=SHM, backend="nccl"))
    story.formed().send(s.WorkerGone(worker="w3", cause="gone"))
    break_off(story, step=0, error="Connection closed by peer", backend="gloo")
    assert backends(story) == ["nccl", "nccl", "gloo", "nccl"]
    assert story.state.reason == ""
    retry(break_off(story, step=0, error=SHM, backend="nccl"))
    assert backends(story)[-1] == "gloo"


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("auto", ["nccl"] * 2 + ["gloo"] * 6), ("nccl", ["nccl"] * 8), ("gloo", ["gloo"] * 8)],
)
def test_job_whose_ranks_never_connect_fails_with_the_reason(backend, expected):
    story = with_gpus("w1", "w2", backend=backend)
    for _ in range(MAX_FAILED_FORMS):
        error = (
            "ncclInternalError" if story.state.current.backend == "nccl" else "Connection refused"
        )
        retry(break_off(story, error=error, backend=story.state.current.backend))
    assert backends(story) == expected
    assert story.state.status == "failed"
    words = f"{MAX_FAILED_FORMS} generations in a row did not form or broke"
    assert words in story.state.reason
    assert f"the last failed with w1: {error}" in story.state.reason
    assert ("write backend: auto" in story.state.reason) == (backend == "nccl")
    assert ("every TCP port" in story.state.reason) == (backend != "nccl")


def test_job_blocked_by_an_unknown_process_fails_with_a_remedy():
    # Review S3: retries are bounded, and the last word is about the stranger.
    story = with_gpus("a", "b", backend="gloo")
    text = "an unknown process connects to this job's ports (rank 0, port 4: uid 65534)"
    while not story.state.outcome:
        retry(break_off(story, error=text, backend="gloo"))
    error = story.state.ending.error.error
    assert text in error
    assert "Stop that process" in error
    assert "firewall" not in error


def test_job_that_gives_up_saves_the_state_that_its_ranks_hold():
    story = with_gpus("w1", "w2").formed().send(s.StepsCommitted(step=7, step_s=0.1))
    for _ in range(MAX_FAILED_FORMS):
        break_off(story, step=7, error="Connection refused", backend="gloo")
        retry(story) if story.state.phase == "gathering" else None
    [save] = story.found(c.SaveCheckpoint, ever=True)
    story.send(s.CheckpointSaved(step=7, trainer=save.trainer))
    assert story.state.status == "failed"


def test_generation_that_breaks_right_after_it_has_formed_is_not_retried_for_ever():
    story = Story().start("w1", "w2")
    for _ in range(MAX_FAILED_FORMS):
        retry(break_off(story, step=0, error="Connection reset", backend="gloo")).formed()
    assert story.state.status == "failed"


def test_generations_that_commit_steps_are_retried_for_ever():
    story = Story().start("w1", "w2")
    for step in range(1, 3 * MAX_FAILED_FORMS):
        story.send(s.StepsCommitted(step=step, step_s=0.1))
        retry(break_off(story, step=step, error="Connection reset", backend="gloo")).formed()
    assert story.state.status == "running"


def test_out_of_memory_does_not_count_as_a_failure():
    story = with_gpus("w1", "w2").formed()
    for _ in range(MAX_FAILED_FORMS + 2):
        break_off(story, step=0, error="out of memory", is_excused=True).formed()
    assert story.state.status == "running"
    assert set(backends(story)) == {"nccl"}


def test_backend_gloo_never_uses_nccl():
    assert backends(with_gpus("w1", "w2", backend="gloo")) == ["gloo"]


def test_backend_nccl_without_a_gpu_fails_and_names_the_worker():
    story = Story()
    story.state = replace(story.state, backend="nccl")
    story.send(s.WorkersAssigned(workers=("w1",)))
    story.send(s.TrainerWarm(trainer=story.trainer("w1"), device="cpu"))
    assert story.state.status == "failed"
    assert "backend: nccl needs a separate GPU for every worker, but w1 trains on cpu" in (
        story.state.reason
    )


def test_backend_nccl_excludes_a_newcomer_without_a_gpu():
    story = with_gpus("w1", "w2", backend="nccl").formed()
    story.send(s.WorkersAssigned(workers=("w1", "w2", "w3")))
    story.send(s.TrainerWarm(trainer=story.trainer("w3"), device="cpu"))
    assert story.state.of_worker("w3") is None
    assert story.state.status == "running"


@pytest.mark.parametrize("backend", ["auto", "nccl", "gloo"])
def test_random_failures_keep_the_allowed_backend_and_bound_the_attempts(backend):
    for seed in range(25):
        dice = random.Random(seed)
        story = with_gpus("w1", "w2", backend=backend)
        step = num_nccl = num_idle = 0
        while not story.state.is_ended and len(backends(story)) < 60:
            used = backends(story)[-1]
            assert backend in ("auto", used)
            assert (used == "gloo") == (backend == "gloo" or (backend == "auto" and num_nccl >= 2))
            has_stepped = dice.random() < 0.2
            story.formed() if dice.random() < 0.7 or has_stepped else None
            if has_stepped:
                step += 1
                story.send(s.StepsCommitted(step=step, step_s=0.1))
            cause = dice.choice(["", "nccl", "gloo"])
            is_of_nccl = used == "nccl" and cause != "gloo"
            num_nccl += is_of_nccl
            num_idle = 1 if has_stepped else num_idle + 1
            break_off(story, step=step, error=f"broken {cause}" if cause else "", backend=cause)
            if story.state.outcome:
                break
            assert num_idle < MAX_FAILED_FORMS
            retry(story)
        assert num_idle == MAX_FAILED_FORMS or len(backends(story)) == 60
