"""The durable log: what was appended is read back, however the writer ended."""

from __future__ import annotations

import json
import math
import os
import time
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log import event_log as log_module
from etrain_jupyter.log.event_log import EventLog, LogReader, read_events
from etrain_jupyter.log.events import (
    LOG_FORMAT,
    Event,
    ExhibitFormat,
    JobPlanned,
    JobStatus,
    JobStatusChanged,
    JobSubmitted,
    LeaveReason,
    LogLine,
    StepCompleted,
    UnknownEvent,
    WarmUpPhase,
    event_from_dict,
)
from tests.unit.log.spent import made

# Lone surrogates cannot be written as UTF-8; everything else may stand in a traceback.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    JobStatus: TEXT,  # a newer version may have others
    ExhibitFormat: TEXT,
    WarmUpPhase: TEXT,
    LeaveReason: TEXT,
    int: st.integers(1, 2**60),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    float | None: st.none() | st.floats(allow_nan=False),
    list[str]: st.lists(TEXT, max_size=3),
    list[int]: st.lists(st.integers(0, 2**31), max_size=3),
    list[float]: st.lists(st.floats(allow_nan=False), max_size=3),
    dict[str, float]: st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3),
    dict[str, Any]: st.dictionaries(TEXT, JSON, max_size=3),
}


def events_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    hints = typing.get_type_hints(kind)
    hints.pop("kinds")
    values = {name: VALUES[hint] for name, hint in hints.items()}
    if kind is JobSubmitted:
        values["format"] = st.just(LOG_FORMAT)
    return st.builds(kind, **values)


def line(text: str) -> LogLine:
    return LogLine(job_id="job", time=1.0, level="info", worker="", text=text)


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, LogLine)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events.jsonl"


@pytest.mark.parametrize("kind", sorted(Event.kinds))
@given(data=st.data())
def test_every_kind_of_event_survives_a_round_trip(kind: str, data: st.DataObject) -> None:
    event = data.draw(events_of(Event.kinds[kind]))
    text = log_module._encode(event.to_json_dict())
    assert "\n" not in text
    assert event_from_dict(json.loads(text)) == event


PLANNED = {
    "event": "JobPlanned",
    "job_id": "job",
    "time": 1.0,
    **{"num_train_samples": 10, "num_eval_samples": 0, "global_batch_size": 5},
    **{"steps_per_epoch": 2, "total_steps": 2, "total_samples": 10},
    **{"num_parameters": 10, "num_trained_parameters": 10},
}
SIZED = {
    **{"event": "WorkersSized", "job_id": "job", "time": 1, "workers": 1, "offered": 1},
    **{"limit": "max", "goodputs": [0, 1.5], "measured": [1], "reason": ""},
}


def test_whole_numbers_are_read_as_floats() -> None:
    assert event_from_dict(SIZED).time == 1


@pytest.mark.parametrize(
    "values",
    [
        PLANNED | {"total_samples": 1e9},
        PLANNED | {"num_train_samples": 2.5},
        PLANNED | {"num_train_samples": 0},
        PLANNED | {"global_batch_size": -1},
        PLANNED | {"seq": 1.5},
        PLANNED | {"total_steps": 10**400},
        PLANNED | {"time": 10**400},
        SIZED | {"measured": [1.5]},
        SIZED | {"goodputs": [10**400]},
    ],
    ids=lambda values: values["event"],
)
def test_numbers_that_no_job_has_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        event_from_dict(values)


@pytest.mark.parametrize("format", [{}, {"format": LOG_FORMAT + 1}])
def test_log_in_another_format_is_refused_and_not_changed(
    path: Path, format: dict[str, int]
) -> None:
    first = JobSubmitted(job_id="job", time=1.0, name="net", min_workers=1, max_workers=1, seq=1)
    values = {k: v for k, v in first.to_json_dict().items() if k != "format"} | format
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values) + "\n")
    before = path.read_bytes()

    with pytest.raises(EtrainError, match=r"log of job job has format .* Nothing was changed"):
        read_events(path)
    with pytest.raises(EtrainError, match=r"Nothing was written"):
        EventLog(path)

    assert path.read_bytes() == before


def test_steps_of_many_epochs_need_no_memory() -> None:
    planned = event_from_dict(PLANNED | {"total_samples": 4 * 10**15, "per_worker_batch_size": 10})
    assert isinstance(planned, JobPlanned)
    assert planned.total_steps_after(step_of(samples=10, world_size=1)) == 4 * 10**14


def step_of(*, samples: int, world_size: int) -> StepCompleted:
    return made(StepCompleted, samples=samples, world_size=world_size)


def test_non_finite_floats_survive_a_round_trip(path: Path) -> None:
    values = {"loss": math.nan, "lr": math.inf, "samples_per_s": -math.inf}
    step = made(StepCompleted, **values, metrics={"perplexity": math.inf})
    EventLog(path).append([step])
    (read,) = read_events(path)
    assert isinstance(read, StepCompleted)
    assert math.isnan(read.loss)
    assert (read.lr, read.samples_per_s) == (math.inf, -math.inf)
    assert read.metrics == {"perplexity": math.inf}


def test_events_are_numbered_from_one_without_gaps(path: Path) -> None:
    log = EventLog(path)
    assert log.append([]) == []
    assert [event.seq for event in log.append([line("a"), line("b")])] == [1, 2]
    assert [event.seq for event in log.append([line("c")])] == [3]
    log.close()
    log.close()
    assert [event.seq for event in read_events(path)] == [1, 2, 3]
    assert [json.loads(text)["seq"] for text in path.read_text().splitlines()] == [1, 2, 3]


def test_event_can_be_read_as_soon_as_append_returns(path: Path) -> None:
    log = EventLog(path)
    log.append([line("a")])
    assert texts(read_events(path)) == ["a"]
    log.close()


def test_reading_since_a_number_returns_the_later_events(path: Path) -> None:
    log = EventLog(path)
    log.append([line(text) for text in "abcde"])
    log.close()
    assert texts(read_events(path, since=2)) == ["c", "d", "e"]
    assert texts(read_events(path, since=2, limit=2)) == ["c", "d"]
    assert read_events(path, since=5) == []
    assert read_events(path, since=9) == []
    assert read_events(path.with_name("absent")) == []


def test_follower_gets_each_event_once(path: Path) -> None:
    reader = LogReader(path)
    assert reader.read() == []
    log = EventLog(path)
    log.append([line("a"), line("b")])
    assert texts(reader.read(limit=1)) == ["a"]
    assert texts(reader.read()) == ["b"]
    assert reader.read() == []
    log.append([line("c")])
    assert texts(reader.read()) == ["c"]
    log.close()


def test_incomplete_line_is_left_for_the_next_read(path: Path) -> None:
    log = EventLog(path)
    log.append([line("a")])
    log.close()
    whole = path.read_bytes()
    reader = LogReader(path)
    path.write_bytes(whole + whole[:20])
    assert texts(reader.read()) == ["a"]
    assert texts(read_events(path)) == ["a"]
    path.write_bytes(whole + whole)
    assert texts(reader.read()) == ["a"]


@pytest.mark.parametrize(
    "torn", [b"{", b'{"event":"LogLine"', b"\0" * 100, b"\0\0\n", b"garbage\n"]
)
def test_reopened_log_continues_after_the_last_whole_line(path: Path, torn: bytes) -> None:
    log = EventLog(path)
    log.append([line("a"), line("b")])
    log.close()
    with path.open("ab") as file:
        file.write(torn)
    log = EventLog(path)
    assert log.last_seq == 2
    assert [event.seq for event in log.append([line("c")])] == [3]
    log.close()
    assert texts(read_events(path)) == ["a", "b", "c"]


@given(data=st.data())
def test_log_truncated_anywhere_keeps_all_complete_events(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    log = EventLog(path, fsync_every_s=None)
    log.append([line(text) for text in ("a", "zwei\nLeitungen", "日本")])
    log.close()
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    num_whole = whole[:cut].count(b"\n")
    assert len(read_events(path)) == num_whole
    log = EventLog(path, fsync_every_s=None)
    (event,) = log.append([line("next")])
    log.close()
    assert event.seq == num_whole + 1
    assert [event.seq for event in read_events(path)] == list(range(1, num_whole + 2))


def test_file_that_is_not_a_log_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "diary.txt"
    path.write_text("Dear diary,\nnothing happened.\n")
    with pytest.raises(EtrainError, match="not the log of a job"):
        EventLog(path)
    assert path.read_text() == "Dear diary,\nnothing happened.\n"


def test_second_writer_is_refused_until_the_first_ends(path: Path) -> None:
    log = EventLog(path)
    with pytest.raises(EtrainError, match="being written by another process"):
        EventLog(path)
    log.append([line("a")])
    log.close()
    EventLog(path).close()


def test_error_names_a_damaged_line_in_the_middle(path: Path) -> None:
    log = EventLog(path)
    log.append([line(text) for text in "abc"])
    log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'["event"]\n' + lines[2])
    with pytest.raises(EtrainError, match=r"Line 2 of .* is not an event"):
        read_events(path)
    assert texts(read_events(path, limit=1)) == ["a"]
    assert texts(read_events(path, since=2)) == ["c"]


def test_event_of_a_newer_version_keeps_its_number(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"event":"QuantumLeapt","job_id":"job","time":1.0,"seq":1,"far":true}\n')
    log = EventLog(path)
    assert log.append([line("a")])[0].seq == 2
    log.close()
    unknown, _ = read_events(path)
    assert isinstance(unknown, UnknownEvent)
    assert (unknown.name, unknown.seq, unknown.data["far"]) == ("QuantumLeapt", 1, True)


def test_event_that_is_not_json_leaves_the_log_unchanged(path: Path) -> None:
    log = EventLog(path)
    with pytest.raises(TypeError):
        log.append([line("a"), line(object())])  # type: ignore[arg-type]
    assert log.append([line("b")])[0].seq == 1
    log.close()
    assert texts(read_events(path)) == ["b"]


def test_full_disk_leaves_only_complete_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path)
    log.append([line("a")])
    write, calls = os.write, []

    def fill_disk(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill_disk)
        with pytest.raises(OSError, match="No space left"):
            log.append([line("b")])
    assert log.append([line("c")])[0].seq == 2
    log.close()
    assert texts(read_events(path)) == ["a", "c"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    return calls


def test_log_is_synced_at_most_once_a_second(path: Path, syncs: list[int]) -> None:
    clock = Clock()
    log = EventLog(path, clock=clock)
    syncs.clear()
    for clock.now, expected in [(0.5, 0), (0.9, 0), (1.0, 1), (1.5, 1), (2.5, 2)]:
        log.append([line("a")])
        assert len(syncs) == expected
    log.close()
    assert len(syncs) == 2


@pytest.mark.parametrize("kind", log_module.DURABLE)
@given(data=st.data())
def test_events_that_others_act_on_are_synced_before_append_returns(
    tmp_path_factory: pytest.TempPathFactory, kind: type[Event], data: st.DataObject
) -> None:
    happened: list[str] = []
    write, fsync = os.write, os.fsync
    with pytest.MonkeyPatch.context() as patch:
        log = EventLog(
            tmp_path_factory.mktemp("log") / "events.jsonl", fsync_every_s=None, clock=Clock()
        )
        patch.setattr(os, "write", lambda *a: happened.append("write") or write(*a))
        patch.setattr(os, "fsync", lambda *a: happened.append("sync") or fsync(*a))

        log.append([line("a")])
        happened.append("acknowledged")
        log.append([line("b"), data.draw(events_of(kind))])
        happened.append("acknowledged")
        log.close()

    assert happened == ["write", "acknowledged", "write", "sync", "acknowledged"]


def test_events_after_the_last_sync_are_synced_on_close(path: Path, syncs: list[int]) -> None:
    log = EventLog(path, fsync_every_s=None, clock=Clock())
    log.append([JobStatusChanged(job_id="job", time=1.0, status="finished")])
    syncs.clear()
    log.append([line("a")])
    assert syncs == []
    log.close()
    assert len(syncs) == 1


def test_two_hundred_thousand_steps_replay_in_seconds(path: Path) -> None:
    text = (
        '{"event":"StepCompleted","job_id":"digits-1a2b3c4d","time":1763712000.123456,'
        '"generation":3,"seq":%d,"step":%d,"epoch":0,"first":0,"samples":32,'
        '"sample_checksum":68719476736,"loss":0.123456789,"lr":0.001,"world_size":4,'
        '"samples_per_s":1234.5678,"metrics":{"accuracy":0.9876},"ranks_agree":true,'
        '"skipped":false,"data_s":0.001,"compute_s":0.02,"communication_s":0.01,'
        '"optimizer_s":0.002}\n'
    )
    path.parent.mkdir()
    with path.open("w") as file:
        file.writelines(text % (n, n) for n in range(1, 200_001))
    before = time.process_time()
    events = read_events(path)
    # About 2 s; of processor time, because the machine may be busy with other things.
    assert time.process_time() - before < 10
    assert len(events) == 200_000
    assert events[-1].seq == 200_000


def test_text_that_utf8_cannot_encode_is_escaped(path: Path) -> None:
    """Review R4: a file name that is not UTF-8 made the log refuse the event."""
    log = EventLog(path)
    step = made(StepCompleted, metrics={"caf\udce9": 0.5})
    kept = log.append([line("bad file caf\udce9"), step])
    log.close()
    read = read_events(path)
    assert read == kept
    assert texts(read[:1]) == ["bad file caf\\udce9"]
    assert read[1].metrics == {"caf\\udce9": 0.5}
