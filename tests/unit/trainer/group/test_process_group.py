"""Rendezvous store and lifecycle of a group, without processes."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from etrain_jupyter.trainer.group.process_group import BroadcastStore, CommunicationError, RankGroup
from tests.unit.trainer.peers import (
    HOST,
    Peer,
    connected,
    linked_stores,
)


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


def test_wait_times_out():
    store = BroadcastStore(lambda key, value: None)
    with pytest.raises(CommunicationError, match="timed out"):
        store.wait(["x"], timedelta(seconds=0.01))


def test_aborted_generation_cannot_form():
    store = BroadcastStore(lambda key, value: None)
    group = RankGroup(generation=1, rank=0, world_size=2, store=store, host="127.0.0.1")
    group.abort("a peer is lost")
    with pytest.raises(CommunicationError, match="a peer is lost"):
        group.form()
    group.close()


def forming_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "etrain-form"]


def test_abort_ends_the_wait_for_a_rank_that_never_connects_and_its_thread():
    store = BroadcastStore(lambda key, value: None)
    group = RankGroup(generation=1, rank=0, world_size=2, store=store, host=HOST)
    threading.Timer(0.1, group.abort, ["rank 1 is lost"]).start()
    with pytest.raises(CommunicationError, match="rank 1 is lost"):
        group.form()
    for thread in forming_threads():
        thread.join(10)
    assert forming_threads() == []
    group.close()
    assert not dist.is_initialized()


def test_rank_that_dies_while_it_connects_fails_the_others_at_the_abort():
    mine, its = linked_stores()
    group = RankGroup(generation=1, rank=0, world_size=2, store=mine, host=HOST)
    published = threading.Event()
    put = mine.put

    def put_and_die(key: str, value: bytes) -> None:
        """Publish the address of a rank that no longer accepts connections."""
        put(key, value)
        if not published.is_set():
            published.set()
            threading.Thread(target=group.abort, args=["rank 1 died"]).start()

    mine.put = put_and_die
    peer = Peer(its)
    connecting = threading.Thread(target=peer.connect)
    connecting.start()
    with pytest.raises(CommunicationError, match="rank 1 died"):
        group.form()
    its.abort()
    connecting.join(10)
    group.close()
    assert not dist.is_initialized()


def test_closing_a_failed_generation_breaks_the_connections_of_its_peers():
    with connected() as (group, peer):
        failed = []

        def wait_for_nobody() -> None:
            try:
                peer.all_reduce(torch.ones(3))
            except RuntimeError as exc:
                failed.append(exc)

        waiting = threading.Thread(target=wait_for_nobody)
        waiting.start()
        group.abort("this rank has had enough")
        waiting.join(10)
        assert len(failed) == 1
