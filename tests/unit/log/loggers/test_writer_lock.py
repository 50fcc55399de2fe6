"""One process at a time writes a job to a logger."""

from __future__ import annotations

import threading
from pathlib import Path

from etrain_jupyter.log.loggers.writer_lock import writer_lock


def test_second_writer_waits_for_the_first_one(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    is_waiting, results = threading.Event(), list[bool]()

    def is_wanted() -> bool:
        is_waiting.set()
        return True

    def write() -> None:
        with writer_lock(log, "mlflow", is_wanted) as is_locked:
            results.append(is_locked)

    with writer_lock(log, "mlflow", lambda: False) as is_locked:
        assert is_locked
        thread = threading.Thread(target=write)
        thread.start()
        assert is_waiting.wait(60)
        assert results == []
    thread.join(60)

    assert results == [True]


def test_writer_that_is_not_wanted_any_more_stops_waiting(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"

    with (
        writer_lock(log, "mlflow", lambda: False) as first,
        writer_lock(log, "mlflow", lambda: False) as second,
        writer_lock(log, "wandb", lambda: False) as other,
    ):
        assert (first, second, other) == (True, False, True)


def test_name_of_a_logger_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    with writer_lock(folder / "events.jsonl", "../../other", lambda: False) as is_locked:
        assert is_locked

    assert [path.name for path in folder.iterdir()] == [".logger-.._.._other.lock"]


def test_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / ".logger-mlflow.lock").symlink_to(target)

    with writer_lock(tmp_path / "events.jsonl", "mlflow", lambda: False) as is_locked:
        assert is_locked  # without a lock, as in a folder that cannot be written

    assert not target.exists()
