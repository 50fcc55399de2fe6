"""How soon a zone is left."""

from __future__ import annotations

import pytest

from etrain_jupyter.plugins.ec2.placement_scores import zone_wait_s


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
