"""Lists of connections that make a group, and owners of far ends. Review S3."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.trainer.group.connections import (
    Pair,
    decode,
    digest_of,
    encode,
    find_mismatch,
    find_uid,
    format_end,
    pair_of,
)
from etrain_jupyter.wire.rank_values import DIGEST_MODULUS


def whole(count: int) -> dict[int, list[Pair]]:
    """Lists of a valid group: each rank listens on one port, lower ranks connect to higher ones."""
    listed: dict[int, list[Pair]] = {rank: [] for rank in range(count)}
    for near in range(count):
        for far in range(near + 1, count):
            ends = (f"10.0.0.{near}", 40000 + far), (f"10.0.0.{far}", 5000)
            listed[near].append(ends)
            listed[far].append((ends[1], ends[0]))
    return listed


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_one_connection_per_pair_of_ranks_is_accepted(count):
    assert find_mismatch(whole(count)) is None


def total_of(listed: dict[int, list[Pair]]) -> int:
    return sum(digest_of(pairs, b"secret") for pairs in listed.values()) % DIGEST_MODULUS


@pytest.mark.parametrize("count", [2, 3, 8])
def test_digests_of_a_whole_group_cancel_out(count):
    assert total_of(whole(count)) == 0


@given(st.integers(2, 6), st.data())
def test_digests_reveal_any_end_that_no_rank_lists(count, data):
    listed = whole(count)
    rank = data.draw(st.integers(0, count - 1))
    place = data.draw(st.integers(0, count - 2))
    near, far = listed[rank][place]
    stranger = ("10.0.9.9", data.draw(st.integers(1, 65535)))
    listed[rank][place] = data.draw(st.sampled_from([(near, stranger), (stranger, far)]))
    assert total_of(listed) != 0
    assert find_mismatch(listed) is not None


def test_digests_depend_on_the_secret():
    [pair] = whole(2)[0]
    assert digest_of([pair], b"one") != digest_of([pair], b"other")


@given(st.integers(2, 6), st.data())
def test_any_end_that_no_rank_lists_is_found(count, data):
    listed = whole(count)
    rank = data.draw(st.integers(0, count - 1))
    index = data.draw(st.integers(0, count - 2))
    near, _ = listed[rank][index]
    listed[rank][index] = (near, ("10.9.9.9", 1))
    mismatch = find_mismatch(listed)
    assert mismatch is not None
    assert (rank, (near, ("10.9.9.9", 1))) in mismatch.unknown
    assert rank in mismatch.ranks
    assert len(mismatch.ranks) == 2  # and the rank whose place was taken


@given(st.integers(2, 6), st.data())
def test_missing_doubled_or_foreign_connection_is_refused(count, data):
    listed = whole(count)
    rank = data.draw(st.integers(0, count - 1))
    index = data.draw(st.integers(0, count - 2))
    change = data.draw(st.sampled_from(["missing", "doubled", "of another rank", "to itself"]))
    if change == "missing":
        del listed[rank][index]
    elif change == "doubled":
        listed[rank].append(listed[rank][index])
    elif change == "of another rank":
        other = data.draw(st.integers(0, count - 1).filter(lambda found: found != rank))
        listed[rank][index] = listed[other][0]
        if count == 2:
            listed[other] = []
    else:
        near, _ = listed[rank][index]
        listed[rank] += [(near, ("10.0.0.9", 9)), (("10.0.0.9", 9), near)]
    assert find_mismatch(listed) is not None


def test_rank_without_any_connection_is_refused():
    assert find_mismatch({0: [], 1: []}).ranks == (0, 1)


def test_connection_lists_round_trip_through_the_store():
    pairs = whole(3)[1]
    assert decode(encode(pairs)) == pairs


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_ends_identify_a_connection_alike_and_its_user_is_found(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        with socket.create_connection(listener.getsockname()[:2]) as far:
            near = listener.accept()[0]
            pair = pair_of(near)
            assert pair == tuple(reversed(pair_of(far)))
            assert find_uid(pair) == os.getuid()
        assert find_uid(pair) is None  # closed: it has no owner
        near.close()
    assert format_end(pair[0]) == (
        f"[{host}]:{pair[0][1]}" if ":" in host else f"{host}:{pair[0][1]}"
    )


def test_ipv4_peer_of_an_ipv6_socket_is_identified_alike():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as far:
            near = listener.accept()[0]
            assert pair_of(near) == tuple(reversed(pair_of(far)))
            assert find_uid(pair_of(far)) == os.getuid()
            near.close()
