from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.advice import sizing


def test_job_that_scales_badly_has_a_smaller_product_of_time_and_cost_by_goodput(
    tmp_path: Path,
) -> None:
    (tmp_path / "bamboo").mkdir()
    lines = [f"0,add,a{n}" for n in range(16)] + ["43200000,remove,a0"]
    (tmp_path / "bamboo" / "p3-trace.csv").write_text("\n".join(lines))

    result = sizing.measure(argparse.Namespace(traces=tmp_path, starts=1, quick=True))
    table = sizing.table_of(result)

    assert list(result["cases"]) == ["p3, 90%", "p3, 60%", "p3, 40%", "p3, 20%", "p3, 90% and 40%"]
    worst = result["cases"]["p3, 20%"]["sizings"]
    assert worst["goodput"]["time_times_cost"] < 0.8 * worst["greedy"]["time_times_cost"]
    assert len(result["cases"]["p3, 90% and 40%"]["sizings"]["goodput"]["median_hours"]) == 2
    assert "Skipped: g4dn: there is no bamboo/g4dn-trace.csv" in table


def test_no_trace_at_all_gives_reasons_only(tmp_path: Path) -> None:
    result = sizing.measure(argparse.Namespace(traces=tmp_path, starts=None, quick=True))

    assert result["cases"] == {}
    assert "No trace was found." in sizing.table_of(result)
