"""The rendezvous store, without processes."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from etrain_jupyter.ranks.process_group import BroadcastStore, CommunicationError, RankGroup


def test_key_that_another_rank_sets_wakes_the_waiter():
    told = []
    first = BroadcastStore(lambda key, value: told.append((key, value)))
    second = BroadcastStore(lambda key, value: None)
    reader = threading.Thread(target=lambda: told.append(second.get("a")))
    reader.start()
    first.set("a", "1")
    assert told[0] == ("a", b"1")
    second.put(*told[0])
    reader.join(5)
    assert told[1] == b"1"
    assert first.check(["a"])
    assert not first.check(["a", "b"])


def test_abort_ends_a_wait_with_a_reason():
    store = BroadcastStore(lambda key, value: None)
    threading.Timer(0.05, store.abort).start()
    with pytest.raises(CommunicationError, match=r"no value for \['x'\].*aborted"):
        store.get("x")


def test_wait_ends_when_its_time_is_over():
    store = BroadcastStore(lambda key, value: None)
    with pytest.raises(CommunicationError, match="time is over"):
        store.wait(["x"], timedelta(seconds=0.01))


def test_aborted_generation_forms_no_more():
    store = BroadcastStore(lambda key, value: None)
    group = RankGroup(generation=1, rank=0, world_size=2, store=store, host="127.0.0.1")
    group.abort("a peer is lost")
    with pytest.raises(CommunicationError, match="a peer is lost"):
        group.form()
    group.close()
