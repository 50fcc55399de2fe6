"""Who is blamed when nobody moves any more, and what is done about it."""

from __future__ import annotations

import pytest

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.faults import MAX_FAILED_FORMS
from etrain_jupyter.rules.membership.formation import ADMISSION_GRACE_S
from etrain_jupyter.rules.membership.stalls import KILL_PATIENCE_S
from tests.unit.rules.story import Story

ALIVE = {"phase": "computing", "alive_age_s": 0.2}
STOPPED = {"phase": "computing", "alive_age_s": 31.0, "process": "stopped"}


def stand_still(story: Story, seconds: float, **counts: int) -> Story:
    """All ranks are seen to move, then to stay where they are for so long; then comes a tick."""
    for worker, count in counts.items():
        story.see(worker, count, **ALIVE)
    story.now += seconds
    for worker, count in counts.items():
        story.see(worker, count, **ALIVE)
    return story.send(s.Tick())


def kills(story: Story) -> list[tuple[str, str]]:
    names = {m.trainer: m.worker for m in story.state.members.values()}
    return [(names[kill.trainer], kill.why) for kill in story.found(c.KillTrainer)]


def test_rank_that_has_started_the_fewest_collectives_is_killed_and_no_other():
    story = Story().start("w1", "w2", "w3", "w4").send(s.StepsCommitted(step=40, step_s=0.1))
    stand_still(story, 31, w1=90, w2=90, w3=89, w4=90)
    assert kills(story) == [("w3", "no progress for 31 s at step 41 while 3 ranks waited")]
    [kill] = story.found(c.KillTrainer)
    assert kill.stacks
    story.lose("w3", kill.why)
    assert story.found(c.AbortGeneration)
    for worker in ("w1", "w2", "w4"):
        story.report(worker, step=40, why="failed")
    assert story.ranks() == ["w1", "w2", "w4"]
    [lost] = story.found(events.WorkerLost, ever=True)
    assert (lost.worker, lost.cause) == ("w3", kill.why)


def test_no_rank_is_suspected_before_the_limit_or_while_any_rank_makes_progress():
    story = stand_still(Story().start("w1", "w2"), 29, w1=5, w2=4)
    assert not story.found(c.KillTrainer)
    story = Story().start("w1", "w2")
    story.see("w1", 5, **ALIVE).see("w2", 4, beats=7, **ALIVE)
    story.now += 31
    story.see("w1", 5, **ALIVE).see("w2", 4, beats=8, **ALIVE).send(s.Tick())  # a long evaluation
    assert not story.found(c.KillTrainer)


def test_stopped_rank_is_blamed_although_it_has_started_as_many_collectives():
    story = Story().start("w1", "w2", "w3")
    for worker in ("w1", "w2", "w3"):
        story.see(worker, 12, **ALIVE)
    story.now += 31
    story.see("w1", 12, **ALIVE).see("w2", 12, **STOPPED).see("w3", 12, **ALIVE).send(s.Tick())
    [(worker, why)] = kills(story)
    assert worker == "w2"
    assert why == "stopped (SIGSTOP), no progress for 31 s at step 1 while 2 ranks waited"


def test_delayed_pulse_of_a_busy_machine_is_not_suspected():
    story = Story().start("w1", "w2", "w3")
    for worker, count in (("w1", 12), ("w2", 12), ("w3", 11)):
        story.see(worker, count, **ALIVE)
    story.now += 31
    story.see("w1", 12, **ALIVE).see("w2", 12, alive_age_s=9.0).see("w3", 11, **ALIVE)
    story.send(s.Tick())
    assert [worker for worker, _ in kills(story)] == ["w3"]


@pytest.mark.parametrize(
    ("process", "words"),
    [("running", "held the GIL"), ("sleeping", "held the GIL"), ("disk-sleep", "(disk-sleep)")],
)
def test_frozen_rank_that_was_not_stopped_is_killed_with_the_likely_cause(process, words):
    story = Story().start("w1", "w2")
    story.see("w1", 3, **ALIVE).see("w2", 3, **ALIVE)
    story.now += 31
    story.see("w1", 3, **ALIVE).see("w2", 3, alive_age_s=31.5, process=process).send(s.Tick())
    [(worker, why)] = kills(story)
    assert worker == "w2"
    assert words in why


def test_two_ranks_at_the_same_place_are_killed_only_if_they_do_not_report():
    story = Story().start("w1", "w2", "w3")
    stand_still(story, 31, w1=4, w2=5, w3=4)
    assert not story.found(c.KillTrainer)
    assert story.found(c.AbortGeneration)
    story.report("w2", step=0, why="failed").report("w3", step=0, why="failed")
    stand_still(story, 31, w1=4)
    assert [worker for worker, _ in kills(story)] == ["w1"]


def test_rank_that_never_began_the_generation_is_killed():
    story = Story()
    story.send(s.WorkersAssigned(workers=("w1", "w2"))).warm("w1", "w2")
    assert story.ranks() == ["w1", "w2"]
    story.see("w1", 0, phase="forming").see("w2", 0, generation=0)
    story.now += 31
    story.see("w1", 0, phase="forming").see("w2", 0, generation=0).send(s.Tick())
    assert [worker for worker, _ in kills(story)] == ["w2"]


def test_rank_that_hangs_while_the_generation_forms_is_killed_and_the_others_form_the_next_one():
    story = Story()
    story.send(s.WorkersAssigned(workers=("w1", "w2", "w3"))).warm("w1", "w2", "w3")
    for _ in range(2):
        story.see("w1", 1, phase="forming").see("w2", 1, phase="forming")
        story.see("w3", 0, phase="forming")
        story.now += 31
    for worker, count in (("w1", 1), ("w2", 1), ("w3", 0)):
        story.see(worker, count, phase="forming")
    story.send(s.Tick())
    assert kills(story) == [("w3", "no progress for 62 s at step 1 (forming) while 2 ranks waited")]
    story.lose("w3").report("w1", step=-1, why="failed").report("w2", step=-1, why="failed")
    assert story.ranks() == ["w1", "w2"]


def test_rank_that_does_not_leave_when_all_others_have_is_killed():
    story = Story().start("w1", "w2").send(s.PauseRequested())
    story.report("w1", step=5)
    stand_still(story, 31, w2=40)
    [(worker, why)] = kills(story)
    assert worker == "w2"
    assert "while 1 rank waited" in why


def test_stalled_generation_without_a_straggler_is_aborted_and_formed_again():
    story = Story().start("w1", "w2").send(s.StepsCommitted(step=7, step_s=0.1))
    stand_still(story, 31, w1=20, w2=20)
    assert not story.found(c.KillTrainer)
    [abort] = story.found(c.AbortGeneration)
    assert abort.trainers == (story.trainer("w1"), story.trainer("w2"))
    [line] = story.found(events.LogLine)
    assert line.text == (
        "2 ranks made no progress for 31 s, without a clear straggler, at step 8; "
        "aborting generation 1"
    )
    story.report("w1", step=7, why="failed").report("w2", step=7, why="failed")
    assert story.ranks() == ["w1", "w2"]
    [formed] = story.found(events.GenerationFormed)
    assert formed.why == "stalled"


def test_step_that_stalls_three_generations_fails_the_job():
    story = Story().start("w1", "w2")
    for _ in range(3):
        stand_still(story, 31, w1=2, w2=2)
        story.report("w1", step=0, why="failed").report("w2", step=0, why="failed").formed()
    assert story.state.status == "failed"
    assert story.state.reason == (
        "step 1 did not complete in 3 generations in a row, "
        "2 ranks made no progress for 31 s, without a clear straggler"
    )


def test_generation_that_cannot_form_is_retried_with_back_off():
    story = Story()
    story.send(s.WorkersAssigned(workers=("w1", "w2"))).warm("w1", "w2")
    waits = []
    for _ in range(MAX_FAILED_FORMS - 1):
        generation = story.state.generation
        story.report("w1", step=-1, why="failed").report("w2", step=-1, why="failed")
        waited = 0
        while story.state.generation == generation:
            assert story.state.status == "waiting"
            assert "did not form although no worker was lost" in story.state.reason
            story.wait(1.0)
            waited += 1
        waits.append(waited)
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert 30 < waits[-1] <= 33
    story.formed().send(s.StepsCommitted(step=1, step_s=0.1))
    story.report("w1", step=1, why="failed").report("w2", step=1, why="failed")
    assert (story.state.status, story.state.faults.failed_forms.num) == ("running", 1)


def test_frozen_single_trainer_is_killed():
    story = Story().start("w1")
    story.see("w1", 0, **ALIVE)
    story.now += 31
    story.see("w1", 0, **STOPPED).send(s.Tick())
    assert kills(story) == [("w1", "stopped (SIGSTOP), no progress for 31 s at step 1")]


def test_stalled_single_trainer_causes_one_warning_and_is_not_killed():
    story = Story().start("w1")
    stand_still(story, 31, w1=0)
    assert [dump.trainer for dump in story.found(c.DumpStacks)] == [story.trainer("w1")]
    [line] = story.found(events.LogLine)
    assert line.text == "w1: no progress for 31 s at step 1; its stacks follow"
    story.see("w1", 0, **ALIVE).send(s.Tick())
    assert not story.found(c.DumpStacks)
    stand_still(story.see("w1", 0, beats=1), 31, w1=0)
    assert story.found(c.DumpStacks)  # it had moved in between
    assert not story.found(c.KillTrainer, ever=True)


def test_slow_steps_extend_the_limit():
    story = Story().start("w1", "w2").send(s.StepsCommitted(step=1, step_s=20.0))
    stand_still(story, 199, w1=3, w2=2)
    assert not story.found(c.KillTrainer)
    stand_still(story, 2, w1=3, w2=2)
    assert story.found(c.KillTrainer)


def test_before_the_first_step_the_warm_up_bounds_the_duration_of_a_pass():
    story = Story().send(s.WorkersAssigned(workers=("w1", "w2")))
    for worker in ("w1", "w2"):
        story.send(s.TrainerWarm(trainer=story.trainer(worker), warm_s=40.0))
    story.formed()
    stand_still(story, 115, w1=3, w2=3)
    assert not story.found(c.AbortGeneration)
    stand_still(story, 6, w1=3, w2=3)
    assert story.found(c.AbortGeneration)


def test_restoring_rank_gets_a_longer_limit():
    story = Story().start("w1", "w2")
    story.lose("w1", injected=True).lose("w2", injected=True).warm("w1", "w2")
    [form] = story.found(c.FormGeneration)
    assert form.restore
    stand_still(story, 200, w1=0, w2=1)
    assert not story.found(c.KillTrainer)
    stand_still(story, 200, w1=0, w2=1)
    assert [worker for worker, _ in kills(story)] == ["w1"]


def test_no_rank_is_suspected_while_a_supervisor_is_silent():
    story = Story().start("w1", "w2")
    story.see("w1", 5, **ALIVE).see("w2", 4, **ALIVE)
    story.now += 31
    story.see("w1", 5, **ALIVE).send(s.Tick())
    assert not story.found(c.KillTrainer)


def test_suspension_of_the_coordinator_itself_does_not_count_as_a_stall():
    story = Story().start("w1", "w2")
    story.see("w1", 5, **ALIVE).see("w2", 4, **ALIVE)
    story.send(s.Tick(asleep_s=100.0), after_s=100.25)
    story.see("w1", 5, **ALIVE).see("w2", 4, **ALIVE).send(s.Tick())
    assert not story.found(c.KillTrainer)
    stand_still(story, 31, w1=5, w2=4)
    assert story.found(c.KillTrainer)


def test_clock_set_back_does_not_excuse_a_stall_forever():
    story = Story().start("w1", "w2")
    story.see("w1", 5, **ALIVE).see("w2", 4, **ALIVE)
    story.now -= 3600
    story.send(s.Tick(asleep_s=-3600.0))
    stand_still(story, 31, w1=5, w2=4)
    assert [worker for worker, _ in kills(story)] == ["w2"]


def test_worker_whose_trainer_cannot_be_killed_is_evicted():
    story = stand_still(Story().start("w1", "w2"), 31, w1=5, w2=4)
    assert story.found(c.KillTrainer)
    story.see("w2", 4, **ALIVE).send(s.Tick())
    assert not story.found(c.KillTrainer)  # once is enough
    story.wait(KILL_PATIENCE_S + 1)
    [lost] = story.found(events.WorkerLost)
    assert lost.worker == "w2"


def test_frozen_rank_that_does_not_report_is_killed_with_its_state_in_the_reason():
    story = Story().start("w1", "w2", "w3")
    story.send(s.WorkerGone(worker="w1", cause="gone")).report("w2", step=4, why="failed")
    story.see("w3", 9, **ALIVE)
    story.now += 31
    story.see("w3", 9, **STOPPED).send(s.Tick())
    [(worker, why)] = kills(story)
    assert worker == "w3"
    assert why == "stopped (SIGSTOP), no report 31 s after its generation was aborted"


def test_aborted_rank_with_progress_may_report_later():
    story = Story().start("w1", "w2", "w3")
    story.send(s.WorkerGone(worker="w1", cause="gone")).report("w2", step=4, why="failed")
    for beats in range(5):
        story.now += 15
        story.see("w3", 9, beats=beats, **ALIVE).send(s.Tick())
        assert not story.found(c.KillTrainer)


def test_frozen_newcomer_is_killed_and_a_slow_one_only_causes_a_warning():
    story = Story().start("w1")
    story.send(s.WorkersAssigned(workers=("w1", "w2", "w3")))
    for _ in range(4):
        story.now += 50
        story.see("w1", 0, beats=int(story.now), **ALIVE)
        story.see("w2", 0, alive_age_s=story.now - 100, process="stopped")
        story.see("w3", 0, alive_age_s=0.1)
    story.send(s.Tick())
    assert kills(story) == [("w2", "stopped (SIGSTOP) for 201 s")]
    [dump] = story.found(c.DumpStacks)
    assert dump.trainer == story.trainer("w3")


def test_newcomer_that_hangs_in_its_warm_up_does_not_block_other_newcomers():
    story = Story().start("w1")
    story.send(s.WorkersAssigned(workers=("w1", "w2", "w3"))).warm("w2")
    assert not story.found(c.AnnounceChange)
    story.wait(1.1)  # w3 never says anything
    assert story.found(c.AnnounceChange)
    assert story.report("w1", step=3).ranks() == ["w1", "w2"]


def test_rank_that_freezes_while_it_saves_the_last_checkpoint_is_replaced_by_another():
    story = Story().start("w1", "w2")
    story.report("w1", step=8, why="done").report("w2", step=8, why="done")
    [save] = story.found(c.SaveCheckpoint)
    story.see("w1", 9, **STOPPED).see("w2", 9, **ALIVE).send(s.Tick())
    [kill] = story.found(c.KillTrainer)
    assert kill.trainer == save.trainer
    story.lose("w1")
    [again] = story.found(c.SaveCheckpoint)
    assert again.trainer == story.trainer("w2")


def test_progress_is_only_recorded_and_acted_upon_in_the_next_tick():
    # With hundreds of workers, beats are most of the stimuli.
    story = Story().send(s.WorkersAssigned(workers=("w1", "w2"))).warm("w1")
    story.now += ADMISSION_GRACE_S  # the wait for w2

    story.see("w1", 0, generation=0, **ALIVE)
    assert story.last == []
    story.send(s.Tick())
    assert story.found(c.FormGeneration)
