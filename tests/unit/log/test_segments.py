"""Segments and blocks say what the lines say, whatever happened to their writer."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log import blocks, segments
from etrain_jupyter.log.blocks import Events, StepRun, pack, runs_of
from etrain_jupyter.log.compaction import Compactor
from etrain_jupyter.log.event_log import EventLog, read_events
from etrain_jupyter.log.events import (
    EvalCompleted,
    Event,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobStatusChanged,
    LogLine,
    StepCompleted,
    UnknownEvent,
    WorkerLost,
)
from etrain_jupyter.log.segments import compact, read_log, segments_of
from etrain_jupyter.notebook.dashboard.job_view import JobView
from etrain_jupyter.notebook.job.history import LatestValues
from tests.unit.log.spent import made

FEW = 10
"""Events a segment in these tests."""


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "EVENTS_PER_SEGMENT", FEW)
    monkeypatch.setattr(Events, "PACK_AT", 16)
    monkeypatch.setattr(blocks, "_FEW_ROWS", 3)
    # Waiting for the disk thousands of times proves nothing here.
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events.jsonl"


def step(number: int, **changes: Any) -> StepCompleted:
    values: dict[str, Any] = {
        **{"time": 100.0 + number, "generation": 1, "step": number, "sample_checksum": 7 << 40},
        **{"loss": 1 / number, "world_size": 2, "samples_per_s": 10.0 + number},
    }
    return made(StepCompleted, **values | changes)


def steps(number: int) -> list[Event]:
    return [step(n) for n in range(1, number + 1)]


def write(path: Path, events: list[Event]) -> list[Event]:
    log = EventLog(path, fsync_every_s=None)
    numbered = log.append(events)
    log.close()
    return numbered


# --- what a random log may hold ---

FLOATS = st.floats() | st.just(math.nan) | st.just(-0.0)
COMMON = {"job_id": st.just("job"), "time": st.floats(0, 1e9), "generation": st.integers(0, 3)}
STEPS = st.builds(
    StepCompleted,
    **COMMON,
    step=st.integers(1, 12),
    epoch=st.integers(0, 2),
    first=st.integers(0, 1000),
    samples=st.integers(1, 64),
    # Beyond 64 bits, a step is no row of a column.
    sample_checksum=st.integers(0, 2**64 - 1),
    loss=FLOATS,
    lr=FLOATS,
    world_size=st.integers(1, 3),
    samples_per_s=st.floats(0, 1e6),
    metrics=st.dictionaries(st.sampled_from(["a", "loss", "é", "eval_loss"]), FLOATS, max_size=2),
    ranks_agree=st.booleans(),
    skipped=st.booleans(),
    **dict.fromkeys(("data_s", "compute_s", "communication_s", "optimizer_s"), FLOATS),
)
PLANS = {"num_train_samples": st.just(400), "num_eval_samples": st.just(0)}
OTHERS = st.one_of(
    st.builds(
        EvalCompleted,
        **COMMON,
        step=st.integers(0, 14),
        epoch=st.integers(0, 2),
        samples=st.just(9),
        loss=FLOATS,
        duration_s=st.floats(0, 9),
        metrics=st.dictionaries(st.sampled_from(["a", "f1"]), FLOATS, max_size=2),
    ),
    st.builds(JobRestored, **COMMON, step=st.integers(0, 12), num_undone=st.integers(0, 5)),
    st.builds(
        GenerationFormed,
        **COMMON,
        why=st.just("lost"),
        world_size=st.integers(1, 3),
        ranks=st.just(["w0", "w1"]),
        step=st.integers(0, 12),
        backend=st.just("gloo"),
    ),
    st.builds(
        JobStatusChanged,
        **COMMON,
        status=st.sampled_from(["running", "waiting", "paused", "finished"]),
    ),
    st.builds(WorkerLost, **COMMON, worker=st.sampled_from(["w0", "w9"]), cause=st.just("gone")),
    st.builds(
        JobPlanned,
        **COMMON,
        **PLANS,
        global_batch_size=st.just(32),
        steps_per_epoch=st.just(13),
        total_steps=st.just(39),
        total_samples=st.just(1200),
        per_worker_batch_size=st.sampled_from([0, 16]),
        num_parameters=st.just(10),
        num_trained_parameters=st.just(10),
    ),
    st.builds(
        LogLine, **COMMON, level=st.just("info"), worker=st.just("w0"), text=st.just("a\nb é")
    ),
    st.builds(UnknownEvent, **COMMON, name=st.just("Newer"), data=st.just({"x": [1, None]})),
)


ANYTHING = STEPS | OTHERS


@st.composite
def runs(draw: st.DrawFn) -> list[Event]:
    """Steps as a job makes them: one after the other, alike."""
    first = draw(STEPS)
    values = vars(first) | {"ranks_agree": True, "skipped": False, "sample_checksum": 3}
    number = draw(st.integers(1, 14))
    return [
        StepCompleted(**values | {"step": first.step + i, "loss": float(i), "time": 9.0 + i})
        for i in range(number)
    ]


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Runs of steps, with whatever else happens between them, or instead."""
    events: list[Event] = []
    for _ in range(draw(st.integers(0, 9))):
        events += draw(runs() if draw(st.booleans()) else st.lists(ANYTHING, max_size=4))
    return events


def picture(view: JobView) -> str:
    curves = {name: (x.tolist(), y.tolist()) for name, (x, y) in view.curves.to_dict().items()}
    return repr((view.snapshot(), curves, view.rewinds, view.lists_version))


def values_of(latest: LatestValues) -> str:
    facts = {name: value for name, value in vars(latest).items() if name not in HIDDEN}
    return repr((facts, latest.columns()))


HIDDEN = ("_lock", "_history")


def fold(events: Any) -> tuple[str, str]:
    latest, view = LatestValues(), JobView("job")
    latest.add(events)
    view.add(events)
    return values_of(latest), picture(view)


@settings(max_examples=60, deadline=None)
@given(events=logs(), torn=st.binary(max_size=9))
def test_random_log_reads_the_same_with_and_without_segments(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event], torn: bytes
) -> None:
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    numbered = write(path, events)
    with path.open("ab") as file:
        file.write(torn.replace(b"\n", b""))

    compact(path)
    found = read_log(path)

    assert len(list(segments_of(path).glob("*.npz"))) == len(events) // FEW
    assert repr(list(found)) == repr(numbered)
    assert fold(found) == fold(numbered)
    since = len(events) // 2
    assert repr(list(read_log(path, since=since))) == repr(numbered[since:])


@settings(max_examples=40, deadline=None)
@given(events=logs(), cut=st.integers(0, 200))
def test_events_added_in_pieces_are_packed_and_unchanged(events: list[Event], cut: int) -> None:
    numbered = [event.with_seq(i) for i, event in enumerate(events, start=1)]
    kept = Events(numbered[:cut])
    kept.extend(numbered[cut:])

    assert repr(list(kept)) == repr(numbered)
    assert [repr(kept[i]) for i in range(len(kept))] == [repr(event) for event in numbered]
    assert repr(kept[3:-2]) == repr(numbered[3:-2])
    assert repr(kept[::-3]) == repr(numbered[::-3])
    assert fold(kept) == fold(numbered)
    assert fold(kept.after(7)) == fold(numbered[7:])


def test_events_after_a_position_within_a_block_keep_their_order() -> None:
    kept = Events([event.with_seq(i) for i, event in enumerate(steps(48), start=1)])

    assert [event.seq for event in kept.after(7)] == list(range(8, 49))


def test_consecutive_steps_are_packed_as_one_run() -> None:
    numbered = [event.with_seq(i) for i, event in enumerate(steps(9), start=1)]
    (run,) = pack(numbered).runs()

    assert isinstance(run, StepRun)
    assert (len(run), run.first, run.last) == (9, numbered[0], numbered[-1])
    assert run.column("step").dtype == np.int8


def test_view_that_has_half_of_a_run_adds_the_other_half() -> None:
    numbered = [event.with_seq(i) for i, event in enumerate(steps(20), start=1)]
    view, whole = JobView("job"), JobView("job")
    whole.add(numbered)

    view.add(numbered[:7])
    kept = Events()
    kept.add_block(pack(numbered))
    view.add(kept)

    assert picture(view) == picture(whole)


def test_metric_that_starts_later_is_nan_at_earlier_steps() -> None:
    numbered = [step(n, seq=n, metrics={"a": 0.5} if n > 5 else {}) for n in range(1, 10)]
    latest = LatestValues()
    kept = Events()
    kept.add_block(pack(numbered))
    latest.add(kept)

    column = latest.columns()["a"]

    assert [math.isnan(value) for value in column] == [True] * 5 + [False] * 4


def test_segments_are_read_in_place_of_their_lines(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered = write(path, steps(2 * FEW + 3))
    assert compact(path) == 2
    assert compact(path) == 0
    parsed: list[int] = []
    whole = segments.LogReader.read

    def count(self: Any, limit: int | None = None) -> list[Event]:
        found = whole(self, limit)
        parsed.extend(event.seq for event in found)
        return found

    monkeypatch.setattr(segments.LogReader, "read", count)

    assert read_log(path) == numbered
    assert parsed == [21, 22, 23]


def test_growing_log_gets_its_next_segment(path: Path) -> None:
    write(path, steps(FEW))
    compact(path)
    log = EventLog(path)
    log.append([step(n) for n in range(FEW + 1, 2 * FEW + 1)])

    assert compact(path) == 1
    assert [event.step for event in read_log(path)] == list(range(1, 2 * FEW + 1))
    log.close()


def test_line_of_a_newer_version_is_unchanged(path: Path) -> None:
    write(path, steps(FEW))
    newer = b'{"event":"StepCompleted","step":1,"colour":"red","seq":1,"job_id":"job"'
    text = path.read_bytes().replace(b'{"event":"StepCompleted","job_id":"job"', newer, 1)
    path.write_bytes(text.replace(b'"seq":1,"step":1,', b'"step":1,', 1))
    compact(path)

    (file,) = segments_of(path).iterdir()
    with np.load(file) as arrays:
        assert b"colour" in arrays["others"].tobytes()
    assert repr(list(read_log(path))) == repr(read_events(path))


def damage_middle(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for place in range(len(data) // 3, len(data) // 2):
        data[place] ^= 0xFF
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        damage_middle,
        lambda file: file.write_bytes(file.read_bytes()[:-100]),
        lambda file: file.write_bytes(b""),
        Path.unlink,
    ],
    ids=["flipped", "cut", "empty", "gone"],
)
@pytest.mark.parametrize("number", [0, 1])
def test_lines_are_read_instead_of_a_damaged_segment(path: Path, damage: Any, number: int) -> None:
    numbered = write(path, steps(3 * FEW))
    compact(path)
    damage(sorted(segments_of(path).iterdir())[number])

    assert read_log(path) == numbered
    assert fold(read_log(path)) == fold(numbered)


def test_segments_of_another_log_are_ignored(path: Path, tmp_path: Path) -> None:
    write(path, steps(FEW))
    compact(path)
    other = tmp_path / "other" / "events.jsonl"
    numbered = write(other, [step(n, loss=9.0) for n in range(1, FEW + 1)])
    segments_of(path).rename(segments_of(other))

    assert read_log(other) == numbered


def test_damaged_log_gets_no_segment(path: Path) -> None:
    write(path, steps(FEW))
    path.write_bytes(path.read_bytes().replace(b'"step":3', b'"step":', 1))

    with pytest.raises(EtrainError, match="Line 3 of"):
        compact(path)
    assert not segments_of(path).exists()


def test_segment_that_differs_from_its_lines_is_not_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered = write(path, steps(FEW))
    whole = segments.pack
    monkeypatch.setattr(
        segments, "pack", lambda events, lines: whole([step(9, seq=1), *events[1:]], lines)
    )

    with pytest.raises(EtrainError, match="The log is complete without it"):
        compact(path)
    assert list(segments_of(path).iterdir()) == []
    assert read_log(path) == numbered


@pytest.mark.parametrize("place", range(1, 6))
def test_killed_writer_leaves_a_log_that_reads_the_same(path: Path, place: int) -> None:
    numbered = write(path, steps(2 * FEW + 1))
    # The process kills itself at its ``place``-th sync or rename, with SIGKILL.
    code = f"""
import os, signal, pathlib
from etrain_jupyter.log import segments
segments.EVENTS_PER_SEGMENT = {FEW}
left = {place}
def dying(whole):
    def call(*arguments):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*arguments)
    return call
os.fsync = dying(os.fsync)
pathlib.Path.rename = dying(pathlib.Path.rename)
segments.compact(pathlib.Path({str(path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL

    assert read_log(path) == numbered
    compact(path)
    assert read_log(path) == numbered
    assert len(list(segments_of(path).glob("0*.npz"))) == 2


def test_segment_is_renamed_only_after_it_is_synced_and_read_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, steps(FEW))
    happened: list[str] = []
    for owner, name in [(os, "fsync"), (Path, "rename"), (segments, "_reproduces")]:
        watch(monkeypatch, owner, name, happened)

    compact(path)

    # The log, whose lines must not be behind their copy; the copy; the folder; and the last look.
    assert happened == ["fsync", "fsync", "_reproduces", "rename", "fsync", "fsync"]


def watch(patch: pytest.MonkeyPatch, owner: Any, name: str, happened: list[str]) -> None:
    whole = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        happened.append(name)
        return whole(*arguments)

    patch.setattr(owner, name, call)


def test_segment_is_not_written_through_a_planted_link(path: Path, tmp_path: Path) -> None:
    # The folder may be another user's, if the run folder was replaced while its job was running.
    write(path, steps(FEW))
    precious = tmp_path / "precious"
    precious.write_text("text")
    folder = segments_of(path)
    folder.mkdir()
    (folder / f".000000000001-{FEW:012d}.{os.getpid()}.tmp").symlink_to(precious)

    assert compact(path) == 1

    assert precious.read_text() == "text"


def test_growing_log_is_compacted_once_per_segment() -> None:
    started: list[Path] = []
    compactor = Compactor(Path("run/events.jsonl"), started.append)
    for last_seq in (1, 19_999, 20_000, 20_001, 39_999, 40_000, 95_000, 99_999, 100_000):
        compactor.look(last_seq)
        compactor.join()

    assert len(started) == 4


def test_events_are_equal_to_a_list_of_the_same_events() -> None:
    numbered = [event.with_seq(i) for i, event in enumerate(steps(40), start=1)]

    assert Events(numbered) == numbered
    assert Events(numbered) != numbered[:-1]
    assert [item for item in runs_of(iter(numbered))] == numbered


def test_reader_sees_every_event_once_while_it_grows() -> None:
    kept = Events()
    seen: list[int] = []

    def grow() -> Iterator[None]:
        for n in range(1, 100):
            kept.extend([step(n, seq=n)])
            yield

    for _ in grow():
        seen = [event.seq for event in kept.copy()]
        assert seen == list(range(1, len(seen) + 1))
    assert len(seen) == 99
