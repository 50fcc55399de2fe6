from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.common import report
from benchmarks.steps import accounting, accounting_job
from etrain_jupyter.trainer.times import Stopwatch


def blocks(*times: float) -> list[dict[str, object]]:
    """Return the blocks of a rank with these processor times; wall times are twice as long."""
    return [
        {"is_on": accounting_job.is_on(number), "cpu_s": time, "wall_s": 2 * time}
        for number, time in enumerate(times)
    ]


def test_pairs_are_compared_in_alternating_order() -> None:
    # On, off, off, on: the second pair begins without accounting.
    one, other = blocks(1.1, 1.0, 2.0, 2.2), blocks(1.3, 1.0, 2.0, 2.6)

    assert accounting.pairs_of([one], "cpu_s") == [(1.1, 1.0), (2.2, 2.0)]
    [first, second] = accounting.pairs_of([one, other], "wall_s")
    assert first == pytest.approx((2.4, 2.0))
    assert second == pytest.approx((4.8, 4.0))
    assert accounting.result_of([one, other])["cpu"]["median"] == pytest.approx(1.2)
    assert accounting.result_of([one, other])["cpu_us"]["high"] == pytest.approx(4e5)


def test_interval_contains_the_median_of_most_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(400, 40, generator=generator).tolist()

    found = [report.interval_of(one) for one in draws]

    assert sum(one["low"] <= 0.0 <= one["high"] for one in found) / 400 > 0.94
    assert all(one["low"] <= one["median"] <= one["high"] for one in found)


def test_switch_turns_the_clocks_off_and_on_again() -> None:
    watch = Stopwatch()
    accounting_job.switch(is_on=False)
    try:
        watch.begin()
        with watch.updating():
            math.factorial(2000)
        assert watch.times().optimizer_s == 0.0
    finally:
        accounting_job.switch(is_on=True)

    watch.begin()
    with watch.updating():
        math.factorial(2000)
    assert watch.times().optimizer_s > 0.0


def test_rank_measures_its_blocks_and_writes_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FOLDER", str(tmp_path)), ("BLOCK", "2"), ("PAIRS", "2")):
        monkeypatch.setenv(getattr(accounting_job, name), value)
    rank = accounting_job.Blocks()

    for _ in range(accounting_job.SETTLE_STEPS + 4 * (2 + accounting_job.SKIPPED_STEPS) + 3):
        rank.next_step()

    [path] = tmp_path.iterdir()
    measured = json.loads(path.read_text())
    assert [one["is_on"] for one in measured] == [True, False, False, True]
    assert all(one["wall_s"] >= 0 and one["cpu_s"] >= 0 for one in measured)
    table = accounting.table_of({"models": {"cnn": accounting.result_of([measured, measured])}})
    assert table.startswith("Cost of the accounting in a step")
