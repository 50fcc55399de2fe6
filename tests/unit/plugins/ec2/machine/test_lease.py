"""Rules for losing a lease; no failing check may keep a machine on."""

from __future__ import annotations

import json
import math
import queue
from typing import Any

import pytest

from etrain_jupyter.errors import StoreError
from etrain_jupyter.plugins.ec2.machine import lease as module
from etrain_jupyter.plugins.ec2.machine.lease import LeaseRule, LeaseWatch
from etrain_jupyter.storage.objects.s3_bucket import AgedObject

PATIENCE_S = 60.0


def outcomes(*looks: tuple[float | None, float]) -> list[str]:
    rule = LeaseRule(ttl_s=60.0, grace_s=10.0, now=0.0)
    return [rule.take(age_s, now, "S3 is gone") for age_s, now in looks]


def test_renewed_lease_stays_valid():
    assert set(outcomes(*((now % 15, float(now)) for now in range(1000)))) == {""}


def test_one_stale_check_does_not_lose_the_lease():
    assert outcomes((61.0, 5.0), (2.0, 15.0), (61.0, 25.0)) == ["", "", ""]


def test_two_stale_checks_in_a_row_must_be_a_grace_period_apart():
    assert outcomes((61.0, 5.0), (63.0, 7.0)) == ["", ""]
    assert outcomes((61.0, 5.0), (72.0, 16.0))[1] == "the lease is 72 s old; it is valid for 60 s"


def test_deleted_lease_is_lost_as_soon():
    told = outcomes((5.0, 5.0), (math.inf, 10.0), (math.inf, 20.0))
    assert told == ["", "", "there is no lease; it is valid for 60 s"]


def test_s3_may_be_unreachable_for_as_long_as_the_lease_is_valid():
    told = outcomes((5.0, 10.0), *((None, float(now)) for now in (30, 69, 75, 86)))
    words = "the lease could not be read for 76 s (S3 is gone); it is valid for 60 s"
    assert told == ["", "", "", "", words]


def test_answer_from_s3_resets_the_timeout():
    assert outcomes((5.0, 10.0), (None, 75.0), (20.0, 80.0), (None, 130.0))[-1] == ""


class Store:
    """Returns a test's answers in order, then the last one forever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def get_aged(self, name: str, what: str) -> AgedObject | None:
        assert name == "lease.json"
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def found(age_s: float, scheduler: str = "tls://a:1", num_lives: int = 1) -> AgedObject:
    told = {"scheduler": scheduler, "num_lives": num_lives, "renewals": 7}
    return AgedObject(data=json.dumps(told).encode(), age_s=age_s)


class Watched:
    def __init__(self, *answers: Any, ttl_s: float = 0.05) -> None:
        self.news: queue.Queue[Any] = queue.Queue()
        self.lost: queue.Queue[str] = queue.Queue()
        store: Any = Store(*answers)
        self.watch = LeaseWatch(
            store, ttl_s=ttl_s, check_s=0.01, on_change=self.news.put, on_lost=self.lost.put
        )
        self.watch.start()

    def lost_by(self) -> str:
        why = self.lost.get(timeout=PATIENCE_S)
        self.watch._thread.join(PATIENCE_S)
        return why


def test_change_of_the_scheduler_is_reported_once():
    watched = Watched(found(0.0), found(0.0), found(0.0, "tls://b:2", 2), found(9.0))
    watched.lost_by()
    told = [watched.news.get_nowait() for _ in range(watched.news.qsize())]
    assert told == [
        {"scheduler": "tls://a:1", "num_lives": 1},
        {"scheduler": "tls://b:2", "num_lives": 2},
        {"scheduler": "tls://a:1", "num_lives": 1},
    ]


@pytest.mark.parametrize(
    "answer",
    [
        StoreError("no route"),
        RuntimeError("a bug"),
        AgedObject(data=b"{}", age_s=9.0),
        AgedObject(data=b"nonsense", age_s=9.0),
    ],
    ids=["out of reach", "bug", "incomplete", "nonsense"],
)
def test_lease_is_lost_in_the_end_if_every_check_fails(answer, caplog):
    assert "it is valid for 0.05 s" in Watched(answer).lost_by()
    assert caplog.text.count("the lease:") == 1


def test_stuck_check_is_detected(monkeypatch):
    watch = LeaseWatch(
        Store(None), ttl_s=60.0, check_s=10.0, on_change=lambda _: None, on_lost=lambda _: None
    )
    assert watch.stuck_s() == 0.0
    watch._checked_at -= 60.0 + 10.0 + module.STUCK_S - 5.0
    assert watch.stuck_s() == 0.0
    watch._checked_at -= 10.0
    assert watch.stuck_s() > 0.0
