"""Sums over ranks are the same bit for bit for any number of ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from etrain_jupyter.rules.samples.shard_plan import (
    Subtree,
    num_slots,
    plan_passes,
    plan_shards,
    shard_merges,
)
from etrain_jupyter.trainer.gradients import tree_sum
from etrain_jupyter.trainer.gradients.tree_sum import TreeSum, merge
from tests.unit.trainer.memory_peers import Mail, MemoryPeers

SIZES = [1, 3, 1000]


def values_of(num_shards: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Values whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(num_shards, size, generator=generator, dtype=torch.float64)
    scales = torch.randint(-6, 6, (num_shards, size), generator=generator)
    return [v.to(dtype) for v in values * 10.0**scales]


def total_by(world_size: int, values: list[torch.Tensor], mail: Mail) -> list[torch.Tensor]:
    """Sum over ranks in threads; return the result of each rank after two rounds."""
    plan = plan_shards(num_shards=len(values), world_size=world_size)
    totals: list[Any] = [None] * world_size

    def live(rank: int) -> None:
        passes = plan_passes(plan.subtrees[rank], adds_in_place=True)
        sums = torch.zeros(num_slots(passes), len(values[0]), dtype=values[0].dtype)
        adder = TreeSum(
            MemoryPeers(mail, rank, world_size), plan, sums[: len(plan.subtrees[rank])], tag=5
        )
        for _ in range(2):  # the buffers are reused
            for p in passes:
                if p.is_fresh:
                    sums[p.slot].zero_()
                sums[p.slot] += values[p.shard]
                merge(sums, p.merges)
            adder.exchange()
        totals[rank] = sums[0]

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


def expected(values: list[torch.Tensor]) -> torch.Tensor:
    copies = [v.clone() for v in values]
    merge(copies, shard_merges(Subtree(0, len(copies))))
    return copies[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "by chunks"])
@pytest.mark.parametrize("num_shards", [5, 8])
def test_total_has_the_same_bits_for_every_world_size(num_shards, is_direct, size, monkeypatch):
    monkeypatch.setattr(tree_sum, "DIRECT_BYTES", 1 << 20 if is_direct else 0)
    monkeypatch.setattr(tree_sum, "SEGMENT_BYTES", 256)
    values = values_of(num_shards, size, torch.float32)
    for world_size in range(2, 6):
        for total in total_by(world_size, values, Mail()):
            assert torch.equal(total, expected(values))


def test_values_of_these_tests_depend_on_the_order_of_additions():
    values = values_of(8, 1000, torch.float32)
    assert not torch.equal(torch.stack(values).sum(0), expected(values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_not_converted(dtype):
    values = values_of(8, 50, dtype)
    for total in total_by(3, values, Mail()):
        assert torch.equal(total, expected(values))


def test_even_shards_send_no_more_bytes_than_an_all_reduce(monkeypatch):
    monkeypatch.setattr(tree_sum, "DIRECT_BYTES", 0)
    mail, world_size, size = Mail(), 4, 1000
    total_by(world_size, values_of(8, size, torch.float32), mail)
    num_rounds = 2
    assert mail.num_bytes == num_rounds * 2 * (world_size - 1) * size * 4
