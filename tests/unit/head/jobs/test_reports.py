"""Reports of trainers: what the coordinator logs, keeps, relays and refuses."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import etrain_jupyter
from etrain_jupyter.bundle.sources import CellSource
from etrain_jupyter.head.jobs.exhibits import choose_removed
from etrain_jupyter.head.jobs.planned_faults import PlannedFaults
from etrain_jupyter.head.jobs.rendezvous import Rendezvous
from etrain_jupyter.head.jobs.reports import StepClock
from etrain_jupyter.head.jobs.trainer_output import PrintedLines, last_words
from etrain_jupyter.log import events
from etrain_jupyter.log.events import STACKS_HEADER
from etrain_jupyter.log.job_record import NOT_BEGUN
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.membership import Finishing
from etrain_jupyter.testing.fault_plan import FaultPlan
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.rank_values import unpack_values
from tests.unit.head.coordinator.rig import PLAN, Rig
from tests.unit.log.pictures import png


def let_pass(rig: Rig, seconds: float, worker: str) -> None:
    """Let time pass in which a worker's supervisor is heard."""
    for _ in range(int(seconds * 2)):
        rig.beat(worker)
        rig.tick(0.5)


def saved_steps(rig: Rig) -> list[int]:
    return [event.step for event in rig.events(events.CheckpointCommitted)]


# --- newcomers ---


async def test_newcomer_with_data_of_another_length_is_excluded(rig):
    await rig.start("w1")
    rig.coordinator._requests.do(rig.job, "scale", {"max": 2})
    rig.hello("w2")
    rig.warm("w2", plan={**PLAN, "num_train_samples": 63})
    assert rig.job.state.status == "running"
    [lost] = rig.events(events.WorkerLost)
    assert lost.worker == "w2"
    assert "the workers have data of different lengths: (63, 0) samples on w2" in lost.cause
    assert rig.told("w2", m.ShutDownTrainer)
    assert not rig.told("w1", m.LeaveGeneration)


async def test_workers_with_different_shards_fail_the_job(rig):
    ours = {"train_layout": "8:32x2", "train_digest": "a" * 64}
    rig.hello("w1", "w2")
    await rig.submit()
    rig.warm("w1", plan={**PLAN, **ours})

    rig.warm("w2", plan={**PLAN, **ours, "train_digest": "b" * 64})

    assert rig.job.state.status == "failed"
    [error] = rig.events(events.UserErrorRaised)
    assert "the shards of data.train on w2 differ from those on the first worker" in error.error


async def test_data_of_different_length_at_the_start_fails_the_job(rig):
    rig.hello("w1", "w2")
    await rig.submit()
    rig.warm("w1")
    rig.warm("w2", plan={**PLAN, "num_train_samples": 63})
    assert rig.job.state.status == "failed"


# --- the last holder of the state ---


async def test_notice_to_the_only_rank_saves_its_state_before_the_machine_is_taken(rig):
    await rig.start("w1")
    rig.coordinator._requests.do(rig.job, "preempt", {"notice_s": 20.0})
    assert rig.told("w1", m.RequestCheckpoint)
    let_pass(rig, 9.0, "w1")
    assert not rig.told("w1", m.LeaveGeneration)
    let_pass(rig, 1.5, "w1")
    assert rig.told("w1", m.LeaveGeneration)
    rig.commit("w1", 1, 2, 3)
    rig.report("w1", 3, why="planned")
    assert rig.told("w1", m.SaveState) == [
        m.SaveState(trainer=rig.trainer("w1"), generation=1, logged_step=3, starts=(0,))
    ]
    rig.save("w1", 3)
    assert rig.told("w1", m.ShutDownTrainer)
    assert rig.job.state.status == "waiting"
    rig.tick()
    assert rig.nodes.released == ["w1"]


async def test_failed_checkpoint_is_reported_with_its_error(rig):
    await rig.start("w1")
    rig.commit("w1", 1)
    rig.report("w1", 1, why="done")
    for wait_s in (5, 10, 20, 0):
        rig.tell("w1", m.CheckpointNotWritten, step=1, error="no space")
        let_pass(rig, wait_s, "w1")
    assert rig.job.state.status == "failed"
    assert "could not be written (no space)" in rig.job.state.reason


# --- how often auto saves ---


def saved_after(rig: Rig, worker: str, step: int, *, stall_s: float) -> None:
    record = {"step": step, "manifest": "m", "size_bytes": 1, "duration_s": 0.5}
    rig.tell(
        worker,
        m.CheckpointWritten,
        record={**record, "stall_s": stall_s, "slowed_s": 0.0},
    )


async def test_ranks_get_an_interval_once_the_cost_of_a_checkpoint_is_known(rig):
    await rig.start("w1", "w2")
    assert rig.told("w1", m.JoinGeneration)[-1].pace is None
    rig.commit("w1", 1, 2)
    saved_after(rig, "w1", 1, stall_s=0.1)
    [chosen] = rig.events(events.CheckpointIntervalChosen)
    assert chosen.cost_s == pytest.approx(0.1)
    assert "each costs 100 ms of training" in chosen.reason
    for worker in ("w1", "w2"):
        assert [sent.pace.interval_s for sent in rig.told(worker, m.SetPace)] == [chosen.interval_s]
    saved_after(rig, "w1", 2, stall_s=0.11)
    assert len(rig.events(events.CheckpointIntervalChosen)) == 1  # much the same


async def test_next_rank_0_gets_the_interval_and_the_age_of_the_newest_checkpoint(rig):
    await rig.start("w1", "w2")
    rig.commit("w1", 1)
    saved_after(rig, "w1", 1, stall_s=0.1)
    rig.tell("w1", m.TrainerExited, cause="SIGKILL")
    rig.report("w2", 1)
    chosen = rig.events(events.CheckpointIntervalChosen)[0]
    pace = rig.told("w2", m.JoinGeneration)[-1].pace
    assert pace.interval_s == chosen.interval_s
    assert 0.5 <= pace.age_s < 60


async def test_interval_set_in_the_cell_is_not_changed(rig, monkeypatch):
    monkeypatch.setattr(type(await started(rig)), "is_paced", False)
    rig.commit("w1", 1)
    saved_after(rig, "w1", 1, stall_s=0.1)
    assert not rig.events(events.CheckpointIntervalChosen)
    assert not rig.told("w1", m.SetPace)


async def started(rig: Rig):
    await rig.start("w1")
    return rig.job.spec


# --- those that were given up ---


async def test_checkpoint_of_steps_unknown_to_the_job_is_not_logged(rig):
    await rig.start("w1")
    rig.commit("w1", 1, 2)
    evicted_incarnation = rig.trainer("w1")
    rig.tell("w1", m.TrainerExited, cause="SIGKILL")
    rig.save("w1", 2, trainer=evicted_incarnation, generation=1)
    rig.save("w1", 5, trainer=evicted_incarnation, generation=1)
    assert saved_steps(rig) == [2]
    assert rig.job.state.saved_step == 2


async def test_checkpoint_invalidated_by_a_later_generation_is_not_logged(rig):
    await rig.start("w1", "w2")
    rig.commit("w1", 1, 2, 3)
    evicted_incarnation = rig.trainer("w1")
    rig.tell("w1", m.TrainerExited, cause="SIGKILL")
    rig.report("w2", 2)
    rig.commit("w2", 3, 4)
    rig.save("w1", 3, trainer=evicted_incarnation, generation=1)
    rig.save("w1", 2, trainer=evicted_incarnation, generation=1)
    assert saved_steps(rig) == [2]


async def test_next_generation_gets_the_starts_of_earlier_ones_and_the_log_end(rig):
    await rig.start("w1")
    rig.commit("w1", 1, 2, 3)
    rig.save("w1", 2)
    rig.tell("w1", m.TrainerExited, cause="SIGKILL")
    rig.warm("w1")
    form = rig.told("w1", m.JoinGeneration)[-1]
    assert (form.restore, form.starts, form.log_end) == (True, (0,), 3)
    assert form.logged_step == 2
    rig.tell("w1", m.TrainerExited, cause="SIGKILL")
    rig.tick(5.0)
    rig.warm("w1")
    assert rig.told("w1", m.JoinGeneration)[-1].starts == (0, NOT_BEGUN)
    rig.tell("w1", m.GenerationJoined, step=2)
    rig.tell("w1", m.TrainerExited, cause="SIGKILL")
    rig.tick(10.0)
    rig.warm("w1")
    assert rig.told("w1", m.JoinGeneration)[-1].starts == (0, NOT_BEGUN, 2)


# --- evaluations, best and early ends ---


def evaluation(step: int, loss: float) -> dict:
    return {"step": step, "epoch": 0, "samples": 8, "loss": loss, "duration_s": 0.1, "time": 1.0}


async def test_evaluation_reported_again_is_logged_once(rig):
    await rig.start("w1")
    trainer = next(iter(rig.job.state.members))
    for step, loss in ((3, 0.5), (3, 0.5), (6, float("nan")), (6, float("nan"))):
        record = evaluation(step, loss)
        rig.say("w1", m.EvalFinished(trainer=trainer, generation=1, record=record))
    for step in (3, 3, 6):
        record = {"step": step, "metric": "loss", "value": 0.5}
        rig.say("w1", m.BestFound(trainer=trainer, generation=1, record=record))

    assert [e.step for e in rig.events(events.EvalCompleted)] == [3, 6]
    assert [e.step for e in rig.events(events.BestReached)] == [3, 6]
    warnings = [e.text for e in rig.events(events.LogLine) if e.level == "warning"]
    assert warnings == ["step 6: the loss of the evaluation is nan; training continues"]


async def test_scores_that_are_told_again_are_logged_once_and_lost_ones_are_a_warning(rig):
    await rig.start("w1")
    trainer = next(iter(rig.job.state.members))
    for step in (3, 3, 6, 3):
        record = {"step": step, "samples": 8, "duration_s": 0.1, "scores": {"f1": 0.5}, "time": 1.0}
        rig.say("w1", m.EvalScoreFound(trainer=trainer, generation=1, record=record))
    for step in (6, 9):
        rig.say("w1", m.EvalScoreLost(trainer=trainer, generation=1, step=step))

    assert [e.step for e in rig.events(events.EvalScored)] == [3, 6]
    warnings = [e.text for e in rig.events(events.LogLine) if e.level == "warning"]
    assert [text.partition(":")[0] for text in warnings] == [
        "the evaluation of step 9 has no scores"
    ]


async def test_evaluation_after_the_restored_step_is_logged_again(rig):
    await rig.start("w1")
    trainer = next(iter(rig.job.state.members))

    def tell() -> None:
        record, best = evaluation(6, 0.5), {"step": 6, "metric": "loss", "value": 0.5}
        rig.say("w1", m.EvalFinished(trainer=trainer, generation=1, record=record))
        rig.say("w1", m.BestFound(trainer=trainer, generation=1, record=best))

    tell()
    rig.job.log_restored(5)
    tell()
    assert len(rig.events(events.EvalCompleted)) == len(rig.events(events.BestReached)) == 2
    rig.job.log_restored(6)
    tell()
    assert len(rig.events(events.EvalCompleted)) == len(rig.events(events.BestReached)) == 2


async def test_early_end_reported_by_every_rank_is_logged_once(rig):
    await rig.start("w1", "w2")
    told = {
        "metric": "loss",
        "step": 6,
        "best": None,
        "best_step": 0,
        "num_evals": 3,
        "reason": "early stopping: enough",
    }
    for worker in ("w1", "w2"):
        trainer = rig.job.state.of_worker(worker).trainer
        report = m.GenerationLeft(
            trainer=trainer,
            generation=1,
            progress=(6, 3),
            why="done",
            undone=False,
            ended_early=told,
        )
        rig.say(worker, report)

    assert [e.step for e in rig.events(events.EarlyStopped)] == [6]
    assert rig.job.state.ending == Finishing(reason="early stopping: enough")


# --- printed lines (review R9) ---


async def test_printed_lines_of_a_job_are_bounded_and_the_rest_is_counted(rig):
    await rig.start("w1", "w2")
    rig.job.messages.printed = PrintedLines(burst=5, per_s=2.0)
    for number in range(10):
        for worker in ("w1", "w2"):
            rig.tell(worker, m.TextLogged, level="info", text=f"line {number}", is_printed=True)
    rig.tell("w1", m.TextLogged, level="warning", text="its stacks")
    rig.now += 1.0
    for number in range(11):
        rig.tell("w1", m.TextLogged, level="info", text=f"late {number}", is_printed=True)
    assert list(rig.job.trainers[rig.trainer("w1")].last_lines)[-1] == "late 10"
    rig.job.handle(s.StopRequested(now=True))

    texts = [event.text for event in rig.events(events.LogLine)]
    assert texts[:5] == ["line 0", "line 0", "line 1", "line 1", "line 2"]
    dropped = "dropped: after the first 20,000, a job's log takes 5 per second on average"
    assert texts[5:7] == [f"... 15 printed lines {dropped}", "its stacks"]
    assert texts[7:] == ["late 0", "late 1", f"... 9 printed lines {dropped}"]


# --- last words of a trainer that crashed ---


CELLS = {"/tmp/cell_1.py": CellSource(label="Cell In[3]", text="")}
OURS = Path(etrain_jupyter.__file__).parent
CRASH = f"""\
loading
Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/usr/lib/python3/threading.py", line 331 in wait

Current thread 0x00007e (most recent call first):
  File "/usr/lib/python3/ctypes/__init__.py", line 519 in string_at
  File "/tmp/cell_1.py", line 2 in loss
  File "{OURS}/trainer/workload.py", line 60 in forward

Extension modules: numpy._core (total: 1)
""".splitlines()


def test_printed_lines_are_shown_from_the_end():
    lines = [f"line {number}" for number in range(30)]
    shown = last_words("w1", lines, {}).splitlines()
    assert shown[0] == "w1 printed last:"
    assert shown[1:] == [f"  line {number}" for number in range(20, 30)]


def test_crash_is_shown_as_a_traceback_of_the_users_frames():
    assert last_words("w1", CRASH, CELLS).splitlines() == [
        "w1 printed last:",
        "  loading",
        "w1 crashed: Segmentation fault",
        "  Cell In[3], line 2, in loss",
        '  File "/usr/lib/python3/ctypes/__init__.py", line 519, in string_at',
    ]


def test_hang_is_shown_as_a_traceback_of_the_users_frames():
    hang = [STACKS_HEADER if text.startswith("Fatal") else text for text in CRASH]
    assert last_words("w1", hang, CELLS).splitlines() == [
        "w1 printed last:",
        "  loading",
        "w1 was doing:",
        "  Cell In[3], line 2, in loss",
        '  File "/usr/lib/python3/ctypes/__init__.py", line 519, in string_at',
    ]


def test_hang_outside_of_the_users_code_shows_no_traceback():
    hang = [STACKS_HEADER, "Current thread 0x00007e (most recent call first):"]
    hang.append(f'  File "{OURS}/trainer/trainer.py", line 60 in _live')
    assert last_words("w1", hang, CELLS) == ""


def test_trainer_without_output_gives_an_empty_text():
    assert last_words("w1", [], {}) == ""


# --- resent steps ---


def step_record(step: int) -> dict:
    return {"step": step, "samples": 32, "samples_per_s": 320.0}


def test_records_resent_by_the_next_rank_0_are_accepted_once():
    clock, records = StepClock(), [step_record(step) for step in (1, 2, 3)]
    assert [r["step"] for r in clock.take(records[:2], after=0)] == [1, 2]
    assert [r["step"] for r in clock.take(records, after=2)] == [3]
    assert clock.step_s == 0.1


def test_record_after_a_gap_is_accepted():
    clock = StepClock()
    assert [r["step"] for r in clock.take([step_record(2), step_record(3)], after=0)] == [2, 3]


# --- values that all ranks publish ---


RANKS = ("b", "a", "c")


def key(trainer: str, value: bytes, *, topic: str = "0", generation: int = 1) -> m.RankKey:
    return m.RankKey(trainer=trainer, generation=generation, topic=topic, value=value)


def test_values_are_sent_in_rank_order_once_the_last_has_arrived():
    rendezvous = Rendezvous()
    assert rendezvous.take(key("a", b"1"), RANKS) is None
    assert rendezvous.take(key("a", b"1"), RANKS) is None  # resent to a new scheduler
    assert rendezvous.take(key("c", b"2"), RANKS) is None
    assert rendezvous.take(key("b", b"", topic="connections"), RANKS) is None
    keys = rendezvous.take(key("b", b"0"), RANKS)
    assert keys is not None
    assert (keys.topic, keys.generation, keys.trainer) == ("0", 1, "")
    assert unpack_values(keys.values) == [b"0", b"1", b"2"]


def test_values_of_an_aborted_generation_are_forgotten():
    rendezvous = Rendezvous()
    for trainer in RANKS[:2]:
        assert rendezvous.take(key(trainer, b"old"), RANKS) is None
    assert rendezvous.take(key("c", b"2", generation=2), RANKS) is None
    assert rendezvous.take(key("b", b"0", generation=2), RANKS) is None
    keys = rendezvous.take(key("a", b"1", generation=2), RANKS)
    assert keys is not None
    assert unpack_values(keys.values) == [b"0", b"1", b"2"]


# --- planned faults ---


def ids(faults: list[dict]) -> list[int]:
    return [fault["id"] for fault in faults]


def test_fault_for_any_rank_is_assigned_to_exactly_one_rank():
    plan = FaultPlan().kill(rank=None, step=3).hang(rank=None, step=5).exit(rank=1, step=7)
    planned = PlannedFaults(plan.to_list())
    for world_size in range(1, 6):
        told = [ids(planned.of_rank(rank, world_size)) for rank in range(world_size)]
        for anyones in (1, 2):
            assert sum(anyones in mine for mine in told) == 1
        assert all(3 in mine for mine in told)  # its rank is told, each knows its own


def test_fault_for_any_newcomer_is_reassigned_after_the_first_one_ended():
    planned = PlannedFaults(FaultPlan().kill(rank=None, step=0, at="warm").to_list())
    assert ids(planned.of_newcomer("t1", among=["t1"])) == [1]
    assert ids(planned.of_newcomer("t2", among=["t1", "t2"])) == []
    assert ids(planned.of_newcomer("t3", among=["t2", "t3"])) == [1]
    assert planned.of_rank(0, 1) == []
    assert planned.fire(1) is not None
    assert planned.of_newcomer("t4", among=["t4"]) == []


def test_newcomers_get_no_fault_planned_for_any_rank():
    planned = PlannedFaults(FaultPlan().kill(rank=None, step=3).kill(rank=0, step=3).to_list())
    assert ids(planned.of_newcomer("t1", among=["t1"])) == [2]


# --- exhibits ---


def found(rig: Rig, step: int, name: str, data: bytes, format: str = "text", **more: int) -> None:
    values = {"step": step, "name": name, "format": format, "data": data}
    rig.tell("w1", m.ExhibitFound, **values, **more)


def stored(rig: Rig) -> dict[str, bytes]:
    """Return the files of the job's exhibits, by path."""
    folder = rig.folder / "j" / "exhibits"
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def warnings(rig: Rig) -> list[str]:
    return [e.text for e in rig.events(events.LogLine) if e.level == "warning"]


async def test_exhibit_is_stored_and_logged_without_its_content(rig):
    await rig.start("w1")
    found(rig, 3, "report", b"fine")
    found(rig, 3, "picture", png(), "png")

    assert stored(rig) == {
        "step_00000003/report.txt": b"fine",
        "step_00000003/picture.png": png(),
    }
    report, picture = rig.events(events.ExhibitStored)
    assert (report.step, report.name, report.format, report.size_bytes) == (3, "report", "text", 4)
    assert picture.digest == hashlib.sha256(png()).hexdigest()
    assert b"fine" not in (rig.folder / "j" / "events.jsonl").read_bytes()


async def test_exhibit_from_the_previous_generation_is_stored(rig):
    await rig.start("w1")
    found(rig, 3, "report", b"fine", generation=0)

    assert len(rig.events(events.ExhibitStored)) == 1


@pytest.mark.parametrize(
    ("step", "name", "format", "data", "problem"),
    [
        (3, "../report", "text", b"fine", "has an invalid name"),
        (-3, "report", "text", b"fine", "has an invalid format or step"),
        (3, "picture", "png", b"<svg/>", "is not a PNG"),
        (3, "report", "text", bytes(1_000_001), "has 1,000,001 bytes; the limit is 1,000,000"),
    ],
)
async def test_exhibit_that_a_worker_must_not_send_is_refused(
    rig, step, name, format, data, problem
):
    await rig.start("w1")
    found(rig, step, name, data, format)

    [warning] = warnings(rig)
    assert f"from w1 was refused: it {problem}" in warning
    assert stored(rig) == {}
    assert rig.events(events.ExhibitStored) == []


async def test_evaluation_with_too_many_exhibits_is_cut_off(rig):
    await rig.start("w1")
    for number in range(18):
        found(rig, 3, f"report{number}", b"fine")
    found(rig, 3, "report0", b"good")

    assert len(stored(rig)) == 16
    assert stored(rig)["step_00000003/report0.txt"] == b"good"
    assert len(warnings(rig)) == 2


async def test_exhibit_that_the_disk_rejects_is_a_warning(rig):
    await rig.start("w1")
    (rig.folder / "j" / "exhibits").write_text("a file instead of a folder")
    found(rig, 3, "report", b"fine")

    [warning] = warnings(rig)
    assert "the exhibit 'report' of step 3 from w1 could not be stored in" in warning
    assert warning.endswith(". Training continues")
    assert rig.job.state.status == "running"


async def test_oldest_exhibits_are_removed_once_the_job_has_too_many(rig, monkeypatch):
    monkeypatch.setattr(
        "etrain_jupyter.head.jobs.exhibits.choose_removed",
        functools.partial(choose_removed, max_bytes=30),
    )
    await rig.start("w1")
    for step in range(1, 6):
        found(rig, step, "report", b"0123456789")

    assert [path[5:13] for path in sorted(stored(rig))] == ["00000001", "00000004", "00000005"]
    removed = rig.events(events.ExhibitsRemoved)
    assert [event.step for event in removed] == [2, 3]
    assert removed[0].files == ["exhibits/step_00000002/report.txt"]
    assert sorted(rig.job.record.exhibits) == [1, 4, 5]


async def test_exhibits_of_undone_steps_are_removed(rig):
    await rig.start("w1")
    for step in (2, 4, 6):
        found(rig, step, "report", b"fine")
    rig.job.log_restored(4)

    assert sorted(stored(rig)) == ["step_00000002/report.txt", "step_00000004/report.txt"]
    [removed] = rig.events(events.ExhibitsRemoved)
    assert (removed.step, removed.reason) == (6, "the job returned to step 4")


SIZES = st.dictionaries(st.integers(0, 99), st.integers(0, 50), max_size=12)


def test_oldest_are_removed_first() -> None:
    sizes = {step: 10 for step in range(0, 60, 10)}

    assert choose_removed(sizes, max_bytes=40, max_evaluations=9) == [10, 20]
    assert choose_removed(sizes, max_bytes=99, max_evaluations=4) == [10, 20]
    assert choose_removed(sizes, max_bytes=60, max_evaluations=6) == []


@given(sizes=SIZES, max_bytes=st.integers(0, 300), max_evaluations=st.integers(0, 12))
def test_limits_hold_and_the_first_and_the_newest_are_kept(
    sizes: dict[int, int], max_bytes: int, max_evaluations: int
) -> None:
    removed = choose_removed(sizes, max_bytes=max_bytes, max_evaluations=max_evaluations)

    kept = {step: size for step, size in sizes.items() if step not in removed}
    if sizes:
        assert {min(sizes), max(sizes)} <= kept.keys()
    fits = sum(kept.values()) <= max_bytes and len(kept) <= max_evaluations
    assert fits or len(kept) <= 2
    if removed:  # no more than necessary
        last = removed[-1]
        assert sum(kept.values()) + sizes[last] > max_bytes or len(kept) + 1 > max_evaluations
