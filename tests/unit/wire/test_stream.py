"""Messages over Dask's connection arrive as Dask's own would, each once and in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest
from distributed.batched import BatchedSend
from distributed.comm import connect, listen
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.process.peers import decode_plain
from etrain_jupyter.wire.stream import MessageStream, SharedFields

VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
FIELDS = st.dictionaries(st.text(), VALUES, max_size=40)


@given(FIELDS, FIELDS)
def test_message_with_shared_fields_equals_the_whole_message(shared: Any, own: Any) -> None:
    shared = {name: value for name, value in shared.items() if name not in own}
    packed = b"".join(SharedFields(shared).pack_with(own))
    assert decode_plain([packed]) == SharedFields(shared).merge(own) == {**shared, **own}


def test_text_that_is_not_valid_utf8_is_escaped() -> None:
    packed = b"".join(SharedFields({"text": "a\udce4b"}).pack_with({}))
    assert msgpack.unpackb(packed) == {"text": "a\\udce4b"}


class Pair:
    """Both ends of a connection of Dask: one sends with ``MessageStream``, the other reads."""

    def __init__(self, near: Any, far: Any) -> None:
        self.far = far
        self.near = near
        self.batched: Any = BatchedSend(interval="5ms")  # type: ignore[no-untyped-call]
        self.stream = MessageStream(self.batched, "etrain_message")

    async def read(self, num: int) -> list[Any]:
        """Return the next ``num`` messages."""
        found: list[Any] = []
        while len(found) < num:
            found += await self.far.read()
        return found


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    ends: asyncio.Queue[Any] = asyncio.Queue()
    async with listen("tcp://127.0.0.1:0", ends.put) as listener:
        near = await connect(listener.contact_address)
        one = Pair(near, await ends.get())
        yield one
        near.abort()
        one.far.abort()


def order(number: int, **more: Any) -> dict[str, Any]:
    return {"op": "etrain_message", "message": {"number": number, **more}}


async def test_messages_of_one_turn_arrive_in_one_batch(pair: Pair) -> None:
    pair.batched.start(pair.near)
    shared = SharedFields({"values": b"x" * 300_000})
    pair.stream.send({"number": 0})
    pair.stream.send_shared(shared, {"number": 1})
    pair.stream.send({"number": 2})
    batch = await pair.far.read()
    assert list(batch) == [order(0), order(1, values=b"x" * 300_000), order(2)]


async def test_messages_wait_for_the_connection_and_stay_in_order(pair: Pair) -> None:
    pair.stream.send({"number": 0})
    await asyncio.sleep(0.01)
    pair.stream.send({"number": 1})
    pair.batched.start(pair.near)
    pair.stream.send({"number": 2})
    assert await pair.read(3) == [order(0), order(1), order(2)]


async def test_messages_of_dask_on_the_same_connection_stay_whole(pair: Pair) -> None:
    pair.batched.start(pair.near)
    for number in range(200):
        pair.batched.send({"dask": number, "data": "d" * 5_000})
        pair.stream.send({"number": number, "data": "e" * 5_000})
        if number % 7 == 0:
            await asyncio.sleep(0)
    found = await pair.read(400)
    ours = [one["message"]["number"] for one in found if "message" in one]
    theirs = [one["dask"] for one in found if "dask" in one]
    assert ours == theirs == list(range(200))


async def test_message_to_a_closed_connection_is_dropped(pair: Pair) -> None:
    pair.batched.start(pair.near)
    assert not pair.stream.is_closed
    pair.stream.send({"number": 0})
    pair.near.abort()
    assert pair.stream.is_closed
    pair.stream.send({"number": 1})
    await asyncio.sleep(0.01)


def test_other_objects_get_each_message_whole() -> None:
    class Sent(list[Any]):
        send = list.append

    sent = Sent()
    stream = MessageStream(sent, "etrain_message")
    stream.send({"number": 0})
    stream.send_shared(SharedFields({"kind": "BreakGeneration"}), {"number": 1})
    assert sent == [
        order(0),
        {"op": "etrain_message", "message": {"kind": "BreakGeneration", "number": 1}},
    ]
