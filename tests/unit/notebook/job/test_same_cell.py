from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.errors import PoolError
from etrain_jupyter.notebook.job import same_cell
from etrain_jupyter.notebook.job.job_record import RECORD_FILE, RunRecord
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.same_cell import (
    EarlierJob,
    explain,
    is_same_cell,
    normalize,
    warn_of_earlier_jobs,
)
from etrain_jupyter.pools import SchedulerAddress
from etrain_jupyter.wire.requests import JobList, ListJobs

ADDRESS = SchedulerAddress(address="tls://127.0.0.1:1", cluster_id="local-1", state_dir="/s")
CELL = "model: Net()\nloss: f\n"


def make_record(job_id: str, **values: Any) -> RunRecord:
    given = {"name": "net", "created": 1.0, "folder": Path("/runs") / job_id, "cell": CELL}
    return RunRecord(**{**given, **values, "job_id": job_id})


NEW = make_record("net-new")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Rows of the scheduler's list of jobs; put an exception in for it to fail."""
    rows: list[Any] = []

    def ask(address: SchedulerAddress, request: ListJobs, *, timeout_s: float) -> JobList:
        assert address == ADDRESS
        if rows and isinstance(rows[-1], Exception):
            raise rows[-1]
        return JobList(jobs=tuple(rows))

    monkeypatch.setattr(same_cell, "ask", ask)
    return rows


def row(job_id: str, status: str = "running") -> dict[str, Any]:
    return {"job_id": job_id, "status": status, "step": 1200, "total_steps": 5000}


def add_job(store: RunStore, job_id: str, **values: Any) -> RunRecord:
    given = {"name": "net", "created": 1.0, "cell": CELL, "pool": "local"}
    return store.create({**given, **values}, job_id=job_id)


def test_warning_names_the_training_job_its_pool_and_the_commands(
    tmp_path: Path, rows: list[Any]
) -> None:
    store = RunStore(tmp_path)
    add_job(store, "net-00000001", pool="spot")
    new = add_job(store, "net-00000002", created=2.0)
    rows += [row("net-00000001"), row("net-00000002", "submitted")]

    assert warn_of_earlier_jobs(new, store, ADDRESS) == [
        "job net-00000001, started from this same cell, is still training on pool spot (step 1,200 "
        "of 5,000), and the new job net-00000002 shares the pool's workers with it. To stop the "
        "earlier job with a checkpoint, type %etrain stop net-00000001; to follow it, %etrain "
        "attach net-00000001."
    ]


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_ended_job_of_the_cell_is_not_mentioned(
    tmp_path: Path, rows: list[Any], status: str
) -> None:
    store = RunStore(tmp_path)
    add_job(store, "net-00000001")
    new = add_job(store, "net-00000002")
    rows += [row("net-00000001", status), row("net-00000002")]

    assert warn_of_earlier_jobs(new, store, ADDRESS) == []


def test_jobs_of_other_cells_stores_and_owners_are_not_mentioned(
    tmp_path: Path, rows: list[Any]
) -> None:
    store = RunStore(tmp_path)
    new = add_job(store, "net-00000002")
    add_job(store, "net-00000003", cell=CELL + "seed: 1\n")
    (tmp_path / "net-00000004").mkdir()
    (tmp_path / "net-00000004" / RECORD_FILE).write_text("not JSON")
    rows += [row(job) for job in ("net-00000003", "net-00000004", "elsewhere-00000005", "../x")]

    assert warn_of_earlier_jobs(new, store, ADDRESS) == []


def test_silent_scheduler_gives_no_warning(tmp_path: Path, rows: list[Any]) -> None:
    rows.append(PoolError("the scheduler did not answer etrain_jobs within 5 s"))

    assert warn_of_earlier_jobs(NEW, RunStore(tmp_path), ADDRESS) == []


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ("running", "is still training on pool local"),
        ("paused", "is paused on pool local"),
        ("waiting", "is waiting for workers on pool local"),
        ("submitted", "is about to start on pool local"),
    ],
)
def test_warning_describes_the_status(status: str, text: str) -> None:
    [warning] = explain(NEW, [EarlierJob(record=make_record("net-old"), status=status)])

    assert text in warning
    assert "(step 0)" in warning


def test_warnings_name_the_newest_jobs_and_count_the_rest() -> None:
    jobs = [EarlierJob(record=make_record(f"net-{i}"), status="running") for i in range(5)]

    warnings = explain(NEW, jobs)

    assert [w.partition(",")[0] for w in warnings[:3]] == ["job net-0", "job net-1", "job net-2"]
    assert warnings[3:] == ["2 more of this cell have not ended: %etrain ls lists them."]


def test_newest_job_comes_first(tmp_path: Path, rows: list[Any]) -> None:
    store = RunStore(tmp_path)
    add_job(store, "net-00000001", created=1.0)
    add_job(store, "net-00000002", created=2.0)
    rows += [row("net-00000001"), row("net-00000002")]

    first, second = warn_of_earlier_jobs(NEW, store, ADDRESS)

    assert first.startswith("job net-00000002")
    assert second.startswith("job net-00000001")


def test_comments_and_layout_do_not_make_another_cell() -> None:
    changed = "# try again\n\nmodel: Net()   \nloss: f"

    assert is_same_cell(NEW, make_record("other", cell=changed))
    assert not is_same_cell(NEW, make_record("other", cell="model: Net()\nloss: g\n"))


def test_indentation_makes_another_cell() -> None:
    one = make_record("one", cell="data:\n  train: a\nseed: 1")

    assert not is_same_cell(one, make_record("two", cell="data:\n  train: a\n  seed: 1"))


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"config": {"name": "b", "lr": 0.1}}, True),
        ({"config": {"name": "a", "lr": 0.2}}, False),
        ({"bundle_digest": "other"}, False),
        ({"cell": CELL}, False),
    ],
)
def test_calls_from_python_are_compared_by_their_keys_and_objects(
    change: dict[str, Any], is_same: bool
) -> None:
    call = {"cell": "", "config": {"name": "a", "lr": 0.1}, "bundle_digest": "digest"}

    assert is_same_cell(make_record("one", **call), make_record("two", **call | change)) is is_same


def test_warning_about_a_call_from_python_says_so() -> None:
    new = make_record("net-new", cell="")

    [warning] = explain(new, [EarlierJob(record=make_record("net-old", cell=""), status="running")])

    assert "started from this same call" in warning


@given(st.lists(st.sampled_from(["model: f", "  width: 2", "", "   ", "# note", "  # note"])))
def test_normalized_text_is_stable_and_keeps_every_key(lines: list[str]) -> None:
    once = normalize("\n".join(lines))

    assert normalize(once) == once
    assert [line for line in lines if ":" in line] == once.splitlines()
