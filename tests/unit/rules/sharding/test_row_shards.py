"""Rows of weights on the ranks: complete, twice, and as FSDP2 divides them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.sharding.optimizer_shards import find_lost, is_covered, plan_moves
from etrain_jupyter.rules.sharding.row_shards import padded_rows, row_shards, rows_of

shapes = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
)
world_sizes = st.integers(1, 6)


def starts_of(sizes: list[tuple[int, ...]]) -> list[int]:
    return list(itertools.accumulate((math.prod(shape) for shape in sizes), initial=0))


def held_by(world_size: int, sizes: list[tuple[int, ...]]) -> list[list[tuple[int, int]]]:
    """Return the ranges of each rank."""
    starts = starts_of(sizes)
    return [
        [span for spans in row_shards(rank, world_size, starts, sizes) for span in spans]
        for rank in range(world_size)
    ]


@given(shapes, st.integers(2, 6))
def test_rows_are_the_chunks_that_torch_makes(
    sizes: list[tuple[int, ...]], world_size: int
) -> None:
    for shape in sizes:
        rows = torch.arange(math.prod(shape)).view(shape)
        chunks = list(torch.chunk(rows, world_size))
        for rank in range(world_size):
            first, stop = rows_of(rank, world_size, shape)
            expected = chunks[rank].reshape(-1).tolist() if rank < len(chunks) else []
            assert list(range(first, stop)) == expected
        assert padded_rows(shape[0], world_size) == len(chunks[0])


@given(shapes, world_sizes)
def test_each_element_is_on_two_ranks(sizes: list[tuple[int, ...]], world_size: int) -> None:
    held = held_by(world_size, sizes)
    counts = [0] * starts_of(sizes)[-1]
    for first, stop in itertools.chain.from_iterable(held):
        for element in range(first, stop):
            counts[element] += 1
    assert set(counts) == {min(2, world_size)}


@given(shapes, st.integers(2, 6), st.data())
def test_loss_of_ranks_that_are_not_neighbors_loses_no_weights(
    sizes: list[tuple[int, ...]], world_size: int, data: st.DataObject
) -> None:
    lost = data.draw(st.sets(st.integers(0, world_size - 1), max_size=world_size - 1))
    ring = [str(rank) for rank in range(world_size)]
    held = held_by(world_size, sizes)
    rest = [spans for rank, spans in enumerate(held) if rank not in lost]
    if is_covered(ring, {str(rank) for rank in range(world_size) if rank not in lost}):
        assert find_lost(rest, starts_of(sizes)[-1]) == []


def test_loss_of_two_neighbors_loses_the_shard_that_they_share() -> None:
    held = held_by(4, [(8, 2)])
    # Rank 1 owns rows 2 and 3, whose copy is on rank 2.
    assert find_lost([held[0], held[3]], 16) == [(4, 8)]


@given(shapes, world_sizes, world_sizes)
def test_moves_to_another_number_of_ranks_give_each_its_rows(
    sizes: list[tuple[int, ...]], before: int, after: int
) -> None:
    old, new = (dict(enumerate(held_by(number, sizes))) for number in (before, after))
    moves = plan_moves(old, new)
    for rank, wanted in new.items():
        present = {e for span in old.get(rank, ()) for e in range(*span)}
        received = [e for move in moves if move.target == rank for e in range(*move.span)]
        assert len(received) == len(set(received))
        assert not present & set(received)
        assert {e for span in wanted for e in range(*span)} <= present | set(received)
    for move in moves:
        assert any(a <= move.span[0] and move.span[1] <= b for a, b in old[move.source])
        assert any(a <= move.span[0] and move.span[1] <= b for a, b in new[move.target])


@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_with_fewer_rows_than_ranks_has_ranks_without_rows(world_size: int) -> None:
    assert [rows_of(rank, world_size, (1, 7)) for rank in range(world_size)] == [
        (0, 7),
        *[(7, 7)] * (world_size - 1),
    ]
