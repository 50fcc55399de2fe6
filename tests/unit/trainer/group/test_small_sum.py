"""Sums of small tensors by recursive doubling, in memory and through gloo."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules import small_sums
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from etrain_jupyter.trainer.group.small_sum import TAG, is_small, sum_small
from tests.unit.trainer.memory_peers import Mail, MemoryPeers
from tests.unit.trainer.peers import connected, linked_groups, on_each

LARGE = 1 << 20
"""Number of values of a tensor that gloo sums."""


def sums_by(values: list[torch.Tensor], mail: Mail) -> list[torch.Tensor]:
    """Sum over ranks in threads; return the result of each rank."""
    totals = [value.clone() for value in values]

    def live(rank: int) -> None:
        sum_small(MemoryPeers(mail, rank, len(values)), totals[rank])

    with ThreadPoolExecutor(len(values)) as ranks:
        list(ranks.map(live, range(len(values))))
    return totals


@given(st.integers(2, 11), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_all_ranks_get_the_sum_with_the_same_bits(world_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(world_size)
    values = torch.randn(world_size, 20, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-6, 6, values.shape, generator=generator)

    totals = sums_by(list(values.to(dtype)), Mail())

    assert all(torch.equal(total, totals[0]) for total in totals)
    assert all(total.dtype == dtype for total in totals)
    terms = values.to(dtype).double()
    error = (totals[0].double() - terms.sum(0)).abs() / terms.abs().sum(0)
    assert error.max() <= world_size * torch.finfo(dtype).eps


def test_sums_of_integers_are_exact() -> None:
    values = [torch.tensor([2**52 // 5 + rank, rank], dtype=torch.float64) for rank in range(5)]
    for total in sums_by(values, Mail()):
        assert total.tolist() == [5 * (2**52 // 5) + 10, 10]


def test_ranks_agree_on_the_bits_of_nan() -> None:
    # The bits of a NaN say where it comes from, and a sum keeps those of one term.
    bits = np.array([0x7FC00001, 0x7FC00002, 0x3F800000], dtype=np.uint32)
    values = [torch.from_numpy(bits[i : i + 1].view(np.float32)) for i in (0, 1, 2, 1)]
    totals = sums_by(values, Mail())
    assert math.isnan(totals[0])
    assert len({total.view(torch.int32).item() for total in totals}) == 1


@pytest.mark.parametrize(
    ("world_size", "num_messages"), [(2, 2), (4, 8), (8, 24), (5, 10), (6, 12)]
)
def test_number_of_messages(world_size: int, num_messages: int) -> None:
    mail = Mail()
    sums_by([torch.ones(3)] * world_size, mail)
    assert mail.num_messages == num_messages


def test_only_tensors_that_cost_less_this_way_are_small() -> None:
    limit = small_sums.MAX_BYTES // 4
    assert is_small(torch.ones(limit), 2)
    assert not is_small(torch.ones(limit + 1), 2)
    assert is_small(torch.ones(limit // 6), 64)
    assert not is_small(torch.ones(limit // 6 + 1), 64), "six rounds"
    assert not is_small(torch.ones(0), 2), "gloo does not send empty messages"
    assert not is_small(torch.ones(4, 4).t()[:2], 2), "not contiguous"
    assert not is_small(torch.ones(4, device="meta"), 2)


# --- through gloo ---


def test_sums_in_flight_at_the_same_time_do_not_mix() -> None:
    sizes = [1, LARGE, 40, LARGE, 3]
    with connected() as (group, peer):
        tensors = [torch.full((size,), 10.0**k) for k, size in enumerate(sizes)]
        sums = [group.all_reduce(tensor) for tensor in tensors]
        for k, size in enumerate(sizes):
            peer.all_reduce(torch.full((size,), 2 * 10.0**k))
        for pending in sums:
            pending.wait()
    for k, tensor in enumerate(tensors):
        assert (tensor == 3 * 10.0**k).all()


def test_three_ranks_start_many_sums_at_once() -> None:
    def work(group: RankGroup) -> list[float]:
        tensors = [torch.full((2,), float(k * group.rank)) for k in range(20)]
        for pending in [group.all_reduce(tensor) for tensor in tensors]:
            pending.wait()
        return [float(tensor[1]) for tensor in tensors]

    with linked_groups(3) as groups:
        assert on_each(groups, work) == [[3.0 * k for k in range(20)]] * 3


@pytest.mark.parametrize("size", [3, LARGE])
def test_abort_ends_a_sum_with_a_silent_peer(size: int) -> None:
    with connected() as (group, _):
        pending = group.all_reduce(torch.ones(size))
        threading.Timer(0.1, group.abort, ["a peer is lost"]).start()
        with pytest.raises(CommunicationError, match="a peer is lost"):
            pending.wait()


@pytest.mark.parametrize("size", [3, LARGE])
def test_lost_peer_fails_a_sum(size: int) -> None:
    with connected() as (group, peer):
        pending = group.all_reduce(torch.ones(size))
        peer.die()
        with pytest.raises(CommunicationError):
            pending.wait()
        assert group.failed_backend == "gloo"


@pytest.mark.parametrize(("rank", "peer"), [(0, 2), (1, 0), (2, 0)])
def test_sum_that_was_abandoned_does_not_write_into_its_tensor(rank: int, peer: int) -> None:
    mail, tensor = Mail(), torch.ones(3)
    mail.box(peer, rank, TAG).put(torch.ones(3))
    peers = MemoryPeers(mail, rank, 3)
    peers.failure = CommunicationError("a peer is lost")

    with pytest.raises(CommunicationError):
        sum_small(peers, tensor)
    assert tensor.tolist() == [1.0, 1.0, 1.0]
