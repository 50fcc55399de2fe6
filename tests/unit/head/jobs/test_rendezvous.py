"""Values that all ranks of a generation publish are collected, and sent in rank order."""

from __future__ import annotations

from etrain_jupyter.head.jobs.rendezvous import Rendezvous
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.rank_values import unpack_values

RANKS = ("b", "a", "c")


def key(trainer: str, value: bytes, *, topic: str = "0", generation: int = 1) -> m.RankKey:
    return m.RankKey(trainer=trainer, generation=generation, topic=topic, value=value)


def test_values_are_sent_in_rank_order_once_the_last_has_arrived():
    rendezvous = Rendezvous()
    assert rendezvous.take(key("a", b"1"), RANKS) is None
    assert rendezvous.take(key("a", b"1"), RANKS) is None  # resent to a new scheduler
    assert rendezvous.take(key("c", b"2"), RANKS) is None
    assert rendezvous.take(key("b", b"", topic="connections"), RANKS) is None
    keys = rendezvous.take(key("b", b"0"), RANKS)
    assert keys is not None
    assert (keys.topic, keys.generation, keys.trainer) == ("0", 1, "")
    assert unpack_values(keys.values) == [b"0", b"1", b"2"]


def test_values_of_an_aborted_generation_are_forgotten():
    rendezvous = Rendezvous()
    for trainer in RANKS[:2]:
        assert rendezvous.take(key(trainer, b"old"), RANKS) is None
    assert rendezvous.take(key("c", b"2", generation=2), RANKS) is None
    assert rendezvous.take(key("b", b"0", generation=2), RANKS) is None
    keys = rendezvous.take(key("a", b"1", generation=2), RANKS)
    assert keys is not None
    assert unpack_values(keys.values) == [b"0", b"1", b"2"]
