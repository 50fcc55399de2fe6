"""Keys that every rank sets travel together, and without the part that all ranks know."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.head.jobs.rendezvous import Rendezvous
from etrain_jupyter.trainer.group.process_group import BroadcastStore, RankGroup
from etrain_jupyter.trainer.group.rendezvous import keys_in, message_for_key
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.rank_values import pack_values
from tests.unit.trainer.peers import HOST

PLACE: dict[str, Any] = {"generation": 1, "rank": 1, "world_size": 3}


class Coordinated:
    """Groups whose keys travel as in a job."""

    def __init__(self, count: int) -> None:
        self.sent: list[m.StoreEntry | m.RankKey] = []
        self._rendezvous = Rendezvous()
        self._names = [f"j/w/{rank}" for rank in range(count)]
        self.stores = [
            BroadcastStore(lambda key, value, rank=rank: self._publish(rank, key, value))
            for rank in range(count)
        ]
        self.groups = [
            RankGroup(
                generation=1, rank=r, world_size=count, store=store, host=HOST, secret=b"secret"
            )
            for r, store in enumerate(self.stores)
        ]

    def _publish(self, rank: int, key: str, value: bytes) -> None:
        size = len(self.stores)
        message = message_for_key(key, value, generation=1, rank=rank, world_size=size)
        self.sent.append(message)
        assert isinstance(message, m.RankKey), message
        report = m.RankKey(**{**vars(message), "trainer": self._names[rank]})
        keys = self._rendezvous.take(report, self._names)
        for store in self.stores if keys is not None else ():
            store.put_all(dict(keys_in(keys)))


def test_group_connects_with_two_short_keys_of_each_rank():
    made = Coordinated(3)
    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(RankGroup.connect, made.groups))
        tensors = [torch.full((2,), float(rank)) for rank in range(3)]
        list(ranks.map(RankGroup.sum_on_host, made.groups, tensors))
    assert [tensor.tolist() for tensor in tensors] == [[3.0, 3.0]] * 3
    assert sorted(key.topic for key in made.sent) == ["0"] * 3 + ["connections"] * 3
    # gloo's numbers of the connections, 8 bytes for each rank, were left out.
    assert all(key.value[:1] == b"\x01" for key in made.sent if key.topic == "0")
    for group in made.groups:
        group.close()


@given(st.binary(max_size=40), st.integers(1, 4))
def test_any_value_arrives_as_it_was_set(value, world_size):
    for tail in (b"", b"".join(n.to_bytes(8, "little") for n in range(world_size))):
        place = {"generation": 4, "rank": 0, "world_size": world_size}
        message = message_for_key("0/0", value + tail, **place)
        assert isinstance(message, m.RankKey)
        packed = pack_values([message.value] * world_size)
        keys = dict(keys_in(m.RankKeys(topic="0", generation=4, values=packed)))
        assert keys == {f"0/{rank}": value + tail for rank in range(world_size)}


def test_other_keys_are_entries_of_the_store():
    for key in ("made/1", "checkpoint/20/folder", "0/2", "default_pg/0//0/1", "nccl/0"):
        message = message_for_key(key, b"x", **PLACE)
        assert message == m.StoreEntry(generation=1, key=key, value=b"x")
