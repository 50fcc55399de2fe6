"""The roster finds workers by the address of their messages, and fences those that time out."""

from __future__ import annotations

import pytest

from etrain_jupyter.head.coordinator.roster import WorkerFacts, WorkerRoster


def worker(name: str, address: str, incarnation: int = 0) -> WorkerFacts:
    return WorkerFacts(name=name, address=address, device="cpu", pid=1, incarnation=incarnation)


@pytest.fixture
def roster() -> WorkerRoster:
    roster = WorkerRoster(silence_s=5.0, tick_s=0.25)
    for number in range(3):
        roster.greet(worker(f"w{number}", f"tls://10.0.0.{number}"), now=0.0)
    return roster


def test_message_is_from_the_worker_at_its_address(roster: WorkerRoster) -> None:
    found = roster.hear("tls://10.0.0.1", now=1.0)

    assert found is roster.get("w1")
    assert roster.hear("tls://10.0.0.9", now=1.0) is None


def test_worker_with_a_new_address_is_not_found_by_the_old_one(roster: WorkerRoster) -> None:
    roster.greet(worker("w1", "tls://10.0.0.8"), now=1.0)

    assert roster.hear("tls://10.0.0.1", now=2.0) is None
    assert roster.remove("tls://10.0.0.1") is None
    assert roster.hear("tls://10.0.0.8", now=2.0) is roster.get("w1")
    assert len(roster) == 3


def test_removed_worker_is_found_neither_by_name_nor_by_address(roster: WorkerRoster) -> None:
    removed = roster.remove("tls://10.0.0.2")

    assert removed is not None
    assert removed.name == "w2"
    assert "w2" not in roster
    assert roster.hear("tls://10.0.0.2", now=1.0) is None


def test_silent_worker_is_fenced_until_its_next_incarnation(roster: WorkerRoster) -> None:
    for tenth in range(1, 61):
        now = tenth / 10
        roster.tick(now)
        for address in ("tls://10.0.0.0", "tls://10.0.0.2"):
            roster.hear(address, now)

    [(evicted, silence_s)] = roster.evict_silent(6.0)

    assert evicted.name == "w1"
    assert silence_s >= 5.0
    assert roster.hear("tls://10.0.0.1", now=6.1) is None
    assert not roster.greet(worker("w1", "tls://10.0.0.1"), now=6.2)
    assert roster.greet(worker("w1", "tls://10.0.0.1", incarnation=1), now=6.3)
    assert roster.hear("tls://10.0.0.1", now=6.4) is roster.get("w1")
