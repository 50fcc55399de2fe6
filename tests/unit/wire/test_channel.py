"""Frames survive however the stream is cut."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.wire.channel import Channel, FrameDecoder, encode

messages = st.lists(
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(st.integers(-(2**60), 2**60), st.binary(max_size=50), st.text(max_size=20)),
        max_size=4,
    ),
    max_size=6,
)


@given(messages, st.integers(1, 17))
def test_messages_come_out_whole_and_in_order_wherever_the_stream_is_cut(sent, size):
    stream = b"".join(encode(message) for message in sent)
    decoder = FrameDecoder()
    received = []
    for start in range(0, len(stream), size):
        received += list(decoder.feed(stream[start : start + size]))
    assert received == sent


def test_second_reader_gets_what_the_first_has_not_taken():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode({"op": "start"}) + encode({"op": "form"}))
        ours.shutdown(socket.SHUT_WR)
        channel = Channel(theirs)
        assert next(iter(channel.messages())) == {"op": "start"}
        assert list(channel.messages()) == [{"op": "form"}]


def test_text_that_utf8_cannot_encode_is_escaped():
    """Review R4: a file name that is not UTF-8, in an error, ended the trainer that reported it."""
    message = {"op": "user_error", "error": "bad file caf\udce9", "metrics": {"caf\udce9": 1.0}}
    [received] = FrameDecoder().feed(encode(message))
    assert received["error"] == "bad file caf\\udce9"
    assert received["metrics"] == {"caf\\udce9": 1.0}
