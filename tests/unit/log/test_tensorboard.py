"""TensorBoard sees each step of a job once, whoever died meanwhile."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
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
    ExhibitStored,
    JobRestored,
    JobStatusChanged,
    JobSubmitted,
    StepCompleted,
)
from etrain_jupyter.log.exhibits import Table, digest_of, encode_table, exhibit_key, write_exhibit
from etrain_jupyter.log.loggers import process
from etrain_jupyter.log.tensorboard import code_block, convert, markdown_table
from tests.unit.log.pictures import png
from tests.unit.log.spent import made

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
plugins = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")


def step(number: int, loss: float = 0.5, **changes: Any) -> StepCompleted:
    values: dict[str, Any] = {
        **{"time": 100.0 + number, "generation": 1, "step": number, "loss": loss, "lr": 0.25},
        **{"world_size": 2, "samples_per_s": 10.0, "metrics": {"accuracy": 0.75}, "data_s": 0.125},
    }
    return made(StepCompleted, **values | changes)


def evaluation(number: int, loss: float) -> EvalCompleted:
    return EvalCompleted(
        **{"job_id": "job", "time": 100.5 + number, "step": number, "epoch": 0, "samples": 9},
        **{"loss": loss, "duration_s": 0.1, "metrics": {"f1": 0.5}},
    )


def restored(number: int) -> JobRestored:
    return JobRestored(job_id="job", time=200.0, generation=2, step=number, num_undone=2)


def status(name: str) -> JobStatusChanged:
    return JobStatusChanged(job_id="job", time=300.0, status=name)


def exhibit(path: Path, number: int, name: str, format: Any, data: bytes) -> ExhibitStored:
    """Write an exhibit next to the log ``path``, and return its event."""
    write_exhibit(path.parent, exhibit_key(step=number, name=name, format=format), data)
    return ExhibitStored(
        **{"job_id": "job", "time": 100.5 + number, "step": number, "name": name},
        **{"format": format, "size_bytes": len(data), "digest": digest_of(data)},
    )


def tensors(folder: Path, tag: str) -> list[tuple[int, list[bytes]]]:
    """Read a tag as the server of TensorBoard does, which converts images to tensors."""
    guidance = {"images": 0, "text": 0}
    reader = plugins.EventAccumulator(str(folder / "job"), tensor_size_guidance=guidance).Reload()
    return [(one.step, list(one.tensor_proto.string_val)) for one in reader.Tensors(tag)]


def texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    return [(number, value.decode()) for number, [value] in tensors(folder, tag)]


SUBMITTED = JobSubmitted(job_id="job", time=100.0, name="job", min_workers=1, max_workers=2)


def write(path: Path, *events: Event) -> None:
    log = EventLog(path, fsync_every_s=None)
    log.append([SUBMITTED, *events])
    log.close()


def reader_of(folder: Path) -> Any:
    return accumulator.EventAccumulator(
        str(folder / "job"), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    )


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


def test_exhibits_are_written_as_images_and_markdown(path: Path, folder: Path) -> None:
    rows = encode_table(Table(("name", "loss"), (("a", 0.5), ("b", None))))
    write(
        path,
        *(step(n) for n in range(1, 5)),
        exhibit(path, 2, "curve", "png", png(60, 40, shade=1)),
        exhibit(path, 4, "curve", "png", png(60, 40, shade=2)),
        exhibit(path, 4, "report", "text", b"f1  0.5\n  * b\n"),
        exhibit(path, 4, "worst", "table", rows),
    )

    convert(path, folder)

    assert tensors(folder, "figures/curve") == [
        (2, [b"60", b"40", png(60, 40, shade=1)]),
        (4, [b"60", b"40", png(60, 40, shade=2)]),
    ]
    assert texts(folder, "texts/report") == [(4, "    f1  0.5\n      * b\n    ")]
    table = "| name | loss |\n| --- | --- |\n| a | 0.5 |\n| b |  |"
    assert texts(folder, "tables/worst") == [(4, table)]
    reader = plugins.EventAccumulator(str(folder / "job")).Reload()
    assert reader.SummaryMetadata("figures/curve").plugin_data.plugin_name == "images"
    assert reader.SummaryMetadata("texts/report").plugin_data.plugin_name == "text"
    assert reader.SummaryMetadata("tables/worst").plugin_data.plugin_name == "text"
    assert reader.Tensors("tables/worst")[0].wall_time == 104.5


def test_markdown_displays_texts_and_cells_as_they_are() -> None:
    plugin_util = pytest.importorskip("tensorboard.plugin_util")
    hostile = "<img src=x onerror=alert(1)> a|b *c* `d` [e](f) \\ &amp; \x1b[2J\nnext"

    table = plugin_util.markdown_to_safe_html(markdown_table(Table((hostile,), ((hostile,),))))
    block = plugin_util.markdown_to_safe_html(code_block("  x <b>\n\n```\n  | *y*"))

    shown = html.unescape(re.sub(r"<[^>]*>", "", table)).split("\n")
    literal = hostile.replace("\x1b", "\\x1b").replace("\n", "\\n")
    assert [line for line in shown if line] == [literal, literal]
    assert "<img" not in table
    assert html.unescape(block) == "<pre><code>  x <b>\n\n```\n  | *y*\n</code></pre>"


def test_undone_removed_and_replaced_exhibits_are_not_written(path: Path, folder: Path) -> None:
    undone = exhibit(path, 4, "report", "text", b"undone")
    removed = exhibit(path, 2, "report", "text", b"removed")
    (path.parent / "exhibits/step_00000002/report.txt").unlink()
    repeated = exhibit(path, 4, "report", "text", b"repeated")
    steps = [step(n) for n in range(1, 5)]
    write(path, *steps, removed, undone, restored(2), *steps[2:], repeated)

    convert(path, folder)

    assert texts(folder, "texts/report") == [(4, "    repeated")]


def test_exhibits_of_steps_undone_by_a_restore_are_removed(path: Path, folder: Path) -> None:
    reports = [exhibit(path, n, "report", "text", b"fine") for n in (2, 4)]
    write(path, *(step(n) for n in range(1, 5)), *reports, restored(2))

    convert(path, folder)

    assert texts(folder, "texts/report") == [(2, "    fine")]


def test_event_files_have_a_limit_for_exhibits_and_say_what_is_left_out(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "MAX_EXHIBIT_BYTES", 10)
    reports = [exhibit(path, n, "report", "text", b"1234567") for n in range(1, 5)]
    write(path, *reports)

    convert(path, folder)

    assert [number for number, _ in texts(folder, "texts/report")] == [1, 2]
    [(number, note)] = texts(folder, "texts/etrain-note")
    assert number == 2
    assert note.startswith("The event files contain 14 bytes")
    assert "after step 2 are left out" in note


def test_files_of_other_writers_are_kept(path: Path, folder: Path) -> None:
    mine = folder / "job"
    mine.mkdir(parents=True)
    (mine / "events.out.tfevents.1.theirs").write_bytes(b"")
    write(path, step(1))

    for _ in range(4):
        convert(path, folder)

    assert (mine / "events.out.tfevents.1.theirs").exists()
    # The newest one and the one before it, which somebody may be reading.
    assert len(list(mine.iterdir())) == 3
    assert points(folder) == [(1, 0.5)]


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
    log.append([SUBMITTED, *(step(n) for n in range(1, 8))])
    options = {"folder": str(folder)}
    command = [sys.executable, "-m", process.__name__, "tensorboard", str(path), str(os.getpid())]
    with subprocess.Popen([*command, "5"], stdin=subprocess.PIPE, text=True) as first:
        assert first.stdin is not None
        first.stdin.write(json.dumps(options))
        first.stdin.close()
        (folder / "job").mkdir(parents=True, exist_ok=True)
        onlooker = reader_of(folder)
        assert wait_for_points(onlooker, 7) == [(n, 0.5) for n in range(1, 8)]
        first.send_signal(signal.SIGKILL)
    log.append([step(8), restored(5), step(6, loss=0.25), step(7, loss=0.25), status("finished")])
    failures: list[str] = []

    process.follow_elsewhere("tensorboard", options, path, failures.append).join(60)

    log.close()
    expected = [*((n, 0.5) for n in range(1, 6)), (6, 0.25), (7, 0.25)]
    assert failures == []
    assert points(folder) == expected
    assert points_of(onlooker) == expected


def test_error_names_the_missing_package_and_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensorboard.require_tensorboard()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="tensorboard, which is not installed") as caught:
        tensorboard.require_tensorboard()
    assert "pip install 'etrain-jupyter[tensorboard]'" in str(caught.value.hint)
