"""TensorBoard sees each step of a job once, whoever died meanwhile."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.log import tensorboard
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import (
    EvalCompleted,
    EvalScored,
    Event,
    JobRestored,
    JobStatusChanged,
    StepCompleted,
)
from etrain_jupyter.log.tensorboard import convert, follow, follow_elsewhere

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def step(number: int, loss: float = 0.5, **changes: Any) -> StepCompleted:
    values: dict[str, Any] = {
        **{"job_id": "job", "time": 100.0 + number, "generation": 1, "step": number, "epoch": 0},
        **{"first": 0, "samples": 32, "sample_checksum": 7, "loss": loss, "lr": 0.25},
        **{"world_size": 2, "samples_per_s": 10.0, "metrics": {"accuracy": 0.75}, "data_s": 0.125},
    }
    return StepCompleted(**values | changes)


def evaluation(number: int, loss: float) -> EvalCompleted:
    return EvalCompleted(
        **{"job_id": "job", "time": 100.5 + number, "step": number, "epoch": 0, "samples": 9},
        **{"loss": loss, "duration_s": 0.1, "metrics": {"f1": 0.5}},
    )


def restored(number: int) -> JobRestored:
    return JobRestored(job_id="job", time=200.0, generation=2, step=number, num_undone=2)


def status(name: str) -> JobStatusChanged:
    return JobStatusChanged(job_id="job", time=300.0, status=name)


def write(path: Path, *events: Event) -> None:
    log = EventLog(path, fsync_every_s=None)
    log.append(events)
    log.close()


def reader_of(folder: Path) -> Any:
    return accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})


def points(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    return points_of(reader_of(folder), tag)


def points_of(reader: Any, tag: str = "train/loss") -> list[tuple[int, float]]:
    reader.Reload()
    if tag not in reader.Tags()["scalars"]:
        return []
    return [(point.step, point.value) for point in reader.Scalars(tag)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "board"


def test_all_values_of_a_step_and_an_evaluation_are_written(path: Path, folder: Path) -> None:
    scored = EvalScored(
        **{"job_id": "job", "time": 102.0, "step": 1, "samples": 9, "duration_s": 0.5},
        scores={"map": 0.125},
    )
    write(path, step(1), evaluation(1, 0.25), scored)

    convert(path, folder)

    reader = reader_of(folder).Reload()
    values = {tag: reader.Scalars(tag)[0].value for tag in reader.Tags()["scalars"]}
    assert values == {
        **{"train/loss": 0.5, "train/lr": 0.25, "train/accuracy": 0.75},
        **{"throughput/samples_per_s": 10.0, "workers/world_size": 2.0},
        **{"time/data_s": 0.125, "time/compute_s": 0, "time/communication_s": 0},
        **{"time/optimizer_s": 0, "eval/loss": 0.25, "eval/f1": 0.5},
        "eval/map": 0.125,
    }
    assert reader.Scalars("train/loss")[0].wall_time == 101.0


def test_steps_repeated_after_a_restore_appear_once(path: Path, folder: Path) -> None:
    before = [*(step(n) for n in range(1, 6)), evaluation(2, 0.5), evaluation(4, 0.5)]
    again = [*(step(n, loss=0.25) for n in range(3, 7)), evaluation(4, 0.125)]
    write(path, *before, restored(2), *again)

    convert(path, folder)

    assert points(folder) == [(1, 0.5), (2, 0.5), *((n, 0.25) for n in range(3, 7))]
    assert points(folder, "eval/loss") == [(2, 0.5), (4, 0.125)]


def test_steps_undone_by_a_restore_are_removed(path: Path, folder: Path) -> None:
    write(path, *(step(n) for n in range(1, 6)), restored(2))

    convert(path, folder)

    assert points(folder) == [(1, 0.5), (2, 0.5)]


def test_step_committed_again_replaces_all_later_steps(path: Path, folder: Path) -> None:
    write(path, step(1), step(2), step(3), step(2, loss=0.25))

    convert(path, folder)

    assert points(folder) == [(1, 0.5), (2, 0.25)]


def test_files_of_other_writers_are_kept(path: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "events.out.tfevents.1.theirs").write_bytes(b"")
    write(path, step(1))

    for _ in range(4):
        convert(path, folder)

    assert (folder / "events.out.tfevents.1.theirs").exists()
    # The newest one and the one before it, which somebody may be reading.
    assert len(list(folder.iterdir())) == 3
    assert points(folder) == [(1, 0.5)]


def test_follower_ends_with_the_job(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "LINGER_S", 0.0)
    monkeypatch.setattr(tensorboard, "POLL_S", 0.01)
    log = EventLog(path)
    thread = threading.Thread(target=follow, args=(path, folder, lambda: True))
    thread.start()
    for n in range(1, 50):
        log.append([step(n)])
    log.append([status("finished")])
    thread.join(60)
    log.close()

    assert not thread.is_alive()
    assert points(folder) == [(n, 0.5) for n in range(1, 50)]


def wait_for_points(reader: Any, number: int) -> list[tuple[int, float]]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = points_of(reader)
        if len(found) >= number:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{len(found)} of {number} points came")


def test_writer_that_is_killed_is_replaced_without_gaps_or_repeats(
    path: Path, folder: Path
) -> None:
    log = EventLog(path)
    log.append([step(n) for n in range(1, 8)])
    command = [sys.executable, "-m", "etrain_jupyter.log.tensorboard", str(path), str(folder)]
    with subprocess.Popen([*command, str(os.getpid())]) as first:
        onlooker = reader_of(folder)
        folder.mkdir(exist_ok=True)
        assert wait_for_points(onlooker, 7) == [(n, 0.5) for n in range(1, 8)]
        first.send_signal(signal.SIGKILL)
    log.append([step(8), restored(5), step(6, loss=0.25), step(7, loss=0.25), status("finished")])
    failures: list[str] = []

    follow_elsewhere(path, folder, failures.append).join(60)

    log.close()
    expected = [*((n, 0.5) for n in range(1, 6)), (6, 0.25), (7, 0.25)]
    assert failures == []
    assert points(folder) == expected
    assert points_of(onlooker) == expected


def test_writer_ends_with_its_coordinator(path: Path, folder: Path) -> None:
    write(path, step(1))
    command = [sys.executable, "-m", "etrain_jupyter.log.tensorboard", str(path), str(folder)]

    # Its parent is this process and not the one that it is told.
    subprocess.run([*command, "1"], check=True, timeout=60)

    assert points(folder) == [(1, 0.5)]


def test_failing_writer_reports_the_reason(path: Path, tmp_path: Path) -> None:
    write(path, step(1))
    (tmp_path / "board").write_text("a file")
    failures: list[str] = []

    follow_elsewhere(path, tmp_path / "board", failures.append).join(60)

    assert len(failures) == 1
    assert "FileExistsError" in failures[0]


def test_error_names_the_missing_package_and_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensorboard.require_tensorboard()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="tensorboard, which is not installed") as caught:
        tensorboard.require_tensorboard()
    assert "pip install 'etrain-jupyter[tensorboard]'" in str(caught.value.hint)
