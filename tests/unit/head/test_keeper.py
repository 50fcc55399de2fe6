"""When the keeper restarts a dead scheduler, and when it gives up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etrain_jupyter.head import keeper
from etrain_jupyter.head.keeper import Keeper, Restarts
from etrain_jupyter.process.cluster_dir import START_FAILED, ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings


class Children:
    """Child processes that exit with the codes of the test."""

    def __init__(self, codes: list[int | None], before_end: Callable[[], None]) -> None:
        self._codes = iter(codes)
        self._before_end = before_end
        self.is_stop_requested = False
        self.pauses: list[float] = []
        self.ended: list[int] = []

    def wait_for(self, pid: int) -> int | None:
        self._before_end()
        code = next(self._codes)
        self.is_stop_requested = code is None
        return code

    def wait_for_stopped(self, pid: int, *, timeout_s: float) -> int | None:
        self.ended.append(pid)
        return 0

    def pause(self, duration_s: float) -> None:
        self.pauses.append(duration_s)


class Bench:
    def __init__(self, tmp_path: Path, codes: list[int | None], *, serves: bool = True) -> None:
        self.cluster = ClusterDir.create(tmp_path, ClusterSettings())
        self.started: list[tuple[int, float]] = []
        self.children = Children(codes, self._publish if serves else lambda: None)
        self.keeper = Keeper(
            self.cluster, self._start, children=self.children, restarts=Restarts(max_deaths=4)
        )

    def _publish(self) -> None:
        self.cluster.publish("tls://127.0.0.1:1")

    def _start(self, incarnation: int, died_at: float) -> int:
        self.started.append((incarnation, died_at))
        return 1000 + incarnation


def test_dead_scheduler_is_restarted_with_back_off(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [-signal.SIGKILL, 1, -signal.SIGSEGV, 0])

    assert bench.keeper.run()

    assert [incarnation for incarnation, _ in bench.started] == [1, 2, 3, 4]
    assert bench.children.pauses == [0.0, 0.5, 1.0]
    assert bench.started[0][1] == 0.0
    assert 0 < bench.started[1][1] <= time.time()


def test_keeper_gives_up_on_a_scheduler_that_keeps_dying(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, [-9, -9, -9, -9])

    assert not bench.keeper.run()

    assert len(bench.started) == 4
    assert "Giving up on cluster" in caplog.messages[-1]
    assert "Its jobs can be resumed" in caplog.messages[-1]


def test_deaths_outside_the_time_window_do_not_count() -> None:
    restarts = Restarts(max_deaths=3, within_s=60.0)

    assert [restarts.after_death(now) for now in (0.0, 10.0, 71.0, 72.0, 73.0)] == [
        *(0.0, 0.5),
        *(0.0, 0.5),
        None,
    ]


def test_scheduler_that_never_listened_is_not_restarted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [START_FAILED], serves=False)

    assert not bench.keeper.run()

    assert len(bench.started) == 1


def test_scheduler_that_dies_while_shutting_down_is_not_restarted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [-signal.SIGKILL], serves=False)

    assert bench.keeper.run()

    assert len(bench.started) == 1


def test_sigterm_is_forwarded_to_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(keeper.os, "kill", lambda pid, number: sent.append((pid, number)))
    bench = Bench(tmp_path, [None])

    assert bench.keeper.run()

    assert sent == [(1001, signal.SIGTERM)]
    assert bench.children.ended == [1001]


def test_failed_fork_of_a_restart_is_retried(tmp_path: Path) -> None:
    """One failed fork used to end the keeper, and all jobs with it."""
    bench = Bench(tmp_path, [-signal.SIGKILL, 0])
    start, refusals = bench.keeper._start, [OSError(11, "Resource temporarily unavailable")]

    def start_sometimes(incarnation: int, died_at: float) -> int:
        if incarnation == 2 and refusals:
            raise refusals.pop()
        return start(incarnation, died_at)

    bench.keeper._start = start_sometimes
    assert bench.keeper.run()
    assert [incarnation for incarnation, _ in bench.started] == [1, 3]
    assert bench.children.pauses == [0.0, 0.5]
