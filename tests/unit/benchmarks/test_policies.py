from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.advice import policies


def test_absent_traces_are_skipped_with_a_reason_and_others_are_compared(tmp_path: Path) -> None:
    (tmp_path / "bamboo").mkdir()
    # 16 machines are never available together for long: 12 always, 4 for one hour of two.
    lines = [f"0,add,a{n}" for n in range(12)]
    for hour in range(0, 12, 2):
        lines += [f"{hour * 3_600_000},add,b{hour}-{n}" for n in range(4)]
        lines += [f"{(hour + 1) * 3_600_000},remove,b{hour}-{n}" for n in range(4)]
    (tmp_path / "bamboo" / "g4dn-trace.csv").write_text("\n".join(lines))
    options = argparse.Namespace(traces=tmp_path, starts=1, quick=True)

    result = policies.measure(options)
    table = policies.table_of(result)

    assert list(result["cases"]) == ["g4dn, 32", "g4dn, 16"]
    assert len(result["skipped"]) == len(policies.CASES) - 2
    assert "Skipped: p3, 16: there is no bamboo/p3-trace.csv in the folder of traces" in table
    case = result["cases"]["g4dn, 16"]["policies"]
    assert case["deadline"]["cost_share"] < 0.6 * case["uniform-gang"]["cost_share"]
    assert result["worse_than_gang"] == {"deadline": [], "uniform": []}


def test_no_trace_at_all_gives_reasons_only(tmp_path: Path) -> None:
    result = policies.measure(argparse.Namespace(traces=tmp_path, starts=None, quick=True))

    assert result["cases"] == {}
    assert policies.table_of(result).startswith("Mean cost / cost on demand")
    assert "No trace was found." in policies.table_of(result)
