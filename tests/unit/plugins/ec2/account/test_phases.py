"""Time and cost of the phases of a boot, and the quota of each machine type."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.plugins.ec2.account.check import phases_of, total_of
from etrain_jupyter.plugins.ec2.account.machines import quota_of


def test_machine_is_charged_from_its_launch() -> None:
    marks = [("", 100.0), ("launch", 110.0), ("boot", 230.0), ("step", 235.0)]
    phases = phases_of(marks, launched_at=110.0, usd_per_h=3.6)
    assert [(one.name, one.seconds) for one in phases] == [
        ("launch", 10.0),
        ("boot", 120.0),
        ("step", 5.0),
    ]
    assert [one.cents for one in phases] == pytest.approx([0.0, 12.0, 0.5])
    assert total_of(phases).cents == pytest.approx(12.5)


@given(
    steps=st.lists(st.floats(-5, 500), min_size=1, max_size=6),
    launched_at=st.floats(0, 2000),
    usd=st.floats(0, 100),
)
def test_phases_are_never_negative_and_never_charged_for_longer_than_they_last(
    steps: list[float], launched_at: float, usd: float
) -> None:
    at, marks = 0.0, [("", 0.0)]
    for number, seconds in enumerate(steps):
        at += seconds
        marks.append((str(number), at))
    for phase in phases_of(marks, launched_at=launched_at, usd_per_h=usd):
        assert phase.seconds >= 0
        assert 0 <= phase.cents <= 100 * usd * phase.seconds / 3600 + 1e-9


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("g4dn.xlarge", "L-3819A6DF"),
        ("g5g.xlarge", "L-3819A6DF"),
        ("p3dn.24xlarge", "L-7212CCBC"),
        ("p4de.24xlarge", "L-7212CCBC"),
        ("p5.48xlarge", "L-C4BD4855"),
        ("m5.large", "L-34B43A08"),
        ("trn1.2xlarge", None),
        ("dl1.24xlarge", None),
    ],
)
def test_each_type_counts_towards_the_quota_of_its_family(name: str, code: str | None) -> None:
    found = quota_of(name)
    assert (found and found[0]) == code
