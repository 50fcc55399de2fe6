"""The learning rate's factor when the batch grows and shrinks with the workers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.policy.scaling import Ramp, factor_of, ramp_length

SCALES = st.floats(0.1, 64.0)
MOMENTA = st.floats(0.5, 0.99)


def factors(ramp: Ramp, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(ramp.factor)
        ramp = ramp.advance()
    return found


@given(growth=st.floats(1.01, 64.0), momentum=MOMENTA)
def test_old_momentum_is_never_amplified_and_a_much_shorter_ramp_would(growth, momentum):
    length = ramp_length(growth, momentum)
    weights = [f * momentum**j for j, f in enumerate(factors(Ramp().aim(growth, momentum), 200))]
    assert max(weights) <= 1.0 + 1e-9
    if length > 4:
        short = factors(Ramp().aim(growth, momentum, length=length // 2), 200)
        assert max(f * momentum**j for j, f in enumerate(short)) > 1.0


def test_growth_ramps_linearly_and_shrinkage_is_immediate():
    ramp = Ramp().aim(4.0, 0.9, length=3)
    assert factors(ramp, 5) == [1.0, 2.0, 3.0, 4.0, 4.0]
    ramp = ramp.advance().advance()
    assert factors(ramp.aim(1.0, 0.9), 2) == [1.0, 1.0]


def test_nested_change_starts_from_the_current_factor():
    ramp = Ramp().aim(4.0, 0.9, length=3).advance()
    higher = ramp.aim(8.0, 0.9, length=3)
    assert factors(higher, 4) == [2.0, 4.0, 6.0, 8.0]
    assert ramp.aim(1.5, 0.9).factor == 1.5


def test_same_target_continues_the_ramp():
    ramp = Ramp().aim(4.0, 0.9, length=3).advance()
    assert ramp.aim(4.0, 0.9) is ramp


@given(targets=st.lists(st.tuples(SCALES, st.integers(0, 30)), min_size=1, max_size=8))
def test_factor_stays_between_its_start_and_its_target(targets):
    ramp = Ramp()
    for target, steps in targets:
        before = ramp.factor
        ramp = ramp.aim(target, 0.9)
        low, high = min(before, target), max(before, target)
        for _ in range(steps):
            assert low - 1e-9 <= ramp.factor <= high + 1e-9
            ramp = ramp.advance()


@given(scale=SCALES, most=st.floats(1.0, 16.0))
def test_rules_are_capped(scale, most):
    assert factor_of("none", scale) == 1.0
    assert factor_of("linear", scale, most) == min(scale, most)
    assert factor_of("sqrt", scale) == math.sqrt(scale)
