"""How soon a zone is left, and what raises a low placement score."""

from __future__ import annotations

import pytest

from etrain_jupyter.plugins.ec2.placement_scores import raise_score, zone_wait_s


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


def test_score_that_is_not_low_needs_no_advice() -> None:
    assert raise_score(num_types=1, own={"a": 1, "b": 4}, others={"c": 10}, similar=["x"]) == ""


def test_few_types_are_named_as_the_cause() -> None:
    text = raise_score(num_types=1, own={"a": 3}, others={}, similar=["g6.xlarge", "g5.xlarge"])

    assert text == (
        "Add types to capacity.types, since EC2 gives low scores to fewer than 3, for example "
        "g6.xlarge, g5.xlarge"
    )


def test_better_zone_without_a_subnet_is_named() -> None:
    text = raise_score(num_types=4, own={"a": 2}, others={"b": 4, "c": 7}, similar=())

    assert text == "Add a subnet in c (score 7)"


def test_low_score_without_a_better_zone_or_known_types() -> None:
    text = raise_score(num_types=4, own={"a": 2}, others={"b": 3}, similar=())

    assert text == "Add types, or lower workers.max"
