"""A timeline has each value of a log once, in order, and none that was undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.log.events import (
    EarlyStopped,
    EvalCompleted,
    Event,
    ExhibitStored,
    JobRestored,
    JobResumed,
    StepCompleted,
    UserErrorRaised,
)
from etrain_jupyter.log.loggers.base import Exhibit, Note, Record, Values
from etrain_jupyter.log.loggers.timeline import Rewind, Timeline, find_rewinds
from tests.unit.log.spent import made

COMMON: dict[str, Any] = {"job_id": "job", "time": 1.0}


def step(number: int, loss: float = 0.5) -> StepCompleted:
    values: dict[str, Any] = {"lr": 0.25, "world_size": 2, "samples_per_s": 10.0}
    return made(StepCompleted, **values, step=number, loss=loss)


def evaluation(number: int, loss: float = 0.5) -> EvalCompleted:
    return EvalCompleted(**COMMON, step=number, epoch=0, samples=9, loss=loss, duration_s=0.1)


def exhibit(number: int) -> ExhibitStored:
    values: dict[str, Any] = {"name": "report", "format": "text", "size_bytes": 3, "digest": ""}
    return ExhibitStored(**COMMON, step=number, **values)


def restored(number: int) -> JobRestored:
    return JobRestored(**COMMON, step=number, num_undone=0)


def logged(*events: Event) -> list[Event]:
    return [event.with_seq(seq) for seq, event in enumerate(events, start=1)]


def fold(events: Sequence[Event], rewinds: Sequence[Rewind] = ()) -> list[Record | Rewind]:
    timeline = Timeline(lambda event: f"content of step {event.step}", rewinds)
    return [item for event in events for item in timeline.fold(event)]


def replay(events: Sequence[Event]) -> list[Record | Rewind]:
    return fold(events, find_rewinds(events))


def losses(items: Sequence[Record | Rewind], tag: str) -> list[tuple[int, float]]:
    return [(r.step, r.values[tag]) for r in items if isinstance(r, Values) and tag in r.values]


def test_rewind_precedes_the_records_that_replace_the_undone_ones() -> None:
    events = logged(step(1), step(2), step(3), restored(1), step(2, 0.25))

    items = fold(events)

    kinds = [(type(item).__name__, item.step) for item in items]
    assert kinds == [
        *(("Values", 1), ("Values", 2), ("Values", 3)),
        *(("Rewind", 1), ("Note", 1), ("Values", 2)),
    ]
    assert [r.number for r in items if isinstance(r, Record)] == [0, 1, 2, 3, 4]


def test_replay_leaves_out_what_any_later_rewind_undoes() -> None:
    #   1 2 3 4 R2 3' 4' R3 4''       the second rewind keeps 3'
    events = logged(
        *(step(n) for n in (1, 2, 3, 4)), evaluation(4), exhibit(4),
        restored(2), step(3, 0.3), step(4, 0.4), evaluation(4, 0.4),
        restored(3), step(4, 0.44),
    )  # fmt: skip

    items = replay(events)

    assert [rewind.step for rewind in find_rewinds(events)] == [2, 3]
    assert losses(items, "train/loss") == [(1, 0.5), (2, 0.5), (3, 0.3), (4, 0.44)]
    assert losses(items, "eval/loss") == []
    assert not [item for item in items if isinstance(item, Rewind | Exhibit)]
    assert [item.text for item in items if isinstance(item, Note)] == [
        "Returned to step 2.",
        "Returned to step 3.",
    ]


def test_step_that_is_committed_again_without_a_restore_replaces_later_ones() -> None:
    events = logged(step(1), step(2), step(3), step(2, 0.25))

    assert losses(replay(events), "train/loss") == [(1, 0.5), (2, 0.25)]
    assert [item.step for item in fold(events) if isinstance(item, Rewind)] == [1]


def test_evaluation_that_is_repeated_at_the_same_step_appears_once() -> None:
    resumed = JobResumed(**COMMON, from_status="stopped", step=2, min_workers=1, max_workers=2)
    events = logged(step(1), step(2), evaluation(2, 0.25), resumed, evaluation(2, 0.25))

    assert losses(replay(events), "eval/loss") == [(2, 0.25)]


def test_score_may_follow_later_steps() -> None:
    events = logged(step(1), step(2), evaluation(1), exhibit(1), step(3))

    assert fold(events) == replay(events)
    assert losses(fold(events), "eval/loss") == [(1, 0.5)]
    [report] = [item for item in fold(events) if isinstance(item, Exhibit)]
    assert report.load() == "content of step 1"


def test_interruptions_are_noted_on_one_line() -> None:
    events = logged(
        step(1),
        EarlyStopped(
            **COMMON, step=1, metric="loss", best=0.5, best_step=1, num_evals=3, reason="no gain"
        ),
        UserErrorRaised(**COMMON, step=1, error="ValueError: a\nb", traceback="", workers=[]),
    )

    notes = [item for item in fold(events) if isinstance(item, Note)]

    assert [(note.index, note.text) for note in notes] == [
        (0, "Stopped early at step 1: no gain"),
        (1, r"Failed at step 1: ValueError: a\nb"),
    ]


def ideal(events: Sequence[Event]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return the final steps and evaluations, by keeping a list and cutting its end."""
    steps: list[tuple[int, float]] = []
    evals: list[tuple[int, float]] = []
    for event in events:
        target = 10**9
        if isinstance(event, JobRestored):
            target = event.step
        elif isinstance(event, StepCompleted):
            target = event.step - 1
        newest = steps[-1][0] if steps else 0
        if target < newest:
            steps = [one for one in steps if one[0] <= target]
            evals = [one for one in evals if one[0] <= target]
        if isinstance(event, StepCompleted):
            steps.append((event.step, event.loss))
        elif isinstance(event, EvalCompleted) and event.step not in dict(evals):
            evals.append((event.step, event.loss))
    return steps, evals


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    events: list[Event] = []
    newest = 0
    for number in range(draw(st.integers(0, 25))):
        loss = float(number)
        match draw(st.sampled_from(["step", "step", "step", "eval", "restore", "again"])):
            case "step":
                newest += 1
                events.append(step(newest, loss))
            case "eval":
                events.append(evaluation(draw(st.integers(0, newest)), loss))
            case "restore":
                newest = draw(st.integers(0, newest))
                events.append(restored(newest))
            case "again" if newest:
                newest = draw(st.integers(1, newest))
                events.append(step(newest, loss))
    return logged(*events)


@given(events=logs(), data=st.data())
def test_replay_and_rewinds_lead_to_the_same_final_values(
    events: list[Event], data: st.DataObject
) -> None:
    # A logger starts at any time, replays the log so far and then follows it with rewinds.
    start = data.draw(st.integers(0, len(events)))
    items = fold(events, find_rewinds(events[:start]))

    stored: list[Record] = []
    for item in items:
        if isinstance(item, Rewind):
            stored = [record for record in stored if record.step <= item.step]
        else:
            stored.append(item)

    steps, evals = ideal(events)
    assert losses(stored, "train/loss") == steps
    assert losses(stored, "eval/loss") == evals
    whole = replay(events)
    assert losses(whole, "train/loss") == steps
    assert losses(whole, "eval/loss") == evals
    assert [r.number for r in whole if isinstance(r, Record)] == list(range(len(whole)))


@given(events=logs(), data=st.data())
def test_longer_log_of_the_same_revision_only_appends_records(
    events: list[Event], data: st.DataObject
) -> None:
    part = events[: data.draw(st.integers(0, len(events)))]
    if len(find_rewinds(part)) == len(find_rewinds(events)):
        before = replay(part)
        assert replay(events)[: len(before)] == before
