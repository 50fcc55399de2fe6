"""Figures of the benchmark of evaluations with ``eval.score``."""

from __future__ import annotations

import pytest

from benchmarks.storage import scores
from etrain_jupyter.log.exhibits import parse_exhibit


def test_gap_and_slowest_step_are_in_ordinary_steps() -> None:
    steps = {n: 0.5 * n + 4.0 * (n > 200) + 1.0 * (n > 300) for n in range(150, 401)}

    found = scores.figures_of(steps, 200)

    assert found == pytest.approx({"step_s": 0.5, "gap_steps": 8.0, "slowest_steps": 3.0})


def test_pictures_are_as_large_as_an_exhibit_may_be() -> None:
    pictures = [scores.noise_png(seed) for seed in range(scores.NUM_PICTURES)]

    for picture in pictures:
        parse_exhibit("png", picture)
    assert 3_800_000 < sum(map(len, pictures)) <= 4_000_000
