"""The figures of ``benchmarks diagnose`` from the results of its jobs."""

from __future__ import annotations

import pytest

from benchmarks.advice.diagnose import error_of, limited, row_of
from benchmarks.advice.diagnosed_jobs import BODY, JOBS
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.insight.diagnosis.rules import CAUSES


def test_error_compares_the_throughputs_and_not_the_gains() -> None:
    # Twice as fast was predicted, and it is 1.6 times as fast.
    assert error_of({"gain": 1.0, "real_gain": 0.6}) == pytest.approx(0.25)
    assert error_of({"gain": None}) is None


def test_every_job_has_a_known_cause_and_a_valid_cell() -> None:
    assert len(JOBS) == 12
    for job in JOBS.values():
        assert job.cause in CAUSES
        TrainConfig.model_validate({**BODY, **job.keys, "steps": 10})


def test_job_that_failed_has_a_row() -> None:
    row = row_of("slow link", {"error": "timeout after 240 s"})
    assert row[:3] == ("slow link", "communication", "failed")


def test_job_that_only_ran_under_traceml_has_a_row() -> None:
    row = row_of("slow link", {"traceml": {"verdict": "INPUT-BOUND"}})
    assert row == ("slow link", "communication", "not run", "", "", "", "INPUT-BOUND")


def test_only_a_slow_link_needs_a_network_namespace() -> None:
    assert limited(JOBS["computation"], ["true"]) == ["true"]
    command = limited(JOBS["slow link"], ["true"])
    assert command[:2] == ["unshare", "--net"]
    assert "tbf rate 500mbit" in command[4]
    assert command[-1] == "true"
