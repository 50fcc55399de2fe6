"""Messages between two ranks: in order, off the main thread, and abortable."""

from __future__ import annotations

import threading

import pytest
import torch

from etrain_jupyter.trainer.group.process_group import BroadcastStore, CommunicationError, RankGroup
from tests.unit.trainer.peers import connected


def alone() -> RankGroup:
    store = BroadcastStore(lambda key, value: None)
    return RankGroup(generation=1, rank=0, world_size=1, store=store, host="")


def exchange_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "etrain-exchange"]


def test_work_runs_in_the_order_in_which_it_was_started():
    group, done = alone(), []
    pendings = [group.start(lambda n=n: done.append(n)) for n in range(100)]
    pendings[-1].wait()
    assert done == list(range(100))
    group.close()


def test_work_runs_on_one_thread_that_is_not_the_callers():
    group, names = alone(), set()
    for _ in range(3):
        group.start(lambda: names.add(threading.current_thread())).wait()
    assert [t.name for t in names] == ["etrain-exchange"]
    assert threading.current_thread() not in names
    group.close()


def test_thread_ends_with_the_group():
    group = alone()
    group.start(lambda: None).wait()
    (thread,) = exchange_threads()
    group.close()
    thread.join(10)
    assert not thread.is_alive()


def test_exception_in_work_ends_the_generation():
    group = alone()

    def work() -> None:
        raise ValueError("bad chunk")

    pending = group.start(work)
    with pytest.raises(CommunicationError, match="bad chunk") as caught:
        pending.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(CommunicationError, match="bad chunk"):
        group.start(lambda: None)
    group.close()


def test_views_of_tensors_are_sent_in_both_directions():
    with connected() as (group, peer):
        sent, received = torch.arange(10.0), torch.zeros(10)

        def work() -> None:
            arriving = group.irecv(received[5:], 1, tag=7)
            group.isend(sent[:5], 1, tag=6).wait()
            arriving.wait()

        pending = group.start(work)
        got = torch.zeros(5)
        peer.receive(got, tag=6)
        peer.send(torch.full((5,), 3.0), tag=7)
        pending.wait()
        assert got.tolist() == [0, 1, 2, 3, 4]
        assert received.tolist() == [0] * 5 + [3] * 5


def test_abort_ends_the_wait_for_a_silent_peer():
    with connected() as (group, _):
        begun = threading.Event()

        def work() -> None:
            arriving = group.irecv(torch.zeros(4), 1, tag=1)
            begun.set()
            arriving.wait()

        pending = group.start(work)
        behind_it = group.start(lambda: None)
        (thread,) = exchange_threads()
        begun.wait()
        group.abort("the peer is silent")
        for waiting in (pending, behind_it):
            with pytest.raises(CommunicationError, match="the peer is silent"):
                waiting.wait()
        with pytest.raises(CommunicationError, match="the peer is silent"):
            group.start(lambda: None)
        # The connections were shut down, so gloo releases the thread, too.
        thread.join(10)
        assert not thread.is_alive()


def test_abort_does_not_wait_for_work_that_never_ends():
    group, begun, never = alone(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        never.wait()

    pending = group.start(work)
    begun.wait()
    group.abort("enough")
    with pytest.raises(CommunicationError, match="enough"):
        pending.wait()
    never.set()


def test_dead_peer_ends_the_work():
    with connected() as (group, peer):
        pending = group.start(lambda: group.irecv(torch.zeros(4), 1, tag=1).wait())
        peer.die()
        with pytest.raises(CommunicationError):
            pending.wait()


def test_collectives_and_work_items_are_counted():
    class Page:
        count = 0

        def count_collective(self) -> None:
            self.count += 1

    page = Page()
    with connected(progress=page) as (group, peer):
        total = torch.ones(2)
        pending = group.all_reduce(total)
        peer.all_reduce(torch.ones(2))
        pending.wait()
        group.start(lambda: None).wait()
        assert total.tolist() == [2, 2]
        assert page.count == 2
