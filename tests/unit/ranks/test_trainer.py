"""What a rank reports of its own failures."""

from __future__ import annotations

import pytest

from etrain_jupyter.ranks.control.channel import FrameDecoder, encode
from etrain_jupyter.ranks.group.pending import MOST_TEXT, text_of
from etrain_jupyter.ranks.group.process_group import BroadcastStore, RankGroup
from etrain_jupyter.ranks.train_loop import OUT_OF_MEMORY
from etrain_jupyter.ranks.trainer import DISCONNECTED, failure_of


def group_of_two() -> RankGroup:
    store = BroadcastStore(lambda key, value: None)
    return RankGroup(generation=1, rank=0, world_size=2, store=store, host="127.0.0.1")


# Review G2: the report of a failed generation had no text.


def test_report_of_an_abort_has_no_error_since_another_rank_has_it():
    group = group_of_two()
    group.abort()
    assert failure_of(group, RuntimeError("Connection closed by peer")) == {}


@pytest.mark.parametrize("why", [OUT_OF_MEMORY, DISCONNECTED])
def test_report_excuses_what_says_nothing_about_the_connections(why):
    group = group_of_two()
    group.abort(why)
    assert failure_of(group, RuntimeError(why)) == {"error": why, "is_excused": True}


@pytest.mark.parametrize(
    ("text", "backend"),
    [("[gloo/transport/tcp/pair.cc:547] Connection closed", "gloo"), ("NCCL error in: a", "nccl")],
)
def test_report_has_the_error_of_a_collective_that_torch_started_by_itself(text, backend):
    assert failure_of(group_of_two(), RuntimeError(text)) == {"error": text, "backend": backend}


def test_text_of_a_report_is_bounded_and_can_be_sent():
    text = text_of(RuntimeError(f"bad file \udce9 {'x' * 10_000}"))
    assert len(text) == MOST_TEXT
    [message] = FrameDecoder().feed(encode({"error": text}))
    assert message["error"].startswith("bad file \\udce9 xxx")
