"""The audit passes what is right, and finds each fault that is planted in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.log.events import (
    CheckpointCommitted,
    EarlyStopped,
    EvalCompleted,
    EvalScored,
    Event,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobResumed,
    JobStatusChanged,
    JobSubmitted,
    StepCompleted,
    StepUndone,
    UserErrorRaised,
    WeightsHashed,
    WorkerLeft,
    WorkerLost,
)
from etrain_jupyter.notebook.audit import AuditReport, audit_log
from etrain_jupyter.rules.samples.ledger import checksum_of, cursor_at, epoch_order, total_steps
from tests.unit.log.spent import made

NUM_SAMPLES, BATCH, SEED, EPOCHS = 100, 32, 11, 3
COMMON: dict[str, Any] = {"job_id": "digits-1", "time": 1.0}


def number(events: list[Event]) -> list[Event]:
    """Number the events, and let each step have as many ranks as its generation."""
    sizes = {e.generation: e.world_size for e in events if isinstance(e, GenerationFormed)}
    fitting = [
        replace(e, world_size=sizes.get(e.generation, 2)) if isinstance(e, StepCompleted) else e
        for e in events
    ]
    return [event.with_seq(seq) for seq, event in enumerate(fitting, start=1)]


def submitted(seed: int = SEED) -> JobSubmitted:
    return JobSubmitted(
        **COMMON, name="digits", min_workers=1, max_workers=4, config={"seed": seed, "epochs": 3}
    )


def planned(num_samples: int = NUM_SAMPLES, batch: int = BATCH, epochs: int = EPOCHS) -> JobPlanned:
    return made(
        JobPlanned,
        **COMMON,
        **{"num_train_samples": num_samples, "num_eval_samples": 20, "global_batch_size": batch},
        steps_per_epoch=-(-num_samples // batch),
        total_steps=total_steps(epochs, None, num_samples, batch),
        total_samples=epochs * num_samples,
    )


def formed(generation: int, step: int, ranks: list[str], pids: list[int]) -> GenerationFormed:
    values = {"generation": generation, "step": step, "ranks": ranks, "trainer_pids": pids}
    return made(GenerationFormed, **COMMON, **values)


def samples_of(step: int, num_samples: int = NUM_SAMPLES, batch: int = BATCH) -> Any:
    epoch, first, count = cursor_at(step - 1, num_samples, batch)
    return epoch_order(seed=SEED, epoch=epoch, num_samples=num_samples)[first : first + count]


def completed(
    step: int,
    *,
    generation: int = 1,
    trained: Any = None,
    num_samples: int = NUM_SAMPLES,
    batch: int = BATCH,
) -> StepCompleted:
    """Return the event of a step that trained what was due, or else ``trained``."""
    epoch, first, _ = cursor_at(step - 1, num_samples, batch)
    trained = samples_of(step, num_samples, batch) if trained is None else np.asarray(trained)
    return made(
        StepCompleted,
        **COMMON,
        **{"generation": generation, "step": step, "epoch": epoch, "first": first},
        samples=len(trained),
        sample_checksum=checksum_of(trained),
        world_size=2,
    )


def hashed(step: int, digests: list[str], generation: int = 1) -> list[Event]:
    return [
        WeightsHashed(
            **COMMON, generation=generation, step=step, worker=f"w{rank}", rank=rank, digest=digest
        )
        for rank, digest in enumerate(digests)
    ]


def evaluated(step: int, samples: int = 20) -> EvalCompleted:
    return EvalCompleted(**COMMON, step=step, epoch=0, samples=samples, loss=1.0, duration_s=0.1)


def ended(status: str = "finished") -> JobStatusChanged:
    return JobStatusChanged(**COMMON, status=status)


def lost(worker: str = "w1", generation: int = 1) -> WorkerLost:
    return WorkerLost(**COMMON, generation=generation, worker=worker, cause="SIGKILL")


def undone(step: int, generation: int = 1) -> StepUndone:
    return StepUndone(**COMMON, generation=generation, step=step, workers=["w0", "w1"])


def is_step(event: Event, step: int) -> bool:
    return isinstance(event, StepCompleted) and event.step == step


def undisturbed() -> list[Event]:
    """Return the log of three epochs of four steps, with hashes and evaluations, not numbered."""
    log: list[Event] = [submitted(), planned(), formed(1, 0, ["w0", "w1"], [10, 11])]
    for step in range(1, 13):
        log.append(completed(step))
        if step % 4 == 0:
            log += [*hashed(step, [f"d{step}"] * 2), evaluated(step)]
    return [*log, ended()]


def audit_changed(change: Callable[[Event], Event | list[Event]]) -> AuditReport:
    """Audit the undisturbed log after each event was replaced by what ``change`` returns."""
    log: list[Event] = []
    for event in undisturbed():
        new = change(event)
        log += new if isinstance(new, list) else [new]
    return audit_log(number(go_on_in_newest(log)))


def go_on_in_newest(log: list[Event]) -> list[Event]:
    """Let the steps after a change be those of the generation that it formed."""
    newest, changed = formed(1, 0, [], []), []
    for event in log:
        newest = event if isinstance(event, GenerationFormed) else newest
        is_after = isinstance(event, StepCompleted | WeightsHashed) and event.step > newest.step
        if is_after and event.generation == 1:
            event = replace(event, generation=newest.generation)
        if isinstance(event, WeightsHashed):
            event = replace(event, worker=newest.ranks[event.rank % len(newest.ranks)])
        changed.append(event)
    return changed


def replace_step(step: int, *new: Event) -> Callable[[Event], Event | list[Event]]:
    def change(event: Event) -> Event | list[Event]:
        return list(new) if isinstance(event, StepCompleted) and event.step == step else event

    return change


def insert_before_step(step: int, *new: Event) -> Callable[[Event], Event | list[Event]]:
    def change(event: Event) -> Event | list[Event]:
        is_it = isinstance(event, StepCompleted) and event.step == step
        return [*new, event] if is_it else event

    return change


def test_undisturbed_job_passes_with_zero_waste() -> None:
    report = audit_log(number(undisturbed()))
    assert report.problems == ()
    assert report.ok
    rows = [(r.epoch, r.samples, r.seen_once, r.repeated, r.missing) for r in report.epochs]
    assert rows == [(0, 100, 100, 0, 0), (1, 100, 100, 0, 0), (2, 100, 100, 0, 0)]
    assert (report.steps_committed, report.steps_undone, report.steps_executed) == (12, 0, 12)
    assert (report.digests_compared, report.num_evals, report.status) == (6, 3, "finished")


def test_report_is_readable() -> None:
    report = audit_changed(insert_before_step(6, lost("w1"), undone(6)))
    assert str(report) == REPORT
    html = report._repr_html_()
    assert "every sample exactly once" in html
    assert html.count("<tr>") == 4


REPORT = """\
audit ok: every sample exactly once (3 epochs complete)
     epoch   samples      once  repeated   missing
         0       100       100         0         0
         1       100       100         0         0
         2       100       100         0         0
  steps     13 executed, 12 committed, 1 undone
  workers   1 lost, 0 left, 1 generation
  weights   fingerprints of all ranks equal at 12 steps, 6 digests compared between ranks
  digest    d12 at step 12
  eval      3 evaluations"""


def test_log_of_a_job_that_has_not_trained_passes() -> None:
    assert str(audit_log([])).startswith("audit ok: nothing has been trained yet")
    assert audit_log(number([submitted(), planned()])).ok


def test_epoch_in_progress_may_lack_samples_that_are_not_due_yet() -> None:
    report = audit_log(number(undisturbed()[:11]))
    assert report.ok
    assert [row.is_complete for row in report.epochs] == [True, False]
    assert report.epochs[1].samples == report.epochs[1].seen_once == 32
    assert (
        report.verdict == "audit ok: every sample exactly once (1 epoch complete, one in progress)"
    )
    assert "        1*        32" in str(report)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("stopped", "one cut short: the job was stopped"),
        ("failed", "one cut short: the job failed"),
        ("paused", "one in progress"),
    ],
)
def test_last_epoch_of_an_ended_job_is_not_in_progress(status: str, words: str) -> None:
    report = audit_log(number([*undisturbed()[:11], ended(status)]))

    assert report.verdict == f"audit ok: every sample exactly once (1 epoch complete, {words})"


def test_partial_last_epoch_is_accepted_if_configured() -> None:
    log = undisturbed()[:11]
    log[1] = replace(planned(), total_steps=5)  # epochs: 1.25
    report = audit_log(number([*log, ended()]))

    assert report.verdict.endswith("(1 epoch complete, the last one in part, as configured)")


def test_digest_of_an_earlier_step_is_not_reported_for_the_last_one() -> None:
    saved = CheckpointCommitted(
        **COMMON, step=6, manifest="m", size_bytes=1, stall_s=0.0, duration_s=0.1
    )
    log = [submitted(), planned(), formed(1, 0, ["w0", "w1"], [1, 2])]
    log += [*map(completed, range(1, 5)), *hashed(4, ["d4", "d4"]), completed(5), completed(6)]

    report = str(audit_log(number([*log, saved, ended("stopped")])))

    assert "  digest    d4 at step 4; the last step, 6, has none\n" in report
    assert "  saved     the weights of step 6\n" in report
    assert "saved" not in str(audit_log(number(log)))


def test_late_or_missing_digests_are_compared_as_far_as_available() -> None:
    """Review R5: they are computed while training goes on; a rank that is killed tells none."""
    log = [submitted(), planned(), formed(1, 0, ["w0", "w1", "w2"], [1, 2, 3])]
    log += [*map(completed, range(1, 6)), *hashed(4, ["d4", "d4"]), completed(6), ended("stopped")]

    report = audit_log(number(log))

    assert report.ok
    assert report.digests_compared == 2
    others = [replace(e, digest="x") if getattr(e, "rank", 0) == 1 else e for e in log]
    [problem] = audit_log(number(others)).problems
    assert "at step 4 the ranks had different weights" in problem


def test_lost_sample_is_found_and_named() -> None:
    due = samples_of(6)
    report = audit_changed(replace_step(6, completed(6, trained=np.delete(due, 3))))
    assert report.problems == (
        "step 6 trained 31 samples, expected 32",
        f"step 6 did not train sample {due[3]}",
        f"epoch 1: sample {due[3]} was never trained",
    )
    assert (report.epochs[1].seen_once, report.epochs[1].missing) == (99, 1)
    assert str(report).startswith("audit FAILED: 3 problems\n  ! step 6 trained 31 samples")


def test_repeated_sample_is_found_and_named() -> None:
    due = samples_of(6)
    report = audit_changed(replace_step(6, completed(6, trained=np.append(due, due[3]))))
    assert report.problems == (
        "step 6 trained 33 samples, expected 32",
        f"step 6 trained sample {due[3]} once too often",
        f"epoch 1: sample {due[3]} was trained more than once",
    )
    assert report.epochs[1].repeated == 1


def test_sample_trained_in_place_of_another_is_found() -> None:
    """The count is right, so that only the checksum can tell."""
    due, other = samples_of(6), samples_of(5)[0]
    report = audit_changed(replace_step(6, completed(6, trained=np.append(due[1:], other))))
    assert report.problems == (
        f"step 6 trained sample {other} in place of sample {due[0]}",
        f"epoch 1: sample {due[0]} was never trained",
        f"epoch 1: sample {other} was trained more than once",
    )


@pytest.mark.parametrize("checksum", [0, -5, 2**63, 2**70, 12345])
def test_step_with_an_unexplained_checksum_counts_no_sample(checksum: int) -> None:
    report = audit_changed(replace_step(6, replace(completed(6), sample_checksum=checksum)))
    assert report.problems[0].startswith("step 6 trained other samples than expected (checksum")
    assert report.epochs[1].missing == 32


def test_wrong_seed_is_found() -> None:
    log = number([submitted(seed=SEED + 1), *undisturbed()[1:]])
    assert len(audit_log(log).problems) > 12


def test_step_that_trained_another_steps_samples_is_found() -> None:
    report = audit_changed(replace_step(6, replace(completed(5), step=6)))
    assert report.problems == (
        "step 6 began at sample 0 of epoch 1, expected 32 of epoch 1",
        f"epoch 1: 32 samples ({first_five(samples_of(6))} ...) were never trained",
        f"epoch 1: 32 samples ({first_five(samples_of(5))} ...) were trained more than once",
    )


def first_five(samples: Any) -> str:
    return ", ".join(map(str, sorted(samples.tolist())[:5]))


def test_step_outside_of_the_epoch_is_found() -> None:
    report = audit_changed(replace_step(6, replace(completed(6), first=500)))
    assert "step 6 trained samples outside of the epoch" in report.problems


def test_gap_in_the_steps_is_found() -> None:
    report = audit_changed(replace_step(6))
    assert "step 6 is missing before step 7" in report.problems
    assert report.epochs[1].missing == 32
    assert not report.ok


def test_step_committed_twice_is_found() -> None:
    report = audit_changed(replace_step(6, completed(6), completed(6)))
    assert "step 6 was committed again after step 6" in report.problems
    assert report.epochs[1].repeated == 32


def test_missing_line_of_the_log_is_found() -> None:
    log = number(undisturbed())
    del log[1]
    assert audit_log(log).problems[0] == "the log has event 3 where 2 was expected"


def test_diverged_rank_is_found_and_named() -> None:
    log = [*undisturbed()[:-1], *hashed(12, ["d12", "other", "d12"]), ended()]
    report = audit_log(number(log))
    assert report.problems == (
        "at step 12 w2 reported its weights as a rank of generation 1, which it was not in",
        "at step 12 the ranks had different weights: "
        "d12 on rank 0 on w0, rank 1 on w1, rank 0 on w0, rank 2 on w2; other on rank 1 on w1",
    )


def test_single_digest_is_not_counted_as_a_comparison() -> None:
    report = audit_log(number([*undisturbed()[:4], *hashed(1, ["d1"])]))
    assert report.digests_compared == 0
    assert "digests" not in str(report)


def test_report_states_at_how_many_steps_the_weights_were_compared() -> None:
    alone = formed(2, 8, ["w0"], [10])
    report = audit_changed(insert_before_step(9, lost("w1"), alone))
    assert (report.steps_compared, report.steps_alone) == (8, 4)
    assert "equal at 8 steps" in str(report)
    assert "nothing to compare at 4 steps of a single rank" in str(report)


def test_different_fingerprints_are_reported_at_the_first_step_they_differ() -> None:
    parted = audit_changed(
        lambda e: replace(e, ranks_agree=e.step < 6) if isinstance(e, StepCompleted) else e
    )
    assert parted.problems == ("at step 6 the ranks (w0, w1) had different fingerprints",)
    assert parted.steps_compared == 5


def test_generation_whose_rank_0_died_before_its_report_discards_no_step() -> None:
    """It was to restore step 4 as far as the coordinator knew; the next one found step 6."""
    restored = JobRestored(**COMMON, generation=3, step=6, num_undone=0)
    nobody = formed(2, 4, ["w2"], [20])
    again = [lost("w0"), lost("w1"), nobody, lost("w2", 2), formed(3, 4, ["w3"], [30]), restored]
    log = [*undisturbed()[: undisturbed().index(completed(7))], *again]
    log += [completed(step, generation=3) for step in range(7, 13)]
    report = audit_log(number([*log, ended()]))
    assert report.problems == ()
    assert report.steps_rolled_back == 0


@pytest.mark.parametrize("every", ["4 steps", "1 epoch"])
def test_evaluation_that_never_reached_the_log_is_found(every: str) -> None:
    def drop(*steps: int) -> AuditReport:
        def change(event: Event) -> Event | list[Event]:
            if isinstance(event, JobSubmitted):
                return replace(event, config={**event.config, "eval": {"every": every}})
            is_dropped = isinstance(event, EvalCompleted) and event.step in steps
            return [] if is_dropped else event

        return audit_changed(change)

    assert drop().problems == ()
    assert drop(8).problems == (f"no evaluation at step 8, although eval.every is {every}",)
    assert drop(4, 12).problems == (
        f"no evaluation at steps 4, 12, although eval.every is {every}",
    )


def test_evaluation_is_not_missing_while_the_job_trains_or_without_a_loss() -> None:
    log = [e for e in undisturbed() if not isinstance(e, JobStatusChanged)]
    config = {"seed": SEED, "epochs": 3, "eval": {"every": "4 steps"}}
    log[0] = replace(submitted(), config=config)
    assert audit_log(number(log[:-1])).problems == (), "the last step is being evaluated"

    config["eval"] = {"every": "4 steps", "loss": False}
    log[0] = replace(submitted(), config=config)
    without = [e for e in log if not isinstance(e, EvalCompleted)]
    assert audit_log(number(without)).problems == ()

    for hostile in ("often", {"every": "0 steps"}, {"every": 7}, None):
        without[0] = replace(submitted(), config={**config, "eval": hostile})
        assert audit_log(number(without)).problems == ()


def test_short_evaluation_is_found() -> None:
    report = audit_changed(
        lambda e: replace(e, samples=19) if isinstance(e, EvalCompleted) and e.step == 8 else e
    )
    assert report.problems == ("the evaluation at step 8 used 19 samples, the set has 20",)


def test_score_of_too_few_records_is_found() -> None:
    scored = EvalScored(**COMMON, step=8, samples=19, duration_s=0.1, scores={"f1": 0.5})
    log = undisturbed()

    report = audit_log(number([*log[:-1], scored, log[-1]]))

    assert report.problems == ("the evaluation at step 8 used 19 samples, the set has 20",)


def test_job_that_finished_early_is_found() -> None:
    report = audit_log(number([*undisturbed()[:6], ended()]))
    assert report.problems == ("the job finished at step 3 of 12",)
    assert audit_log(number([*undisturbed()[:6], ended("stopped")])).ok


def test_steps_without_a_plan_are_a_problem() -> None:
    report = audit_log(number([e for e in undisturbed() if not isinstance(e, JobPlanned)]))
    assert report.problems == (
        "12 steps were committed, but the log has no plan of the samples to train",
    )


@pytest.mark.parametrize(
    "events",
    [
        [lost(), undone(6), formed(2, 5, ["w0", "w1"], [10, 11])],
        [undone(6), lost(), formed(2, 5, ["w0", "w1"], [10, 11])],
        [lost("w0"), lost("w1"), undone(6)],
        [lost("w1"), undone(6), formed(2, 5, ["w0"], [10]), lost("w0", 2), undone(6, generation=2)],
        [WorkerLeft(**COMMON, worker="w3", reason="preempted"), formed(2, 5, ["w0"], [10])],
        [
            undone(6),
            UserErrorRaised(
                **COMMON, generation=1, error="ValueError: 1", traceback="", workers=["w0"]
            ),
        ],
    ],
)
def test_loss_may_cost_the_step_in_flight(events: list[Event]) -> None:
    report = audit_changed(insert_before_step(6, *events))
    assert report.problems == ()
    assert report.steps_undone == sum(isinstance(event, StepUndone) for event in events)


def test_loss_known_before_the_last_commit_may_cost_the_next_step() -> None:
    assert audit_changed(replace_step(6, lost(), completed(6), undone(7))).ok


def test_steps_logged_after_a_loss_do_not_shift_its_undone_step() -> None:
    """Rank 0 sends its records in batches: some come after the coordinator knew of the loss."""
    late = [lost(), completed(6), completed(7), undone(8), formed(2, 7, ["w0", "w1"], [10, 11])]
    assert audit_changed(lambda e: late if is_step(e, 6) else [] if is_step(e, 7) else e).ok


def test_planned_change_that_costs_a_step_is_found() -> None:
    left = WorkerLeft(**COMMON, worker="w3", reason="preempted")
    report = audit_changed(insert_before_step(6, left, undone(6), formed(2, 5, ["w0"], [10])))
    assert report.problems == ("step 6 was undone although no worker had been lost",)


def test_loss_that_costs_two_steps_is_found() -> None:
    report = audit_changed(insert_before_step(6, lost(), undone(6), undone(7)))
    assert report.problems == ("steps 6 to 7 were undone for 1 lost workers",)


def test_old_loss_does_not_excuse_waste() -> None:
    next_one = formed(2, 2, ["w0", "w1"], [10, 11])
    faults: dict[int, list[Event]] = {3: [lost(), undone(3), next_one], 4: [undone(4, 2)]}

    def change(event: Event) -> Event | list[Event]:
        return [*faults.get(event.step, []), event] if isinstance(event, StepCompleted) else event

    report = audit_changed(change)
    assert report.problems == ("step 4 was undone although no worker had been lost",)


def test_step_of_a_fenced_generation_is_found() -> None:
    def change(event: Event) -> Event:
        if isinstance(event, StepCompleted) and event.step in (5, 6):
            return replace(event, generation=2 if event.step == 5 else 1)
        return event

    problems = audit_changed(change).problems
    assert "step 6 was committed by generation 1 after generation 2 had continued" in problems


def rolled_back(survivor_pid: int) -> AuditReport:
    """Audit a job that went back from step 6 to the checkpoint of step 4."""
    steps = [completed(step, generation=2) for step in range(5, 13)]
    log = undisturbed()
    end = next(i for i, e in enumerate(log) if isinstance(e, StepCompleted) and e.step == 7)
    again: list[Event] = [lost("w0"), lost("w1"), formed(2, 4, ["w0", "w4"], [survivor_pid, 20])]
    return audit_log(number([*log[:end], *hashed(6, ["x", "x"]), *again, *steps, ended()]))


def test_resume_after_the_last_worker_counts_its_steps_once() -> None:
    report = rolled_back(survivor_pid=19)
    assert report.problems == ()
    assert (report.steps_committed, report.steps_rolled_back) == (12, 2)
    assert "14 executed, 12 committed, 0 undone, 2 trained again" in str(report)
    assert report.digests_compared == 2


def resumed(
    generation: int, step: int, *, seed: int = SEED, from_status: str = "running"
) -> JobResumed:
    return JobResumed(
        **COMMON,
        generation=generation,
        from_status=from_status,
        step=step,
        min_workers=1,
        max_workers=4,
        config={"seed": seed, "epochs": 3},
    )


def restored(generation: int, step: int, num_undone: int) -> JobRestored:
    return JobRestored(**COMMON, generation=generation, step=step, num_undone=num_undone)


def test_log_continued_by_a_resume_covers_the_whole_job() -> None:
    """The coordinator died at step 6; its successor went on from the checkpoint of step 4."""
    log: list[Event] = [
        *[submitted(), planned(), formed(1, 0, ["w0", "w1"], [10, 11])],
        *[completed(step) for step in range(1, 7)],
        *[resumed(1, 6), planned()],
        # The same names and numbers come again on another machine.
        *[formed(2, 4, ["w0", "w1"], [10, 11]), restored(2, 4, 2)],
        *[completed(step, generation=2) for step in range(5, 13)],
        ended(),
    ]
    report = audit_log(number(log))
    assert report.problems == ()
    assert [(row.epoch, row.seen_once, row.is_complete) for row in report.epochs] == [
        (0, 100, True),
        (1, 100, True),
        (2, 100, True),
    ]
    assert (report.steps_committed, report.steps_rolled_back) == (12, 2)


def test_sample_that_a_resume_repeats_is_found() -> None:
    log: list[Event] = [
        *[submitted(), planned(), formed(1, 0, ["w0", "w1"], [10, 11])],
        *[completed(step) for step in range(1, 7)],
        *[resumed(1, 6), planned(), formed(2, 6, ["w0", "w1"], [20, 21]), restored(2, 6, 0)],
        completed(7, generation=2, trained=samples_of(6)),
        *[completed(step, generation=2) for step in range(8, 13)],
        ended(),
    ]
    assert audit_log(number(log)).problems != ()


def test_resumed_finished_job_is_audited_with_its_newest_length() -> None:
    longer = planned(epochs=EPOCHS + 1)
    log: list[Event] = [
        *[submitted(), planned(), formed(1, 0, ["w0", "w1"], [10, 11])],
        *[completed(step) for step in range(1, 13)],
        *[ended(), resumed(1, 12, from_status="finished"), longer],
        *[formed(2, 12, ["w0", "w1"], [20, 21]), restored(2, 12, 0)],
        *[completed(step, generation=2) for step in range(13, 17)],
        ended(),
    ]
    assert audit_log(number(log)).problems == ()
    assert "the job finished after 396 of 400 samples" in "".join(
        audit_log(number([*log[:-2], ended()])).problems
    )


def test_forced_batch_size_is_audited_with_its_own_plan() -> None:
    """The second life trains 20 samples a step from position 64 of epoch 0 on."""
    order = epoch_order(seed=SEED, epoch=0, num_samples=NUM_SAMPLES)
    other = replace(planned(batch=20), total_steps=15)
    later = [
        replace(
            completed(step, generation=2, trained=order[first : first + count]),
            epoch=0,
            first=first,
        )
        for step, first, count in ((3, 64, 20), (4, 84, 16))
    ]
    log: list[Event] = [
        *[submitted(), planned(), formed(1, 0, ["w0", "w1"], [10, 11])],
        *[completed(1), completed(2), resumed(1, 2), other],
        *[formed(2, 2, ["w0", "w1"], [20, 21]), restored(2, 2, 0), *later],
    ]
    report = audit_log(number(log))
    assert report.problems == ()
    assert sum(row.seen_once for row in report.epochs) == 100


def test_rollback_although_a_trainer_survived_is_found() -> None:
    report = rolled_back(survivor_pid=10)
    assert report.problems == ("generation 2 went back from step 6 to 4 although w0 had survived",)


def test_survivor_that_undid_the_last_step_may_repeat_it() -> None:
    """Both holders of step 4 died after it was logged; w0 had not seen its end."""
    only_w0 = replace(undone(4), workers=["w0"])
    log: list[Event] = [
        *[submitted(), planned(), formed(1, 0, ["w0", "w1"], [10, 11])],
        *[completed(step) for step in range(1, 5)],
        *[lost("w1"), only_w0, formed(2, 3, ["w0"], [10])],
        *[completed(step) for step in range(4, 13)],
        ended(),
    ]
    assert audit_log(number(go_on_in_newest(log))).problems == ()


def test_job_that_continues_another_is_audited_from_its_first_step() -> None:
    steps = [completed(step) for step in range(7, 13)]
    log = [submitted(), planned(), formed(1, 6, ["w0"], [10]), *steps, ended()]
    report = audit_log(number(log))
    assert report.problems == ()
    assert [row.samples for row in report.epochs] == [36, 100]


@given(num_samples=st.integers(1, 60), batch=st.integers(1, 70), data=st.data())
def test_any_job_passes_and_any_removed_step_is_found(
    num_samples: int, batch: int, data: st.DataObject
) -> None:
    plan = planned(num_samples, batch)
    steps: list[Event] = [
        completed(step, num_samples=num_samples, batch=batch)
        for step in range(1, plan.total_steps + 1)
    ]
    head: list[Event] = [submitted(), plan, formed(1, 0, ["w0"], [10])]
    assert audit_log(number([*head, *steps, ended()])).problems == ()
    del steps[data.draw(st.integers(0, len(steps) - 1))]
    assert not audit_log(number([*head, *steps, ended()])).ok


def test_many_epochs_are_shown_in_few_lines() -> None:
    steps: list[Event] = [completed(step) for step in range(1, 201)]
    bad = samples_of(6)
    steps[5] = completed(6, trained=bad[1:])
    plan = planned(epochs=50)
    report = audit_log(number([submitted(), plan, formed(1, 0, ["w0"], [1]), *steps]))
    assert len(report.epochs) == 50
    text = str(report)
    assert "... and 38 epochs more in report.epochs" in text
    assert len(text.splitlines()) < 25


def test_control_characters_of_a_log_are_escaped() -> None:
    report = AuditReport(problems=("the ranks (\x1b[2J\x07\u202e, w1) had different fingerprints",))

    for shown in (str(report), report._repr_html_()):
        assert r"(\x1b[2J\x07\u202e, w1)" in shown


def test_many_problems_are_shown_in_few_lines() -> None:
    report = audit_log(number([submitted(seed=0), *undisturbed()[1:]]))
    listed = AuditReport(problems=report.problems * 10)
    assert f"and {len(listed.problems) - 20} more in report.problems" in str(listed)


def test_text_from_the_log_is_escaped_in_html() -> None:
    html = AuditReport(problems=("<script>alert(1)</script>",))._repr_html_()
    assert "<script>" not in html


def test_ten_thousand_steps_are_audited_at_once() -> None:
    num_samples, batch, epochs = 16_000, 8, 5
    log: list[Event] = [
        *[submitted(), planned(num_samples, batch, epochs), formed(1, 0, ["w0"], [10])]
    ]
    for epoch in range(epochs):
        order = epoch_order(seed=SEED, epoch=epoch, num_samples=num_samples)
        for first in range(0, num_samples, batch):
            step = (epoch * num_samples + first) // batch + 1
            trained = order[first : first + batch]
            event = replace(completed(1, num_samples=8, batch=8), step=step, epoch=epoch)
            log.append(replace(event, first=first, sample_checksum=checksum_of(trained)))
    numbered = number(log)
    before = time.process_time()
    report = audit_log(numbered)
    assert time.process_time() - before < 3
    assert report.problems == ()
    assert report.steps_committed == 10_000


def test_undone_step_reported_by_two_survivors_counts_once() -> None:
    w0, w1 = (replace(undone(5), workers=[worker]) for worker in ("w0", "w1"))
    log: list[Event] = [
        *[submitted(), planned(), formed(1, 0, ["w0", "w1", "w2"], [10, 11, 12])],
        *[completed(step) for step in range(1, 4)],
        *[lost("w2"), w0, completed(4), w1, formed(2, 4, ["w0", "w1"], [10, 11])],
        *[completed(step) for step in range(5, 13)],
        ended(),
    ]
    assert audit_log(number(go_on_in_newest(log))).problems == ()


def stopped_early(step: int, generation: int = 1) -> EarlyStopped:
    return EarlyStopped(
        **COMMON,
        generation=generation,
        step=step,
        metric="loss",
        best=0.1,
        best_step=1,
        num_evals=3,
        reason="early stopping: enough",
    )


def cut_after(step: int, *more: Event) -> list[Event]:
    """Return a job that finished after some step of its first epochs."""
    log = undisturbed()
    last = next(i for i, event in enumerate(log) if is_step(event, step))
    kept = [e for e in log[: last + 1]]
    return number([*kept, *more, ended()])


def test_early_end_is_valid_only_at_the_step_where_it_was_decided() -> None:
    report = audit_log(cut_after(6, stopped_early(6)))

    assert report.ok, report
    assert "one cut short: the job ended early" in report.verdict
    assert audit_log(cut_after(6)).problems == ("the job finished at step 6 of 12",)
    assert audit_log(cut_after(6, stopped_early(5))).problems == (
        "the job finished at step 6, but was to stop early at step 5",
    )


def test_decision_lost_with_its_state_does_not_excuse_an_early_end() -> None:
    """All that had decided died; the next generation went on from an older state."""
    log = cut_after(6, stopped_early(6))[:-1]
    restored = JobRestored(**COMMON, generation=2, step=5, num_undone=1)
    again = formed(2, 5, ["w3"], [3])
    log = number(
        [*log, lost("w1"), lost("w2"), again, restored, completed(6, generation=2), ended()]
    )

    assert audit_log(log).problems == ("the job finished at step 6 of 12",)
