"""Messages are read whole and in order, however the connection delivers their bytes."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from distributed.comm import connect, listen
from distributed.comm.core import CommClosedError
from distributed.protocol import to_serialize
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.process.peers import (
    FrameReader,
    MalformedFramesError,
    Opaque,
    decode_plain,
    split_messages,
)


def message(frames: list[bytes]) -> bytes:
    """Encode a message as Dask does."""
    lengths = struct.pack(f"{1 + len(frames)}Q", len(frames), *map(len, frames))
    body = lengths + b"".join(frames)
    return struct.pack("Q", len(body)) + body


@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), max_size=6),
    st.lists(st.integers(1, 60), min_size=1),
)
def test_messages_are_split_alike_in_chunks_of_any_size(
    messages: list[list[bytes]], sizes: list[int]
) -> None:
    data = b"".join(map(message, messages))
    buffer, found, position = bytearray(), [], 0
    while position < len(data):
        size = sizes[position % len(sizes)]
        buffer += data[position : position + size]
        position += size
        found += split_messages(buffer)
    assert found == [frames[0] for frames in messages]
    assert not buffer


@pytest.mark.parametrize("num", [0, 10_001, 2**63])
def test_bytes_that_are_no_message_are_refused(num: int) -> None:
    with pytest.raises(MalformedFramesError, match=f"a message has {num} frames"):
        list(split_messages(bytearray(struct.pack("QQ", 100, num))))


async def test_messages_of_dask_are_read_until_the_connection_ends() -> None:
    ends: asyncio.Queue[Any] = asyncio.Queue()
    large = {"data": b"x" * 3_000_000, "text": "ä"}
    async with listen("tcp://127.0.0.1:0", ends.put) as listener:
        near = await connect(listener.contact_address)
        far = await ends.get()
        reader = FrameReader(far, decode_plain)
        for sent in ({"number": 1}, [{"number": 2}, {"number": 3}], large):
            await near.write(sent)
        assert await reader.read() == {"number": 1}
        assert await reader.read() == ({"number": 2}, {"number": 3})
        assert await reader.read() == large
        await near.write({"object": to_serialize(1.5), "number": 4})
        found = await reader.read()
        assert isinstance(found["object"], Opaque)
        assert found["number"] == 4
        await near.write({"number": 5})
        await near.close()
        assert await reader.read() == {"number": 5}
        with pytest.raises(CommClosedError):
            await reader.read()
        assert far.closed()
        with pytest.raises(CommClosedError, match="the connection is closed"):
            await reader.read()


async def test_peer_that_sends_anything_else_is_disconnected() -> None:
    ends: asyncio.Queue[Any] = asyncio.Queue()
    async with listen("tcp://127.0.0.1:0", ends.put) as listener:
        near = await connect(listener.contact_address)
        far = await ends.get()
        await near.stream.write(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(MalformedFramesError):
            await FrameReader(far, decode_plain).read()
        assert far.closed()
        near.abort()
