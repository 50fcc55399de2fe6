"""Test the tables and JSON files of the benchmarks, and the reasons for skipped systems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import report
from benchmarks.faults import churn, recovery
from benchmarks.faults.recovery_ours import stall_summary
from benchmarks.peers import systems
from benchmarks.steps import steady


def test_p95_is_a_measured_value() -> None:
    values = [float(number) for number in range(1, 21)]

    assert report.median_and_p95(values) == {"median_s": 10.5, "p95_s": 19.0}


def test_result_file_describes_the_machine(tmp_path: Path) -> None:
    report.write(tmp_path / "deep" / "result.json", {"benchmark": "steady"})

    written = json.loads((tmp_path / "deep" / "result.json").read_text(encoding="utf-8"))
    assert written["benchmark"] == "steady"
    assert written["machine"]["cores"] >= 1


def test_missing_system_is_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Absent(systems.TorchFT):
        name = "absent"
        needs = "no_such_module_of_ours"

    monkeypatch.setattr(systems, "SYSTEMS", (Absent(), systems.PlainTorchrun()))

    found, skipped = systems.runnable()

    assert [system.name for system in found] == ["torchrun DDP"]
    assert "no_such_module_of_ours" in skipped["absent"]
    assert "absent is not measured" in capsys.readouterr().out


def test_systems_that_do_not_survive_a_kill_are_excluded_where_ranks_are_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(systems, "SYSTEMS", (systems.PlainTorchrun(), systems.ElasticTorchrun()))

    found, _ = systems.runnable(survivors=True)

    assert [system.name for system in found] == ["elastic torchrun"]


def test_tables_list_skipped_and_failed_systems() -> None:
    skipped = {"Ray Train": "ModuleNotFoundError: No module named 'ray'"}
    sizes = {"cnn, 2 ranks": {"targets": {"leave": stall_summary([])}, "audit_ok": True}}
    tables = [
        recovery.table_of(
            {"sizes": sizes, "peers": {"torchft": {"failed": "stuck\nmore"}}, "skipped": skipped}
        ),
        churn.table_of(
            {
                "systems": {"torchft": {"failed": "stuck\nmore"}},
                "skipped": skipped,
                "kills": [{"step": 10, "rank": 1}],
                "num_steps": 20,
                "world_size": 2,
                "checkpoint_every": 5,
            }
        ),
    ]

    for table in tables:
        assert "Ray Train" in table
        assert "No module named 'ray'" in table
        assert "failed: stuck" in table
        assert "more" not in table.split("failed")[1]
    assert "not run" in steady.table_of({"workloads": {}, "skipped": skipped})


def test_churn_summary_reports_a_failure_only_if_every_round_failed() -> None:
    calm = {"duration_s": 10.0, "samples_lost": 0, "steps_with_wrong_samples": 0}
    whole = {"goodput": 0.5, "wasted_steps": 4, "undisturbed": calm, "disturbed": calm}

    assert churn.summary([{"failed": "stuck"}])["failed"] == "stuck"
    found = churn.summary([{"failed": "stuck"}, whole])
    assert (found["goodput"], found["wasted_steps"]) == (0.5, 4)
    assert "failed" not in found
