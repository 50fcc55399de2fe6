"""Who gets which worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.policy.allocation import Claim, allocate


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
