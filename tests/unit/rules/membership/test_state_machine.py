"""The rules of membership, as short scripted jobs."""

from __future__ import annotations

from dataclasses import replace

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.formation import ADMISSION_GRACE_S, MAX_ADMISSION_WAIT_S
from tests.unit.rules.story import Story


def test_job_starts_with_the_workers_that_are_warm_after_the_grace_period():
    story = Story().send(s.WorkersAssigned(workers=("w1", "w2")))
    assert [x.worker for x in story.found(c.StartTrainer)] == ["w1", "w2"]
    story.send(s.TrainerWarm(trainer=story.trainer("w1")))
    assert not story.found(c.FormGeneration)  # w2 may be ready in a moment
    story.send(s.Tick(), after_s=ADMISSION_GRACE_S)
    assert story.ranks() == ["w1"]
    assert story.state.status == "running"


def test_grace_period_restarts_with_each_worker_that_becomes_warm():
    """The hellos of 1,000 workers took longer than the grace: 880 formed, and then the rest."""
    names = tuple(f"w{number}" for number in range(5))
    story = Story(max_workers=5).send(s.WorkersAssigned(workers=names))
    for name in names[:4]:
        story.warm(name).wait(0.9 * ADMISSION_GRACE_S)
    assert not story.found(c.FormGeneration, ever=True)
    story.wait(0.2 * ADMISSION_GRACE_S)
    assert story.ranks() == list(names[:4])


def test_warm_workers_wait_for_others_only_so_long():
    names = tuple(f"w{number}" for number in range(20))
    story = Story(max_workers=20).send(s.WorkersAssigned(workers=names))
    while not story.found(c.FormGeneration, ever=True):
        story.warm(names[len(story.state.in_phase("warm"))]).wait(0.5 * ADMISSION_GRACE_S)
    [form] = story.found(c.FormGeneration, ever=True)
    assert len(form.trainers) == MAX_ADMISSION_WAIT_S / (0.5 * ADMISSION_GRACE_S)


def test_reason_for_waiting_names_a_few_of_many_workers():
    names = tuple(f"w{number}" for number in range(20))
    story = Story(min_workers=20, max_workers=20).start(*names)
    for name in names:
        story.lose(name)
    assert story.state.reason == (
        "0 of min 20 workers available (w0 is warming up; w1 is warming up; w2 is warming up; "
        "w3 is warming up; w4 is warming up; w5 is warming up; w6 is warming up; "
        "w7 is warming up; others are warming up)"
    )


def test_newcomer_is_admitted_at_a_step_boundary_and_gets_the_state():
    story = Story().start("w1")
    story.send(s.WorkersAssigned(workers=("w1", "w2")))
    story.send(s.TrainerWarm(trainer=story.trainer("w2")))
    [change] = story.found(c.AnnounceChange)
    assert change.trainers == (story.trainer("w1"),)
    story.report("w1", step=7)
    assert story.ranks() == ["w1", "w2"]
    [form] = story.found(c.FormGeneration)
    assert (form.generation, form.step, form.behind, form.restore) == (2, 7, (1,), False)
    [fact] = story.found(events.GenerationFormed)
    assert fact.why == "join"


def test_survivors_of_a_loss_form_the_next_generation_newest_first():
    story = Story().start("w1", "w2", "w3")
    story.send(s.WorkerGone(worker="w1", cause="SIGKILL"))
    [abort] = story.found(c.AbortGeneration)
    assert set(abort.trainers) == {story.trainer("w2"), story.trainer("w3")}
    story.report("w2", step=4, why="failed")
    assert not story.found(c.FormGeneration)
    story.report("w3", step=5, why="failed")  # w3 had seen the end of the step
    assert story.ranks() == ["w3", "w2"]
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.behind) == (5, (1,))


def test_noticed_worker_leaves_at_a_step_boundary_and_nothing_is_aborted():
    story = Story().start("w1", "w2")
    story.send(s.WorkerNoticed(worker="w2"))
    assert story.found(c.AnnounceChange)
    story.report("w2", step=9).report("w1", step=9)
    assert not story.found(c.AbortGeneration)
    assert story.ranks() == ["w1"]
    [left] = story.found(events.WorkerLeft)
    assert (left.worker, left.reason) == ("w2", "preempted")


def test_last_holder_of_the_state_leaves_only_after_another_rank_has_it():
    story = Story().start("w1")
    story.send(s.WorkerNoticed(worker="w1"))
    assert not story.found(c.AnnounceChange)
    story.send(s.WorkersAssigned(workers=("w2",)))
    story.send(s.TrainerWarm(trainer=story.trainer("w2")))
    story.report("w1", step=3)
    assert story.ranks() == ["w1", "w2"]
    story.formed()
    assert story.found(c.AnnounceChange)  # and now it may go
    story.report("w1", step=4).report("w2", step=4)
    assert story.ranks() == ["w2"]


def test_survivors_below_min_workers_keep_their_state_and_wait():
    story = Story(min_workers=2).start("w1", "w2")
    story.send(s.WorkerGone(worker="w2", cause="gone"))
    story.report("w1", step=5, why="failed")
    assert story.state.status == "waiting"
    assert "1 of min 2" in story.state.reason
    story.send(s.WorkersAssigned(workers=("w1", "w3")))
    story.send(s.TrainerWarm(trainer=story.trainer("w3")))
    assert story.ranks() == ["w1", "w3"]
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.behind, form.restore) == (5, (1,), False)


def test_when_all_holders_are_lost_the_next_generation_restores_a_checkpoint():
    story = Story().start("w1")
    story.send(s.WorkerGone(worker="w1", cause="gone"))
    story.send(s.WorkersAssigned(workers=("w2",)))
    story.send(s.TrainerWarm(trainer=story.trainer("w2")))
    [form] = story.found(c.FormGeneration)
    assert form.restore


def test_messages_of_an_older_generation_are_dropped():
    story = Story().start("w1", "w2")
    trainer = story.trainer("w1")
    before = story.state
    old = s.TrainerReported(trainer=trainer, generation=0, progress=(1, 0), why="failed")
    story.send(old)
    assert story.state == before
    assert story.last == []


def test_stop_takes_a_last_checkpoint_from_a_rank_and_then_ends():
    story = Story().start("w1", "w2").send(s.StopRequested())
    assert story.found(c.AnnounceChange)
    story.report("w1", step=6).report("w2", step=6)
    [save] = story.found(c.SaveCheckpoint)
    assert save.trainer == story.trainer("w1")
    story.send(s.CheckpointSaved(step=6))
    assert story.state.status == "stopped"
    assert len(story.found(c.ReleaseTrainer)) == 2


def test_rank_that_dies_while_saving_the_last_checkpoint_is_replaced_by_another():
    story = Story().start("w1", "w2")
    story.report("w1", step=8, why="done").report("w2", step=8, why="done")
    [save] = story.found(c.SaveCheckpoint)
    story.send(s.TrainerLost(trainer=save.trainer, cause="SIGKILL"))
    [again] = story.found(c.SaveCheckpoint)
    assert again.trainer != save.trainer
    story.send(s.CheckpointSaved(step=8))
    assert story.state.status == "finished"


def test_user_error_fails_the_job_once_with_all_its_workers():
    story = Story().start("w1", "w2")

    def error(worker: str) -> s.UserErrorSeen:
        return s.UserErrorSeen(
            trainer=story.trainer(worker),
            generation=1,
            progress=(3, 0),
            error="ValueError: no",
            traceback="Cell In[2]",
        )

    story.send(error("w1"))
    assert story.found(c.AbortGeneration)
    story.send(error("w2"))
    [save] = story.found(c.SaveCheckpoint)
    story.send(s.CheckpointSaved(step=3))
    assert story.state.status == "failed"
    [fact] = story.found(events.UserErrorRaised)
    assert (fact.workers, fact.step) == (["w1", "w2"], 3)
    assert save.trainer


def test_rank_that_does_not_report_after_an_abort_is_killed():
    story = Story().start("w1", "w2", "w3")
    story.send(s.WorkerGone(worker="w1", cause="gone")).report("w2", step=4, why="failed")
    story.send(s.Tick())
    assert not story.found(c.KillTrainer)
    story.send(s.Tick(), after_s=story.state.hang_s + 1)
    [kill] = story.found(c.KillTrainer)
    assert kill.trainer == story.trainer("w3")
    story.send(s.TrainerLost(trainer=kill.trainer, cause=kill.why))
    assert story.ranks() == ["w2"]


def test_trainers_that_keep_dying_before_they_are_warm_fail_the_job():
    story = Story().send(s.WorkersAssigned(workers=("w1",)))
    for _ in range(3):
        story.lose("w1", "exited with code 1").wait(60)
    assert story.state.status == "failed"
    assert "3 trainers in a row" in story.state.reason


def test_failure_before_the_first_step_contains_the_last_output_of_the_trainer():
    story = Story().send(s.WorkersAssigned(workers=("w1",)))
    for _ in range(3):
        lost = s.TrainerLost(
            trainer=story.trainer("w1"), cause="exited with code 3", last_words="w1: no licence"
        )
        story.send(lost).wait(60)
    [error] = story.found(events.UserErrorRaised, ever=True)
    assert error.error == (
        "3 trainers in a row exited before they were ready to train, "
        "the last on w1: exited with code 3"
    )
    assert error.traceback == "w1: no licence"
    assert error.workers == ["w1"]


def test_step_that_repeatedly_kills_the_trainer_of_one_worker_fails_the_job():
    """The step's samples go to the same rank each time, so other workers never come into it."""
    story = Story(min_workers=2, max_workers=2).start("w1", "w2")
    for _ in range(2):
        story.send(s.TrainerLost(trainer=story.trainer("w2"), cause="SIGSEGV"))
        story.report("w1", step=0, why="failed").wait(60).warm("w2").formed()
    assert story.state.status == "running"
    story.send(s.TrainerLost(trainer=story.trainer("w2"), cause="SIGSEGV"))
    story.report("w1", step=0, why="failed")
    assert story.state.status == "failed"
    assert story.state.reason == (
        "step 1 lost a trainer in 3 generations in a row, the last on w2: SIGSEGV"
    )


def test_trainers_that_die_together_count_as_one_fault():
    story = Story().start("w1", "w2", "w3", "w4")
    for worker in ("w1", "w2", "w3"):
        story.send(s.TrainerLost(trainer=story.trainer(worker), cause="SIGKILL"))
    story.report("w4", step=0, why="failed")
    assert story.state.status == "running"


def test_job_waits_for_more_workers_and_reports_it_before_its_first_step():
    story = Story(min_workers=3).send(s.WorkersAssigned(workers=("w1", "w2")))
    story.send(s.TrainerWarm(trainer=story.trainer("w1")))
    assert story.state.status == "submitted"
    story.send(s.TrainerWarm(trainer=story.trainer("w2")))
    assert (story.state.status, story.state.reason) == ("waiting", "2 of min 3 workers available")


def test_killed_trainer_is_restarted_on_its_worker():
    story = Story().start("w1", "w2")
    story.send(s.TrainerLost(trainer=story.trainer("w2"), cause="SIGKILL"))
    [again] = story.found(c.StartTrainer)
    assert again.worker == "w2"


def test_pause_keeps_the_state_and_resume_continues_from_it():
    story = Story().start("w1").send(s.PauseRequested())
    story.report("w1", step=2)
    assert story.state.status == "paused"
    story.send(s.ResumeRequested())
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.behind) == (2, ())
    assert story.state.status == "running"


def test_generation_has_reason_resume_if_resumed_before_the_ranks_left():
    story = Story().start("w1").send(s.PauseRequested()).send(s.ResumeRequested())
    story.report("w1", step=2)
    [formed] = story.found(events.GenerationFormed)
    assert (formed.generation, formed.why) == (2, "resume")


def test_worker_scaled_down_during_its_warm_up_leaves_immediately():
    story = Story().start("w1")
    story.send(s.WorkersAssigned(workers=("w1", "w2")))
    trainer = story.trainer("w2")
    story.send(s.WorkersAssigned(workers=("w1",)))
    assert [x.trainer for x in story.found(c.ReleaseTrainer)] == [trainer]
    assert not story.found(c.AnnounceChange)


def test_undone_step_is_logged_once_with_all_survivors_that_had_begun_it():
    story = Story().start("w1", "w2", "w3")
    story.send(s.WorkerGone(worker="w1", cause="gone"))
    for worker in ("w3", "w2"):
        report = s.TrainerReported(
            trainer=story.trainer(worker),
            generation=1,
            progress=(4, 0),
            why="failed",
            undone=True,
        )
        story.send(report)
    [fact] = story.found(events.StepUndone)
    assert (fact.generation, fact.step, fact.workers) == (1, 5, ["w2", "w3"])


def test_step_that_one_survivor_has_committed_is_not_logged_as_undone():
    story = Story().start("w1", "w2", "w3")
    story.send(s.WorkerGone(worker="w1", cause="gone"))
    for worker, step in (("w3", 4), ("w2", 5)):  # w2 saw the end of step 5, w3 did not
        report = s.TrainerReported(
            trainer=story.trainer(worker),
            generation=1,
            progress=(step, 0),
            why="failed",
            undone=True,
        )
        story.send(report)
    [fact] = story.found(events.StepUndone)
    assert (fact.step, fact.workers) == (6, ["w2"])


def test_older_checkpoint_in_flight_does_not_count_as_the_last_one():
    story = Story().start("w1").send(s.StopRequested()).report("w1", step=83)
    assert story.found(c.SaveCheckpoint)
    story.send(s.CheckpointSaved(step=80))
    assert story.state.phase == "closing"
    story.send(s.CheckpointSaved(step=83))
    assert story.state.status == "stopped"


# --- more workers are required than available ---


def test_job_below_a_raised_minimum_keeps_its_state_and_waits():
    story = Story().start("w1", "w2").send(s.BoundsChanged(min_workers=3, max_workers=4))
    assert story.found(c.AnnounceChange)
    story.report("w1", step=5).report("w2", step=5)
    assert (story.state.status, story.state.reason) == ("waiting", "2 of min 3 workers available")
    assert not story.found(c.ReleaseTrainer)
    story.send(s.WorkersAssigned(workers=("w1", "w2", "w3"))).warm("w3")
    assert story.ranks() == ["w1", "w2", "w3"]
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.behind, form.restore) == (5, (2,), False)


def test_job_continues_when_a_raised_minimum_is_lowered_again():
    story = Story().start("w1").send(s.BoundsChanged(min_workers=2, max_workers=4))
    story.report("w1", step=5).send(s.BoundsChanged(min_workers=1, max_workers=4))
    assert story.ranks() == ["w1"]
    assert story.state.status == "running"
    [formed] = story.found(events.GenerationFormed)
    assert formed.why == "resume"


def test_newcomers_that_are_warm_already_count_for_a_raised_minimum():
    story = Story().start("w1").send(s.WorkersAssigned(workers=("w1", "w2", "w3"))).warm("w2")
    assert not story.found(c.AnnounceChange)  # w3 may be ready in a moment
    story.send(s.BoundsChanged(min_workers=2, max_workers=4))
    assert not story.found(c.AnnounceChange)


# --- errors of newcomers ---


def user_error(story: Story, worker: str) -> Story:
    """The notebook's code raises while a trainer warms up."""
    return story.send(
        s.UserErrorSeen(
            trainer=story.trainer(worker),
            generation=0,
            progress=s.NO_PROGRESS,
            error="FileNotFoundError: train.bin",
            traceback="Cell In[2]",
        )
    )


def test_training_job_excludes_a_newcomer_on_which_the_code_fails():
    story = Story().start("w1").send(s.WorkersAssigned(workers=("w1", "w2")))
    trainer = story.trainer("w2")
    user_error(story, "w2")
    assert story.state.status == "running"
    assert [x.trainer for x in story.found(c.ReleaseTrainer)] == [trainer]
    [lost] = story.found(events.WorkerLost)
    assert (lost.worker, lost.cause) == (
        "w2",
        "the notebook's code fails on it: FileNotFoundError: train.bin",
    )
    told = story.found(events.LogLine)[0]
    assert (told.level, told.worker) == ("warning", "w2")
    assert told.text == (
        "w2 cannot train; the job continues without it: FileNotFoundError: train.bin\nCell In[2]"
    )
    assert not story.found(c.AbortGeneration)


def test_worker_on_which_the_code_fails_is_retried_with_back_off():
    story = Story().start("w1").send(s.WorkersAssigned(workers=("w1", "w2")))
    for wait_s in (1, 2, 4, 8, 16, 32, 60, 60):
        user_error(story, "w2")
        assert not story.wait(wait_s - 0.5).found(c.StartTrainer)
        assert story.wait(1).found(c.StartTrainer)
    assert story.state.status == "running"


def test_error_of_a_newcomer_fails_a_job_that_has_never_trained():
    story = Story().send(s.WorkersAssigned(workers=("w1", "w2"))).warm("w1")
    user_error(story, "w2")
    assert story.state.status == "failed"


def test_error_of_a_newcomer_fails_a_job_whose_state_no_trainer_holds():
    story = Story().start("w1").send(s.WorkersAssigned(workers=("w1", "w2")))
    story.send(s.WorkerGone(worker="w1", cause="gone"))
    user_error(story, "w2")
    assert story.state.status == "failed"


def test_error_without_a_remaining_state_reports_the_last_good_step():
    story = Story().start("w1").send(s.StepsCommitted(step=11, step_s=0.1))
    story.send(
        s.UserErrorSeen(
            trainer=story.trainer("w1"),
            generation=1,
            progress=s.NO_PROGRESS,
            error="ArithmeticError: half of an update",
            traceback="",
        )
    )
    [error] = story.found(events.UserErrorRaised)
    assert error.step == 11
    assert not story.found(c.SaveCheckpoint, ever=True)
    assert story.state.status == "failed"


# --- how long nobody stepped ---


def test_stall_counts_from_the_last_step_not_from_the_detection_of_the_hang():
    story = Story().start("w1", "w2").send(s.StepsCommitted(step=4, step_s=0.1))
    story.wait(6.5).send(s.TrainerLost(trainer=story.trainer("w2"), cause="hung"))
    story.report("w1", step=4, why="failed")
    [formed] = story.found(events.GenerationFormed)
    assert 6.5 <= formed.stall_s < 6.6


# --- notices where too few would be left ---


def test_noticed_worker_keeps_training_until_enough_others_are_ready():
    story = Story(min_workers=2).start("w1", "w2")
    story.send(s.WorkerNoticed(worker="w2", deadline=story.now + 120))
    assert not story.found(c.AnnounceChange)
    story.send(s.WorkersAssigned(workers=("w1", "w3"))).warm("w3")
    assert story.found(c.AnnounceChange)
    story.report("w1", step=5).report("w2", step=5)
    assert story.ranks() == ["w1", "w3"]
    assert [x.worker for x in story.found(events.WorkerLeft)] == ["w2"]


def test_noticed_worker_leaves_in_time_although_too_few_are_left():
    story = Story(min_workers=2).start("w1", "w2")
    story.send(s.WorkerNoticed(worker="w2", deadline=story.now + 120))
    story.wait(91.0)
    assert story.found(c.AnnounceChange)
    story.report("w1", step=5).report("w2", step=5)
    assert story.state.status == "waiting"
    assert [x.worker for x in story.found(events.WorkerLeft)] == ["w2"]


def nan(story: Story, worker: str, rank: int, step: int, *, is_source: bool = False) -> Story:
    """A rank has undone the step after ``step``, because the ranks' mean loss is NaN."""
    return story.send(
        s.NonFiniteLossSeen(
            trainer=story.trainer(worker),
            generation=story.state.generation,
            rank=rank,
            progress=(step, 0),
            loss=float("nan"),
            is_source=is_source,
        )
    )


def test_nan_loss_fails_the_job_after_all_reports_and_saves_the_last_good_step():
    story = Story().start("w1", "w2", "w3").send(s.CheckpointSaved(step=4, trainer="x"))
    nan(story, "w1", 0, 6)
    nan(story, "w3", 2, 6, is_source=True)
    assert not story.found(c.SaveCheckpoint)  # w2 may be another source
    nan(story, "w2", 1, 6, is_source=True)
    [save] = story.found(c.SaveCheckpoint)
    assert save.trainer == story.trainer("w1")
    [told] = story.found(events.LossNotFinite)
    assert (told.step, told.ranks, told.workers, told.saved_step) == (7, [1, 2], ["w2", "w3"], 4)
    story.send(s.CheckpointSaved(step=6))
    assert story.state.status == "failed"
    assert story.state.reason == (
        "the loss of step 7 is nan on rank 1 (w2), rank 2 (w3); no rank updated its weights, "
        "which are those of step 6; the newest checkpoint is of step 6"
    )
    assert not story.found(c.AbortGeneration, ever=True)
    assert not story.found(events.StepUndone, ever=True)


def test_nan_loss_can_pause_the_job_and_resume_retries_the_step():
    story = Story().start("w1", "w2")
    story.state = replace(story.state, pauses_on_nan=True)
    nan(nan(story, "w1", 0, 6, is_source=True), "w2", 1, 6)
    assert story.state.status == "paused"
    assert story.state.reason == (
        "the loss of step 7 is nan on rank 0 (w1); no rank updated its weights, which are those of "
        "step 6; there is no checkpoint yet. %etrain resume retries the step, %etrain stop "
        "ends the job"
    )
    story.send(s.ResumeRequested())
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.behind, form.restore) == (6, (), False)
    assert (story.state.status, story.state.reason) == ("running", "")


def test_rank_that_dies_before_its_report_does_not_hide_a_nan_loss():
    story = Story().start("w1", "w2")
    nan(story, "w1", 0, 6)
    story.lose("w2")
    assert story.state.outcome == "failed"
    assert "is nan (the ranks that computed it were lost)" in story.state.ending.error.error


def test_stop_requested_before_a_nan_loss_still_stops():
    story = Story().start("w1").send(s.StopRequested())
    nan(story, "w1", 0, 6, is_source=True)
    story.send(s.CheckpointSaved(step=6))
    assert (story.state.status, story.state.reason) == ("stopped", "")


def test_nan_loss_of_an_older_generation_is_ignored():
    story = Story().start("w1", "w2")
    before = story.state
    trainer = story.trainer("w1")
    told = {"rank": 0, "progress": (3, 0), "loss": float("nan"), "is_source": True}
    story.send(s.NonFiniteLossSeen(trainer=trainer, generation=0, **told))
    assert (story.state, story.last) == (before, [])


def test_job_that_ends_early_explains_why():
    story = Story().start("w1")
    reported = s.TrainerReported(
        trainer=story.trainer("w1"),
        generation=1,
        progress=(6, 3),
        why="done",
        ending="early stopping: enough",
    )
    story.send(reported).send(s.CheckpointSaved(step=6))
    assert (story.state.status, story.state.reason) == ("finished", "early stopping: enough")


def test_early_end_lost_with_its_holders_is_decided_again():
    story = Story().start("w1")
    reported = s.TrainerReported(
        trainer=story.trainer("w1"), generation=1, progress=(6, 3), why="done", ending="enough"
    )
    story.send(reported)
    story.lose("w1")
    assert story.state.ending is None


def test_rank_that_failed_during_a_nan_step_logs_no_second_undone_step():
    story = Story().start("w1", "w2")
    nan(story, "w1", 0, 6, is_source=True)
    failed = {"generation": 1, "progress": (6, 0), "why": "failed", "undone": True}
    story.send(s.TrainerReported(trainer=story.trainer("w2"), **failed))
    assert [e.step for e in story.found(events.LossNotFinite)] == [7]
    assert not story.found(events.StepUndone, ever=True)


# --- notices whose replacements run on other machines ---


def noticed(story: Story, worker: str, seconds: float) -> Story:
    deadline = story.now + 0.01 + seconds
    return story.send(s.WorkerNoticed(worker=worker, deadline=deadline, trains_on=True))


def test_noticed_worker_trains_on_until_its_replacement_is_admitted():
    story = Story(max_workers=2).start("w1", "w2")
    noticed(story, "w2", 120.0)
    story.send(s.WorkersAssigned(workers=("w1",)))
    story.send(s.WorkersAssigned(workers=("w1", "w3")))
    assert not story.found(c.AnnounceChange, ever=True)
    story.warm("w3")
    assert story.found(c.AnnounceChange)
    story.report("w1", step=5).report("w2", step=5)
    assert story.ranks() == ["w1", "w3"]
    assert [x.worker for x in story.found(events.WorkerLeft)] == ["w2"]


def test_noticed_worker_without_a_replacement_leaves_shortly_before_its_deadline():
    story = Story().start("w1", "w2")
    noticed(story, "w2", 120.0)
    story.wait(109.0)
    assert not story.found(c.AnnounceChange, ever=True)
    story.wait(1.5)
    assert story.found(c.AnnounceChange)
    story.report("w1", step=5).report("w2", step=5)
    assert story.ranks() == ["w1"]


def test_noticed_worker_stays_next_to_a_newcomer_if_the_job_has_room():
    story = Story(max_workers=3).start("w1", "w2")
    noticed(story, "w2", 120.0)
    story.send(s.WorkersAssigned(workers=("w1", "w3"))).warm("w3")
    story.report("w1", step=5).report("w2", step=5)
    assert story.ranks() == ["w1", "w2", "w3"]
    assert not story.found(events.WorkerLeft)


def test_of_two_noticed_workers_the_one_with_the_earlier_deadline_is_replaced_first():
    story = Story(max_workers=3).start("w1", "w2", "w3")
    noticed(noticed(story, "w2", 120.0), "w3", 60.0)
    story.send(s.WorkersAssigned(workers=("w1", "w4"))).warm("w4")
    for worker in ("w1", "w2", "w3"):
        story.report(worker, step=5)
    assert story.ranks() == ["w1", "w2", "w4"]


def test_long_steps_let_a_noticed_worker_leave_earlier():
    story = Story().start("w1", "w2")
    story.send(s.StepsCommitted(step=1, step_s=40.0))
    noticed(story, "w2", 120.0)
    story.wait(39.0)
    assert not story.found(c.AnnounceChange, ever=True)
    story.wait(1.5)
    assert story.found(c.AnnounceChange)


def test_noticed_worker_leaves_at_once_if_its_deadline_is_unknown():
    story = Story().start("w1", "w2")
    story.send(s.WorkerNoticed(worker="w2", trains_on=True))
    assert story.found(c.AnnounceChange)
