"""How soon a zone is left, and whether traffic between zones pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.plugins.ec2.placement import pays_to_spread, traffic_usd_per_h, zone_wait_s


@pytest.mark.parametrize(
    ("score", "best_elsewhere", "expected"),
    [
        (1, 9, 15.0),
        (3, 6, 15.0),
        (3, 5, 60.0),
        (4, 10, 60.0),
        (0, 10, 60.0),
        (1, 0, 60.0),
    ],
)
def test_zone_is_left_soon_only_if_another_one_is_clearly_better(
    score: int, best_elsewhere: int, expected: float
) -> None:
    assert zone_wait_s(score=score, best_elsewhere=best_elsewhere) == expected


USD = st.floats(0.0, 100.0)
TERMS = {"state_bytes": 1e8, "changes_per_h": 1.0, "spot_usd": 0.3, "on_demand_usd": 1.0}


@given(
    gradient_bytes=st.floats(0.0, 1e11),
    steps_per_s=st.floats(0.0, 100.0),
    workers=st.integers(0, 1000),
)
def test_one_zone_has_no_traffic(gradient_bytes: float, steps_per_s: float, workers: int) -> None:
    values = {"gradient_bytes": gradient_bytes, "steps_per_s": steps_per_s, "workers": workers}
    assert traffic_usd_per_h(**values, zones=1) == 0.0  # type: ignore[arg-type]
    two = traffic_usd_per_h(**values, zones=2)  # type: ignore[arg-type]
    assert 0.0 <= two <= traffic_usd_per_h(**values, zones=3)  # type: ignore[arg-type]


@given(traffic_usd=USD, more=USD, num_more=st.integers(0, 100))
def test_more_traffic_never_makes_spreading_pay(
    traffic_usd: float, more: float, num_more: int
) -> None:
    if pays_to_spread(traffic_usd=traffic_usd + more, num_more=num_more, **TERMS):
        assert pays_to_spread(traffic_usd=traffic_usd, num_more=num_more, **TERMS)


@given(traffic_usd=USD, num_more=st.integers(1, 100), spot_usd=USD, on_demand_usd=USD)
def test_spread_workers_cost_at_most_the_on_demand_price(
    traffic_usd: float, num_more: int, spot_usd: float, on_demand_usd: float
) -> None:
    terms = TERMS | {"spot_usd": spot_usd, "on_demand_usd": on_demand_usd}
    if pays_to_spread(traffic_usd=traffic_usd, num_more=num_more, **terms):
        assert num_more * spot_usd + traffic_usd <= num_more * on_demand_usd + 1e-6


def test_large_gradients_do_not_pay_and_small_ones_do() -> None:
    for gradient_bytes, pays in ((100e6, False), (0.5e6, True)):
        usd = traffic_usd_per_h(gradient_bytes=gradient_bytes, steps_per_s=2.0, workers=4, zones=2)
        assert pays_to_spread(traffic_usd=usd, num_more=2, **TERMS) is pays
