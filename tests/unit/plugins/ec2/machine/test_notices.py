"""The watch tells of each notice once, whatever the metadata service does meanwhile."""

from __future__ import annotations

import queue
import time

import pytest

from etrain_jupyter.plugins.ec2.machine.imds import Imds, NoticeWatch
from etrain_jupyter.plugins.ec2.simulator.imds import ImdsServer
from etrain_jupyter.wire.messages import INTERRUPTION, REBALANCE

PATIENCE_S = 60.0


class Watched:
    """A watch, and what it has told."""

    def __init__(self, server: ImdsServer) -> None:
        self.server = server
        self.told: queue.Queue = queue.Queue()
        self.watch = NoticeWatch(Imds(server.url, timeout_s=0.2), self.told.put, poll_s=0.01)
        self.watch.start()

    def next(self):
        return self.told.get(timeout=PATIENCE_S)

    def looks_again(self) -> None:
        """Return after the watch has looked at both paths once more at least."""
        seen = len(self.server.requests())
        deadline = time.monotonic() + PATIENCE_S
        while len(self.server.requests()) < seen + 4:
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def watched():
    with ImdsServer() as server:
        found = Watched(server)
        yield found
        found.watch.stop()
        assert not found.watch._thread.is_alive()


def test_rebalance_and_interruption_are_reported_once_each(watched):
    watched.server.recommend_rebalance()
    assert watched.next().kind == REBALANCE
    at = time.time() + 100
    watched.server.interrupt(at)
    notice = watched.next()
    assert notice.kind == INTERRUPTION
    assert notice.deadline == pytest.approx(at, abs=3.0)
    watched.looks_again()
    assert watched.told.empty()


def test_changed_deadline_is_reported_again(watched):
    watched.server.interrupt(time.time() + 100)
    watched.next()
    sooner = time.time() + 50
    watched.server.interrupt(sooner)
    assert watched.next().deadline == pytest.approx(sooner, abs=3.0)


@pytest.mark.parametrize("how", ["500", "hang", "expired"])
def test_failing_metadata_service_only_delays_the_notice(watched, how):
    watched.looks_again()
    watched.server.break_(how)
    watched.server.interrupt(time.time() + 100)
    # As long as it fails nothing can be told, and the watch goes on.
    with pytest.raises(queue.Empty):
        watched.told.get(timeout=0.5)
    watched.server.break_("")
    assert watched.next().kind == INTERRUPTION


def test_expired_tokens_are_renewed(watched):
    watched.looks_again()
    watched.server.expire_tokens()
    watched.server.recommend_rebalance()
    assert watched.next().kind == REBALANCE


@pytest.mark.parametrize("text", ["", "<html>", "[]", '{"action": "terminate"}', '{"time": "x"}'])
def test_malformed_response_is_ignored_and_does_not_hide_a_later_notice(watched, text):
    watched.server.set("meta-data/spot/instance-action", text)
    watched.looks_again()
    assert watched.told.empty()
    watched.server.interrupt(time.time() + 100)
    assert watched.next().kind == INTERRUPTION


def test_malformed_response_of_one_path_does_not_hide_the_other(watched):
    watched.server.set("meta-data/spot/instance-action", "nonsense")
    watched.server.recommend_rebalance()
    assert watched.next().kind == REBALANCE


def test_exception_in_the_callback_does_not_end_the_watch():
    told: queue.Queue = queue.Queue()

    def take(notice):
        told.put(notice)
        raise RuntimeError("no time")

    with ImdsServer() as server:
        watch = NoticeWatch(Imds(server.url), take, poll_s=0.01)
        watch.start()
        server.interrupt(time.time() + 100)
        assert told.get(timeout=PATIENCE_S).kind == INTERRUPTION
        server.recommend_rebalance()
        assert told.get(timeout=PATIENCE_S).kind == REBALANCE
        watch.stop()


def test_notices_can_be_polled_immediately():
    told: queue.Queue = queue.Queue()
    with ImdsServer() as server:
        watch = NoticeWatch(Imds(server.url), told.put, poll_s=1000.0)
        watch.poll_now()
        assert told.empty()
        server.interrupt(time.time() + 100)
        watch.poll_now()
        assert told.get_nowait().kind == INTERRUPTION


def test_clock_of_this_machine_does_not_move_the_deadline(monkeypatch):
    told: queue.Queue = queue.Queue()
    real = time.time
    with ImdsServer() as server:
        server.interrupt(real() + 100)
        # The service's pages and its Date header are of the same process here, so that only the
        # watch's own clock may be shifted: it reads it to turn what is left into an instant.
        from etrain_jupyter.plugins.ec2.machine import imds
        from etrain_jupyter.worker import preemption_watch

        class Clock:
            monotonic = staticmethod(time.monotonic)

            @staticmethod
            def time() -> float:
                return real() + 5000

        monkeypatch.setattr(imds, "time", Clock)
        monkeypatch.setattr(preemption_watch, "time", Clock)
        watch = NoticeWatch(Imds(server.url), told.put, poll_s=0.01)
        watch.start()
        notice = told.get(timeout=PATIENCE_S)
        watch.stop()
        assert notice.left_s() == pytest.approx(100, abs=5.0)
        assert notice.deadline > real() + 4000
