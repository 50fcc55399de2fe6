"""Who gets which worker."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.sizing.allocation import Claim, allocate


def claim(job_id: str, low: int, high: int, *held: str) -> Claim:
    return Claim(job_id=job_id, min_workers=low, max_workers=high, held=held)


def test_second_job_takes_from_the_first_only_what_its_minimum_needs():
    shares = allocate([claim("a", 1, 4, "w1", "w2", "w3"), claim("b", 1, 2)], ["w1", "w2", "w3"])
    assert shares == {"a": ("w1", "w2"), "b": ("w3",)}


def test_job_keeps_the_workers_that_it_holds():
    shares = allocate([claim("a", 1, 2, "w3", "w1")], ["w1", "w2", "w3"])
    assert shares == {"a": ("w3", "w1")}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=4),
    st.integers(0, 9),
)
def test_every_worker_belongs_to_at_most_one_job_and_no_job_exceeds_its_maximum(bounds, count):
    claims = [claim(f"j{i}", low, low + more) for i, (low, more) in enumerate(bounds)]
    workers = [f"w{i}" for i in range(count)]
    shares = allocate(claims, workers)
    given_out = [w for share in shares.values() for w in share]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(workers)
    assert all(len(shares[c.job_id]) <= c.max_workers for c in claims)
    wanted = sum(c.max_workers for c in claims)
    assert len(given_out) == min(count, wanted)


def test_workers_that_do_not_fit_a_job_go_to_another_one():
    claims = [
        Claim(job_id="a", min_workers=1, max_workers=4, held=("w1",), unfit=frozenset({"w1"})),
        claim("b", 1, 4),
    ]
    assert allocate(claims, ["w1", "w2"]) == {"a": ("w2",), "b": ("w1",)}


def test_job_that_no_worker_fits_takes_nothing_from_the_others():
    claims = [
        Claim(job_id="a", min_workers=2, max_workers=4, unfit=frozenset({"w1", "w2"})),
        claim("b", 1, 2),
    ]
    assert allocate(claims, ["w1", "w2"]) == {"a": (), "b": ("w1", "w2")}


# --- jobs that are sized by goodput ---


def sized(job_id: str, goodputs: list[float], *held: str, low: int = 1) -> Claim:
    return Claim(
        job_id=job_id,
        min_workers=low,
        max_workers=len(goodputs),
        held=held,
        goodputs=(0.0, *goodputs),
    )


def counts(claims: list[Claim], num_workers: int) -> dict[str, int]:
    shares = allocate(claims, [f"w{i}" for i in range(num_workers)])
    return {job_id: len(share) for job_id, share in shares.items()}


def test_worker_goes_to_the_job_to_which_it_is_worth_more():
    saturated = sized("a", [10.0, 12.0, 13.0])
    linear = sized("b", [10.0, 20.0, 30.0])
    assert counts([saturated, linear], 4) == {"a": 1, "b": 3}
    assert counts([saturated, linear], 6) == {"a": 3, "b": 3}


def test_equal_jobs_get_equal_shares():
    goodputs = [10.0 * w for w in range(1, 9)]
    assert counts([sized("a", goodputs), sized("b", goodputs)], 8) == {"a": 4, "b": 4}


def test_job_with_a_fixed_maximum_comes_before_jobs_sized_by_goodput():
    assert counts([sized("a", [10.0, 20.0, 30.0]), claim("b", 1, 3)], 4) == {"a": 1, "b": 3}


def test_workers_do_not_move_for_a_small_gain():
    names = [f"w{i}" for i in range(4)]
    first = sized("a", [10.0, 15.0, 18.6], *names[:1])
    second = sized("b", [10.0, 15.0, 18.0], *names[1:])
    assert counts([first, second], 4) == {"a": 2, "b": 2}  # 1.25 times the product
    slightly = sized("a", [10.0, 12.2, 13.0], *names[:1])
    assert counts([slightly, second], 4) == {"a": 1, "b": 3}


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.floats(0.1, 100.0), min_size=3, max_size=5)),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 9),
)
def test_shares_have_the_largest_product_of_goodputs(jobs, count):
    claims = [sized(f"j{i}", goodputs, low=low) for i, (low, goodputs) in enumerate(jobs)]
    shares = counts(claims, count)
    if count < sum(low for low, _ in jobs):
        return  # some job waits for its minimum

    def product(numbers: tuple[int, ...]) -> float:
        return math.prod(
            claim.goodputs[number] for claim, number in zip(claims, numbers, strict=True)
        )

    ranges = [range(claim.min_workers, claim.max_workers + 1) for claim in claims]
    best = max(product(one) for one in itertools.product(*ranges) if sum(one) <= count)
    assert product(tuple(shares.values())) >= best * (1 - 1e-9)
