"""Division of the optimizer's state: two holders of each element, and moves that lose nothing."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from etrain_jupyter.rules.optimizer_shards import (
    ALIGN,
    choose_leavers,
    find_lost,
    is_covered,
    plan_moves,
    shards_of,
    subtract,
)


def make_starts(rng: random.Random) -> list[int]:
    """Return the starts of 1 to 8 tensors of 0 to 5,000 elements."""
    sizes = [rng.choice([0, 1, 63, 64, 65, rng.randrange(5000)]) for _ in range(rng.randint(1, 8))]
    return [0, *itertools.accumulate([*sizes, 1])]


def holders(held: dict[int, tuple[tuple[int, int], ...]], size: int) -> list[int]:
    """Return the number of holders of each element."""
    counts = [0] * size
    for spans in held.values():
        for first, stop in spans:
            for element in range(first, stop):
                counts[element] += 1
    return counts


def layout(world_size: int, starts: list[int]) -> dict[int, tuple[tuple[int, int], ...]]:
    return {rank: shards_of(rank, world_size, starts) for rank in range(world_size)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_element_has_two_holders_or_one_if_there_is_one_rank(world_size):
    rng = random.Random(world_size)
    for _ in range(20):
        starts = make_starts(rng)
        counts = holders(layout(world_size, starts), starts[-1])
        assert set(counts) == {min(2, world_size)}


def test_shards_begin_at_multiples_of_the_alignment_from_a_tensor():
    rng = random.Random(0)
    for _ in range(100):
        starts = make_starts(rng)
        for rank in range(5):
            first, _ = shards_of(rank, 5, starts)[0]
            assert any(first >= start and (first - start) % ALIGN == 0 for start in starts)


def test_shards_of_a_large_tensor_are_about_equal():
    sizes = [stop - first for first, stop in (shards_of(r, 4, [0, 10_000])[0] for r in range(4))]
    assert sum(sizes) == 10_000
    assert max(sizes) - min(sizes) <= 2 * ALIGN


@pytest.mark.parametrize("seed", range(30))
def test_moves_bring_exactly_what_is_missing(seed):
    rng = random.Random(seed)
    starts = make_starts(rng)
    old, new = rng.randint(1, 6), rng.randint(1, 6)
    # Some ranks of the old layout remain, in any order, among ranks that are new.
    remaining = rng.sample(range(old), rng.randint(1, old))
    places = rng.sample(range(max(new, old)), len(remaining))
    held = {
        place: shards_of(rank, old, starts)
        for place, rank in zip(places, remaining, strict=True)
        if place < new
    }
    if find_lost(held.values(), starts[-1]):
        with pytest.raises(ValueError, match="no rank holds element"):
            plan_moves(held, layout(new, starts))
        return
    wanted = layout(new, starts)
    moves = plan_moves(held, wanted)
    for rank, spans in wanted.items():
        received = [move.span for move in moves if move.target == rank]
        missing = subtract(spans, held.get(rank, ()))
        # Each missing element once, and no other one.
        elements = Counter(e for first, stop in received for e in range(first, stop))
        assert elements == Counter(e for first, stop in missing for e in range(first, stop))
    for move in moves:
        assert not subtract([move.span], held[move.source])
        assert any(not subtract([move.span], [span]) for span in wanted[move.target])


def test_state_moves_from_the_rank_that_has_sent_less():
    held = {0: ((0, 100),), 1: ((0, 100),)}
    moves = plan_moves(held, {2: ((0, 50),), 3: ((50, 100),)})
    assert [move.source for move in moves] == [0, 1]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
def test_state_is_lost_exactly_if_two_neighbors_are_lost(world_size):
    starts = [0, 64 * 60]
    held = layout(world_size, starts)
    names = [f"t{rank}" for rank in range(world_size)]
    for num_lost in range(world_size):
        for lost in itertools.combinations(range(world_size), num_lost):
            present = {rank for rank in range(world_size) if rank not in lost}
            gone = find_lost([held[rank] for rank in present], starts[-1])
            neighbors = any((rank + 1) % world_size in lost for rank in lost)
            if world_size == 2:
                neighbors = False
            assert bool(gone) == neighbors
            assert is_covered(names, {names[rank] for rank in present}) == (not neighbors)


def test_neighbors_leave_one_after_the_other():
    ring = ["a", "b", "c", "d"]
    assert choose_leavers(ring, ring, ["b", "c", "d"]) == ["b", "d"]
    assert choose_leavers(ring, ["a", "c", "d"], ["c", "d"]) == ["d"]


def test_newcomers_leave_at_any_time():
    assert choose_leavers(["a", "b"], ["a", "b", "new"], ["new"]) == ["new"]


def test_nothing_is_kept_for_a_state_that_is_already_lost():
    assert choose_leavers(["a", "b", "c", "d"], ["a", "d"], ["a", "d"]) == ["a", "d"]
