"""Frames survive however the stream is cut."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.channel import Channel, FrameDecoder, frame
from etrain_jupyter.wire.codec import MalformedMessageError, encode

sent_messages = st.lists(
    st.one_of(
        st.builds(m.TextLogged, level=st.just("info"), text=st.text(max_size=20)),
        st.builds(
            m.StoreEntry,
            generation=st.integers(0, 2**60),
            key=st.text(max_size=8),
            value=st.binary(max_size=50),
        ),
    ),
    max_size=6,
)


@given(sent_messages, st.integers(1, 17))
def test_messages_are_decoded_completely_and_in_order_for_any_chunk_size(sent, size):
    stream = b"".join(frame(encode(message)) for message in sent)
    decoder = FrameDecoder()
    received = []
    for start in range(0, len(stream), size):
        received += list(decoder.feed(stream[start : start + size]))
    assert [m.FROM_TRAINER.decode(data) for data in received] == sent


def test_second_reader_gets_the_messages_that_the_first_has_not_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(encode(m.RequestCheckpoint())) + frame(encode(m.ShutDownTrainer())))
        ours.shutdown(socket.SHUT_WR)
        channel = Channel(theirs)
        assert next(iter(channel.messages())) == m.RequestCheckpoint()
        assert list(channel.messages()) == [m.ShutDownTrainer()]


def test_message_of_the_wrong_direction_is_refused():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(encode(m.TrainerExited(cause="?"))))
        with pytest.raises(MalformedMessageError, match="unknown message 'TrainerExited'"):
            next(iter(Channel(theirs).messages()))


def test_text_that_utf8_cannot_encode_is_escaped():
    """Review R4: a file name that is not UTF-8, in an error, ended the trainer that reported it."""
    message = m.UserCodeFailed(progress=(1, 0), error="bad file caf\udce9", traceback="")
    [received] = FrameDecoder().feed(frame(encode(message)))
    assert m.FROM_TRAINER.decode(received).error == "bad file caf\\udce9"
