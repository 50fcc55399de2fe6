"""Digests are summed for all ranks without a change of what the ranks make of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.wire.rank_values import (
    DIGEST_MODULUS,
    WHOLE,
    pack_digest,
    pack_values,
    sum_digests,
)

DIGESTS = st.integers(0, DIGEST_MODULUS - 1)
VALUES = st.builds(pack_digest, num=st.integers(0, 5), digest=DIGESTS, error=st.text(max_size=9))


def read(values: list[bytes]) -> list[Any]:
    """Read values as a rank does."""
    return [json.loads(value[len(WHOLE) :]) for value in values]


def sum_of(values: list[Any]) -> int:
    return sum(int(value["digest"], 16) for value in values) % DIGEST_MODULUS


@given(st.lists(VALUES, max_size=9))
def test_sum_counts_and_errors_stay_the_same(packed: list[bytes]) -> None:
    values = [WHOLE + value for value in packed]
    before, after = read(values), read(sum_digests(values))
    assert sum_of(after) == sum_of(before)
    for name in ("num", "error"):
        assert [value[name] for value in after] == [value[name] for value in before]


@pytest.mark.parametrize(
    "wrong",
    [b"", b"{}", b"[1]", b"\xff", b'{"num": 1, "digest": 5, "error": ""}', b"[" * 100_000],
)
def test_malformed_value_is_left_to_the_ranks(wrong: bytes) -> None:
    values = [WHOLE + pack_digest(num=1, digest=7), WHOLE + wrong]
    assert sum_digests(values) == values


def test_summed_digests_of_many_ranks_are_short() -> None:
    values = [WHOLE + pack_digest(num=999, digest=3**80 * rank) for rank in range(1000)]
    assert len(pack_values(values)) > 20_000
    assert len(pack_values(sum_digests(values))) < 2_000
