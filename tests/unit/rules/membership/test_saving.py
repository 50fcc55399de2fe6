"""The checkpoints that are waited for: before the last holder of the state leaves, and the last."""

from __future__ import annotations

import pytest

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from tests.unit.rules.story import Story


def notice(story: Story, *workers: str, seconds: float = 120.0) -> Story:
    deadline = story.now + seconds
    for worker in workers:
        story.send(s.WorkerNoticed(worker=worker, deadline=deadline), after_s=0.0)
    return story


def saved(story: Story, worker: str, step: int, error: str = "") -> Story:
    """A worker's trainer has written a checkpoint, or could not."""
    trainer = story.trainer(worker)
    told = s.CheckpointSaved(step=step, ok=not error, trainer=trainer, error=error)
    return story.send(told)


def savers(story: Story, *, ever: bool = False) -> list[str]:
    """Return who is asked to save, by worker."""
    return [x.trainer.split("/")[1] for x in story.found(c.SaveCheckpoint, ever=ever)]


def left(story: Story) -> list[tuple[str, str]]:
    return [(x.worker, x.reason) for x in story.found(events.WorkerLeft)]


# --- the last holder is given notice ---


def test_last_holder_is_asked_for_a_checkpoint_immediately_and_keeps_training():
    story = notice(Story().start("w1"), "w1")
    [ask] = story.found(c.RequestBackgroundCheckpoint)
    assert ask.trainers == (story.trainer("w1"),)
    assert not story.found(c.AnnounceChange)
    story.wait(10)
    assert not story.last


def test_last_holder_is_saved_shortly_before_its_machine_is_taken_and_leaves():
    story = notice(Story().start("w1"), "w1").wait(89)
    assert not story.found(c.AnnounceChange)
    story.wait(2)
    assert story.found(c.AnnounceChange)
    story.report("w1", step=7)
    assert savers(story) == ["w1"]
    assert story.state.status == "waiting"
    assert story.state.reason == "saving step 7 before w1 is interrupted"
    assert not story.found(c.FormGeneration)
    saved(story, "w1", 7)
    assert left(story) == [("w1", "preempted")]
    assert story.state.status == "waiting"
    assert story.state.reason == (
        "0 of min 1 workers available (the state is in the checkpoint of step 7)"
    )
    story.send(s.WorkersAssigned(workers=("w2",))).warm("w2")
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.restore) == (7, True)


def test_half_of_a_short_notice_is_kept_for_the_checkpoint():
    story = notice(Story().start("w1"), "w1", seconds=10).wait(4.9)
    assert not story.found(c.AnnounceChange)
    assert story.wait(0.2).found(c.AnnounceChange)


def test_time_reserved_for_saving_follows_recent_checkpoint_durations():
    story = Story().start("w1")
    for step, duration_s in ((1, 50.0), (2, 10.0)):
        told = s.CheckpointSaved(step=step, duration_s=duration_s)
        story.send(told)
    notice(story, "w1", seconds=120).wait(58)
    assert not story.found(c.AnnounceChange)
    assert story.wait(3).found(c.AnnounceChange)  # 1.5 x 0.8 x 50 s before the end


def test_notice_shorter_than_a_checkpoint_is_used_immediately():
    story = Story().start("w1").send(s.CheckpointSaved(step=1, duration_s=300.0))
    notice(story, "w1", seconds=120)
    assert story.found(c.AnnounceChange, ever=True)


def test_newcomer_that_is_warm_in_time_takes_over_without_a_checkpoint():
    story = notice(Story().start("w1"), "w1").send(s.WorkersAssigned(workers=("w2",)))
    story.wait(91).warm("w2").report("w1", step=7)
    assert story.ranks() == ["w1", "w2"]
    story.formed().report("w1", step=8).report("w2", step=8)
    assert story.ranks() == ["w2"]
    assert left(story) == [("w1", "preempted")]
    assert not savers(story, ever=True)


def test_newcomer_that_is_warm_while_the_state_is_saved_takes_over_afterwards():
    story = notice(Story().start("w1"), "w1").wait(91).report("w1", step=7)
    story.send(s.WorkersAssigned(workers=("w2",))).warm("w2")
    assert not story.found(c.FormGeneration)
    saved(story, "w1", 7)
    assert story.ranks() == ["w1", "w2"]


def test_ranks_that_are_all_given_notice_are_saved_once_and_leave_together():
    story = notice(Story().start("w1", "w2"), "w1", "w2").wait(91)
    story.report("w1", step=7).report("w2", step=7)
    assert savers(story) == ["w1"]
    saved(story, "w1", 7)
    assert left(story) == [("w1", "preempted"), ("w2", "preempted")]


def test_rank_with_the_later_deadline_continues_without_the_earlier_one():
    story = notice(Story().start("w1", "w2"), "w1", "w2", seconds=120)
    story = notice(story, "w2", seconds=600).wait(91)
    story.report("w1", step=7).report("w2", step=7)
    assert left(story) == [("w1", "preempted")]
    assert story.ranks() == ["w2"]
    assert not savers(story, ever=True)


@pytest.mark.parametrize("is_paused", [True, False])
def test_holder_that_receives_a_notice_while_no_rank_steps_saves_at_once(is_paused):
    story = Story(min_workers=1 if is_paused else 2).start("w1", "w2")
    if is_paused:
        story.send(s.PauseRequested()).report("w2", step=4).report("w1", step=4)
    story.send(s.WorkerGone(worker="w2", cause="gone"))
    if not is_paused:
        story.report("w1", step=4, why="failed")
    notice(story, "w1")
    assert savers(story) == ["w1"]
    saved(story, "w1", 4)
    assert not left(story)  # until its time has come it can still hand the state over
    story.wait(91)
    assert left(story) == [("w1", "preempted")]
    assert story.state.status == ("paused" if is_paused else "waiting")


def test_holder_whose_state_is_durable_leaves_without_another_checkpoint():
    story = Story().start("w1").send(s.PauseRequested()).report("w1", step=4)
    saved(story, "w1", 4)
    notice(story, "w1").wait(91)
    assert left(story) == [("w1", "preempted")]
    assert not savers(story, ever=True)


def test_kill_before_the_checkpoint_restores_the_previous_one():
    story = notice(Story().start("w1").send(s.CheckpointSaved(step=3)), "w1").wait(91)
    story.report("w1", step=7).send(s.WorkerGone(worker="w1", cause="preempted"))
    story.send(s.WorkersAssigned(workers=("w2",))).warm("w2")
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.restore) == (3, True)


def test_failed_checkpoint_before_an_interruption_is_retried():
    story = notice(Story().start("w1"), "w1").wait(91).report("w1", step=7)
    saved(story, "w1", 7, error="no space")
    assert not savers(story)
    assert story.state.reason == (
        "saving step 7 before w1 is interrupted; the last attempt failed (no space)"
    )
    assert savers(story.wait(5)) == ["w1"]
    saved(story, "w1", 7)
    assert left(story) == [("w1", "preempted")]


def test_stop_while_the_last_holder_is_saved_ends_the_job_with_that_checkpoint():
    story = notice(Story().start("w1"), "w1").wait(91).report("w1", step=7)
    story.send(s.StopRequested())
    assert story.state.phase == "closing"
    saved(story, "w1", 7)
    assert story.state.status == "stopped"
    assert savers(story, ever=True) == ["w1"]


def test_checkpoint_of_a_lost_state_does_not_count_for_the_repeated_step():
    """w1 had seen the end of step 5 and saved it; w2 had not, and makes another one."""
    story = Story(max_workers=2).start("w1", "w2")
    saved(story, "w1", 5)
    story.send(s.WorkerGone(worker="w1", cause="gone")).report("w2", step=4, why="failed").formed()
    notice(story, "w2").wait(91).report("w2", step=5)
    assert savers(story) == ["w2"]


def test_restored_step_is_that_of_the_checkpoint_reported_by_the_ranks():
    story = Story().start("w1").send(s.CheckpointSaved(step=3)).send(s.CheckpointSaved(step=6))
    story.send(s.WorkerGone(worker="w1", cause="gone"))
    story.send(s.WorkersAssigned(workers=("w2",))).warm("w2")
    formed = s.TrainerFormed(trainer=story.trainer("w2"), generation=2, step=3)
    story.send(formed)
    assert (story.state.step, story.state.saved_step) == (3, 3)


# --- the last checkpoint ---


def finished(*workers: str) -> Story:
    story = Story().start(*workers)
    for worker in workers:
        story.report(worker, step=8, why="done")
    return story


def test_failed_last_checkpoint_is_written_by_another_holder():
    story = finished("w1", "w2")
    assert savers(story) == ["w1"]
    saved(story, "w1", 8, error="no space")
    assert savers(story) == ["w2"]
    saved(story, "w2", 8)
    assert story.state.status == "finished"


def test_job_whose_last_checkpoint_cannot_be_written_fails_and_names_the_newest_durable_one():
    story = Story().start("w1").send(s.CheckpointSaved(step=6)).report("w1", step=8, why="done")
    for wait_s in (5, 10, 20):
        saved(story, "w1", 8, error="no space")
        assert not savers(story.wait(wait_s - 0.5))
        assert savers(story.wait(1)) == ["w1"]
    saved(story, "w1", 8, error="no space")
    assert story.state.status == "failed"
    assert story.state.reason == (
        "trained to step 8, but the last checkpoint could not be written (no space); "
        "the newest checkpoint is of step 6"
    )
    assert not story.found(events.UserErrorRaised)


def test_stopped_job_stays_stopped_and_reports_its_missing_last_checkpoint():
    story = Story().start("w1").send(s.StopRequested()).report("w1", step=8)
    for wait_s in (5, 10, 20, 0):
        saved(story, "w1", 8, error="no space")
        if wait_s:
            story.wait(wait_s)
    assert story.state.status == "stopped"
    assert story.state.reason == (
        "trained to step 8, but the last checkpoint could not be written (no space); "
        "there is no earlier checkpoint"
    )


def test_stopped_job_that_loses_its_last_holder_names_the_newest_durable_checkpoint():
    story = Story().start("w1").send(s.CheckpointSaved(step=6)).send(s.StopRequested())
    story.report("w1", step=8).lose("w1")
    assert story.state.status == "stopped"
    assert story.state.reason == (
        "trained to step 8, but the last checkpoint could not be written "
        "(all workers that held its state were lost); the newest checkpoint is of step 6"
    )


def test_failure_of_an_older_checkpoint_does_not_count_for_the_last_one():
    story = finished("w1")
    saved(story, "w1", 6, error="no space")
    assert not savers(story)
    saved(story, "w1", 8)
    assert story.state.status == "finished"


def test_saver_without_progress_is_killed_and_the_next_holder_saves():
    story = finished("w1", "w2")
    patience_s = 10 * story.state.hang_s
    for number in range(1, int(patience_s) + 50):
        story.see("w1", 3, beats=min(number, 40)).wait(1)
        if story.found(c.KillTrainer):
            break
    [kill] = story.found(c.KillTrainer)
    assert (kill.trainer, kill.stacks) == (story.trainer("w1"), True)
    assert kill.why == "no progress for 301 s while saving step 8"
    assert number > 330  # it had moved for 40 s
    story.lose("w1", kill.why)
    assert savers(story) == ["w2"]


def test_failed_holder_retries_when_the_other_one_is_lost():
    story = finished("w1", "w2")
    saved(story, "w1", 8, error="no space")
    story.lose("w2")
    assert savers(story.wait(5)) == ["w1"]


def test_loss_of_another_holder_does_not_restart_the_saver():
    story = finished("w1", "w2")
    story.lose("w2")
    assert not savers(story)


def test_job_continues_from_the_checkpoint_of_the_released_not_from_an_older_holder():
    story = Story().start("w1", "w2").send(s.PauseRequested())
    story.report("w1", step=5).report("w2", step=4, why="failed")
    story.send(s.WorkerNoticed(worker="w1", deadline=story.now + 10.0))
    story.send(s.CheckpointSaved(step=5)).wait(9.0)
    assert [x.worker for x in story.found(events.WorkerLeft)] == ["w1"]
    story.send(s.ResumeRequested())
    [form] = story.found(c.FormGeneration)
    assert (form.restore, form.step) == (True, 5)
    assert not story.found(events.StepUndone, ever=True)
