"""Faults by chance: reproducible, and as frequent as asked for."""

from __future__ import annotations

from collections import Counter

import pytest

from etrain_jupyter.rules.chaos import FAULT_KINDS, Chaos, Strike

WORKERS = ("w1", "w2", "w3", "w4")


def strikes(chaos: Chaos, seconds: int, workers: tuple[str, ...] = WORKERS) -> list[Strike]:
    ticks = (number * 0.25 for number in range(seconds * 4))
    found = (chaos.due(workers, now) for now in ticks)
    return [strike for strike in found if strike is not None]


def test_same_seed_gives_the_same_faults_and_another_seed_others():
    first, again, other = (
        strikes(Chaos(mtbf_s=15.0, mode="mix", seed=seed, now=0.0), 2000) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_faults_have_the_requested_rate_and_hit_all_workers_equally():
    found = strikes(Chaos(mtbf_s=15.0, mode="kill", seed=0, now=0.0), 15_000)
    assert 850 < len(found) < 1100  # 1000 are expected, and a few come due in the same tick
    assert {strike.kind for strike in found} == {"kill"}
    hits = Counter(strike.worker for strike in found)
    assert all(190 < hits[worker] < 310 for worker in WORKERS)


def test_mix_mode_contains_every_kind():
    found = strikes(Chaos(mtbf_s=5.0, mode="mix", seed=0, now=0.0), 2000)
    assert {strike.kind for strike in found} == set(FAULT_KINDS)


def test_chaos_ends_after_its_duration():
    chaos = Chaos(mtbf_s=1.0, mode="kill", seed=0, now=0.0, duration_s=60.0)
    assert strikes(chaos, 60)
    assert not chaos.is_over(59.0)
    assert chaos.is_over(60.0)
    assert chaos.due(WORKERS, 1000.0) is None


def test_fault_without_a_worker_is_dropped_and_not_delayed():
    chaos = Chaos(mtbf_s=1.0, mode="kill", seed=0, now=0.0)
    assert strikes(chaos, 100, ()) == []


def test_long_suspension_causes_one_fault_instead_of_all_missed_ones():
    chaos = Chaos(mtbf_s=1.0, mode="kill", seed=0, now=0.0)
    assert chaos.due(WORKERS, 5000.0) is not None
    assert chaos.due(WORKERS, 5000.0) is None


@pytest.mark.parametrize(("mode", "mtbf_s", "words"), [("flood", 1.0, "flood"), ("kill", 0.0, "0")])
def test_invalid_arguments_are_refused(mode, mtbf_s, words):
    with pytest.raises(ValueError, match=words):
        Chaos(mtbf_s=mtbf_s, mode=mode, seed=0, now=0.0)
