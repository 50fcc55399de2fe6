"""``eval.score`` in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.bundle.capture import capture_bundle, write_bundle
from etrain_jupyter.bundle.restore import OpenBundle, open_bundle
from etrain_jupyter.trainer.scoring.exhibits import Exhibit
from etrain_jupyter.trainer.scoring.records import pack_records
from etrain_jupyter.trainer.scoring.score_process import (
    ProcessScorer,
    ScoreError,
    ScoreProcess,
    SendExhibit,
)
from etrain_jupyter.trainer.scoring.spool import RecordFile


def bundle_of(folder: Path, score: Callable[[Any], Any]) -> OpenBundle:
    path = folder / "bundle"
    write_bundle(path, capture_bundle({"eval.score": "score"}, {"score": score}))
    bundle = open_bundle(path)
    path.unlink()  # as on a worker, where the file may be removed once it is open
    return bundle


def start(bundle: OpenBundle, send: SendExhibit = lambda exhibit: None) -> ScoreProcess:
    parts = [pack_records([1, 2, 3], range(3)), pack_records([4], range(3, 4))]
    records = RecordFile(sum(map(len, parts)), 4)
    for part in parts:
        records.append(memoryview(part))
    process = ProcessScorer(bundle.fileno()).start(records, send)
    records.close()  # the process has a descriptor of its own
    assert isinstance(process, ScoreProcess)
    return process


def result(process: ScoreProcess) -> dict[str, float]:
    while (found := process.poll()) is None:
        time.sleep(0.01)
    return found


def test_score_gets_the_records_in_order(tmp_path: Path) -> None:
    def score(records: list[int]) -> dict[str, float]:
        return {"number": float("".join(map(str, records))), "len": len(records)}

    process = start(bundle_of(tmp_path, score))

    assert result(process) == {"number": 1234.0, "len": 4.0}
    assert process.poll() == {"number": 1234.0, "len": 4.0}


def test_exhibits_are_sent_before_the_scores_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="platform: matplotlib is not installed")
    # As in a kernel, whose pool inherits it.
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")

    def score(records: list[int]) -> dict[str, Any]:
        from matplotlib import get_backend, pyplot

        figure, axes = pyplot.subplots(figsize=(1, 1))
        axes.plot(records)
        return {"mean": 2.5, "curve": figure, "backend": get_backend().lower()}

    sent: list[Exhibit] = []
    assert result(start(bundle_of(tmp_path, score), sent.append)) == {"mean": 2.5}
    curve, backend = sent
    assert (curve.name, curve.format, curve.data[:4]) == ("curve", "png", b"\x89PNG")
    assert backend == Exhibit("backend", "text", b"agg")


def test_exception_comes_with_the_users_line(tmp_path: Path) -> None:
    def score(records: list[int]) -> dict[str, float]:
        return {"f1": 1 / (len(records) - 4)}

    with pytest.raises(ScoreError, match="raised ZeroDivisionError") as caught:
        result(start(bundle_of(tmp_path, score)))

    assert 'return {"f1": 1 / (len(records) - 4)}' in caught.value.user_traceback


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os._exit(3)", "exited with status 3"),
        ("os._exit(0)", "exited with status 0"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL.*memory runs out"),
    ],
)
def test_crash_is_named(tmp_path: Path, code: str, message: str) -> None:
    def score(records: list[int]) -> dict[str, float]:
        exec(code, {"os": os})
        return {}

    with pytest.raises(ScoreError, match=f"eval.score crashed: the process that ran it {message}"):
        result(start(bundle_of(tmp_path, score)))


def test_stop_kills_the_process_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def score(records: list[int]) -> dict[str, float]:
        child = os.fork()
        if child:
            pids.write_text(f"{os.getpid()} {child} .")
        while True:
            time.sleep(1)

    process = start(bundle_of(tmp_path, score))
    while not (pids.exists() and pids.read_text().endswith(".")):
        time.sleep(0.01)
    process.stop()

    for pid in map(int, pids.read_text().split()[:2]):
        while is_running(pid):
            time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state != "Z"


def test_process_ends_with_the_trainer(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def score(records: list[int]) -> dict[str, float]:
        pid_file.write_text(f"{os.getpid()} .")
        while True:
            time.sleep(1)

    bundle = bundle_of(tmp_path, score)
    trainer = os.fork()
    if not trainer:
        try:
            start(bundle)
            time.sleep(3600)
        finally:
            os._exit(1)
    while not (pid_file.exists() and pid_file.read_text().endswith(".")):
        time.sleep(0.01)
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)

    while is_running(int(pid_file.read_text().split()[0])):
        time.sleep(0.01)


def test_poll_does_not_wait_for_an_exhibit_that_is_being_sent(tmp_path: Path) -> None:
    def score(records: list[int]) -> dict[str, Any]:
        return {"mean": 2.5, "report": "a report"}

    is_sending, may_end = threading.Event(), threading.Event()

    def send(exhibit: Exhibit) -> None:
        is_sending.set()
        may_end.wait()

    process = start(bundle_of(tmp_path, score), send)
    is_sending.wait()
    assert process.poll() is None
    may_end.set()
    assert result(process) == {"mean": 2.5}


def test_exhibits_are_not_sent_after_stop(tmp_path: Path) -> None:
    def score(records: list[int]) -> dict[str, Any]:
        return {"mean": 2.5, "first": "a", "second": "b"}

    sent: list[str] = []

    def send(exhibit: Exhibit) -> None:
        sent.append(exhibit.name)
        while not process.is_stopped:
            time.sleep(0.001)

    process = start(bundle_of(tmp_path, score), send)
    while not sent:
        time.sleep(0.001)
    process.stop()
    assert sent == ["first"]
