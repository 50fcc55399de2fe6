from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.insight.comparison import Comparison, compare_jobs
from etrain_jupyter.insight.curves import MAX_POINTS, curves_of
from etrain_jupyter.insight.measures import clock_hours
from etrain_jupyter.insight.runs import read_run
from etrain_jupyter.log import events as t
from tests.unit.insight.logged_jobs import START, LoggedJob, logged_job


def row_of(job: LoggedJob) -> dict[str, Any]:
    [row] = compare_jobs([job]).rows
    return row


# --- one row --------------------------------------------------------------------------------------


def test_throughput_excludes_loading_and_time_between_steps() -> None:
    # Steps of 0.5 s, of which 0.1 s are loading, with 0.5 s between them.
    phases = {"data_s": 0.1, "compute_s": 0.25, "communication_s": 0.1, "optimizer_s": 0.05}
    row = row_of(logged_job("a", num_steps=10, between_s=0.5, phases=phases))

    assert row["samples_per_s"] == pytest.approx(50 / 0.4)
    assert row["samples_per_s_overall"] == pytest.approx(500 / 9.5)
    assert row["hours"] * 3600 == pytest.approx(9.5)
    assert row["step_hours"] * 3600 == pytest.approx(5.0)
    assert row["steps_per_s"] == pytest.approx(2.0)


def test_workers_are_weighted_by_the_time_of_their_steps() -> None:
    job = logged_job("a", num_steps=0)
    job.add_steps(num_steps=1, batch=8, workers=1, step_s=3.0)
    job.add_steps(num_steps=1, batch=8, workers=4, step_s=1.0, first_step=2, began_at=START + 3)

    assert row_of(job)["workers"] == 1.75


def test_time_between_an_end_and_a_resume_does_not_count() -> None:
    job = logged_job("a", num_steps=4)  # 4 steps of 0.5 s
    resumed_at = START + 86_400
    job.add(
        t.JobResumed(
            job_id=job.id, time=resumed_at, from_status="stopped", step=4, min_workers=1,
            max_workers=1,
        )
    )  # fmt: skip
    later = {"first_step": 5, "began_at": resumed_at + 3}
    job.add_steps(num_steps=2, batch=50, workers=1, step_s=0.5, **later)

    run = read_run(job)

    # The three seconds from the resume to the next step count.
    assert run.clock_h * 3600 == pytest.approx([0.5, 1.0, 1.5, 2.0, 5.5, 6.0])


def test_no_time_passes_where_a_clock_was_set_back() -> None:
    times = [100.0, 101.0, 102.0, -3498.0, -3497.0, -3497.5]
    columns = {"time": times, "samples": [1] * 6, "samples_per_s": [1.0] * 6}

    assert clock_hours(columns, []) * 3600 == pytest.approx([1, 2, 3, 3, 4, 3.5])


def test_steps_that_were_undone_and_repeated_count_once() -> None:
    job = logged_job("a", num_steps=4)
    job.add(t.JobRestored(job_id=job.id, time=START + 3, step=2, num_undone=2))
    job.add_steps(num_steps=2, batch=50, workers=1, step_s=0.5, first_step=3, began_at=START + 3)

    row = row_of(job)

    assert (row["steps"], row["samples"]) == (4, 200)
    assert row["hours"] * 3600 == pytest.approx(4.0)


def test_dollars_are_interpolated_between_updates_of_the_cost() -> None:
    job = logged_job("a", workers=2, num_steps=8, usd_per_worker_h=3600.0)  # 2 $/s, steps of 0.5 s
    run = read_run(job)

    # The log has no cost before the first update after 1 s, but the job was submitted 60 s earlier.
    assert run.positions("usd")[1:] == pytest.approx([2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert 0 < run.positions("usd")[0] < 2.0


@pytest.mark.parametrize(
    ("config", "best"),
    [
        ({}, 0.9),
        ({"early_stopping": {"metric": "score", "mode": "min"}}, 0.4),
        ({"checkpoint": {"best": {"metric": "score", "mode": "min"}}}, 0.4),
        ({"checkpoint": [], "early_stopping": "score"}, 0.9),
    ],
)
def test_direction_of_a_metric_comes_from_the_cell(config: dict[str, Any], best: float) -> None:
    job = logged_job("a", num_steps=3, config=config)
    common: dict[str, Any] = {"job_id": job.id, "time": START, "samples": 1, "duration_s": 0.1}
    scored = [(1, 0.9), (2, 0.4), (3, 0.7)]
    job.add(*(t.EvalScored(**common, step=n, scores={"score": v}) for n, v in scored))

    row = row_of(job)

    assert (row["best_score"], row["final_score"]) == (best, 0.7)


def test_metric_that_contains_loss_is_minimized() -> None:
    job = logged_job("a", num_steps=2, scores={"loss": 0.5, "perplexity": 3.0})
    values = {"samples": 1, "duration_s": 0.1, "step": 1, "epoch": 0, "time": START}
    job.add(t.EvalCompleted(job_id=job.id, loss=0.1, metrics={"perplexity": 2.0}, **values))

    assert (row_of(job)["best_loss"], row_of(job)["best_perplexity"]) == (0.1, 2.0)


# --- several jobs ---------------------------------------------------------------------------------


@given(
    workers=st.lists(st.integers(1, 512), min_size=2, max_size=5, unique=True),
    rate=st.floats(0.01, 1e6),
)
def test_linear_scaling_has_efficiency_one(workers: list[int], rate: float) -> None:
    jobs = [
        logged_job(f"j{count}", workers=count, samples_per_s=rate * count, num_steps=2)
        for count in workers
    ]

    rows = compare_jobs(jobs).rows

    assert [row["efficiency"] for row in rows] == pytest.approx([1.0] * len(workers))
    assert [row["speedup"] for row in rows] == pytest.approx([n / min(workers) for n in workers])


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"config": {"model": "Other()"}}, "model"),
        ({"config": {"data": {"train": "other"}}}, "data"),
        ({"config": {"metrics": {"f1": "f1"}}}, "metrics"),
        ({"num_train_samples": 10}, "train samples"),
        ({"config": {"loss": "mse", "model": "Other()"}}, "model, loss"),
    ],
)
def test_no_efficiency_between_different_tasks(changes: dict[str, Any], fields: str) -> None:
    jobs = [
        logged_job("one", workers=1),
        logged_job("four", workers=4, samples_per_s=300),
        logged_job("other", workers=2, **changes),
    ]

    comparison = compare_jobs(jobs)

    assert [row["efficiency"] for row in comparison.rows[:2]] == pytest.approx([1.0, 0.75])
    assert math.isnan(comparison.rows[2]["efficiency"])
    assert comparison.notes == (
        "The jobs train different tasks (one, four; other): they differ in "
        f"{fields}. Their losses and metrics are not comparable, and no speed-up or efficiency is "
        "computed between them.",
    )


def test_different_devices_are_noted() -> None:
    comparison = compare_jobs([logged_job("a"), logged_job("b", device="cuda:0")])

    assert comparison.notes == (
        "The jobs ran on different devices (cpu; cuda:0), so the efficiency includes the "
        "difference between the devices.",
    )


def test_job_without_steps_has_a_row_and_a_note() -> None:
    comparison = compare_jobs([logged_job("a"), logged_job("b", num_steps=0)])

    first, second = comparison.rows
    assert math.isnan(second["workers"])
    assert (second["steps"], second["hours"]) == (0, pytest.approx(math.nan, nan_ok=True))
    # A job that has no steps yet neither has an efficiency nor is a baseline.
    assert math.isnan(first["efficiency"])
    assert comparison.notes == (
        "b has no steps (status finished), so it has no throughput and no curves. "
        "%etrain logs b-00000000 shows its log.",
    )
    assert "b-00000000" in comparison.to_html()


def test_only_jobs_without_steps_can_be_shown() -> None:
    comparison = compare_jobs([logged_job("a", num_steps=0), logged_job("b", num_steps=0)])

    assert str(comparison).startswith("JOB")
    assert "<svg" not in comparison.to_html()
    assert len(comparison.notes) == 2


def test_one_job_has_no_efficiency() -> None:
    comparison = compare_jobs([logged_job("a")])

    assert math.isnan(comparison.rows[0]["efficiency"])
    assert comparison.notes[0].startswith("a is the only job")


def test_no_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty list of jobs") as caught:
        compare_jobs([])

    assert caught.value.hint.startswith("name them: %etrain compare")


def test_jobs_are_compared_once_and_those_of_the_same_name_by_id() -> None:
    again = logged_job("a", job_id="a-2")
    comparison = compare_jobs([logged_job("a", job_id="a-1"), again, again, logged_job("b")])

    assert [row["job"] for row in comparison.rows] == ["a-1", "a-2", "b"]


def test_missing_prices_of_some_pools_are_noted() -> None:
    comparison = compare_jobs([logged_job("a", usd_per_worker_h=1.0), logged_job("b")])

    assert comparison.notes == ("The pools of b have no prices.",)
    assert math.isnan(comparison.rows[1]["usd"])


def test_differences_have_the_keys_of_a_cell() -> None:
    batches = [{"batch": {"global_batch_size": size}, "name": str(size)} for size in (32, 64)]

    comparison = compare_jobs([logged_job(f"j{i}", config=c) for i, c in enumerate(batches)])

    assert comparison.differences == {"batch.global": ("32", "64")}
    assert "DIFFERENCES   j0  j1\nbatch.global  32  64" in str(comparison)


def test_configuration_of_another_version_is_compared_as_it_is() -> None:
    configs: list[dict[str, Any]] = [{"future": {"key": 1}}, {"future": {"key": 2}}]

    comparison = compare_jobs([logged_job(f"j{i}", config=c) for i, c in enumerate(configs)])

    assert comparison.differences == {"future.key": ("1", "2")}


# --- text, pandas ---------------------------------------------------------------------------------


def test_text_is_a_table_with_common_values_below() -> None:
    jobs = [
        logged_job("one", scores={"loss": 0.5}, usd_per_worker_h=3.06),
        logged_job("eight", workers=8, samples_per_s=790, scores={"loss": 0.5}, usd_per_worker_h=1),
    ]

    assert str(compare_jobs(jobs)).splitlines() == [
        "JOB    WORKERS  SAMPLES/S  SPEED-UP  EFFICIENCY  LOSS  TIME    COST",
        "one    1        100        1.0x      1.00        0.5   50.0 s  $0.0425",
        "eight  8        790        7.9x      0.99        0.5   6.3 s   $0.0141",
        "All jobs: status finished, device cpu, batch 50, steps 100, epochs 1.00",
    ]


def test_control_characters_of_a_log_are_escaped() -> None:
    jobs = [logged_job("a", device="\x1b]0;title\x07"), logged_job("b", device="cpu")]

    assert "\x1b" not in str(compare_jobs(jobs))


def test_frame_has_the_rows() -> None:
    pd = pytest.importorskip("pandas", reason="platform: pandas is not installed")
    comparison = compare_jobs([logged_job("one", scores={"f1": 88.0}), logged_job("two")])

    frame = comparison.to_frame()

    assert list(frame["job"]) == ["one", "two"]
    assert list(frame["best_f1"].isna()) == [False, True]
    assert set(pd.Index(frame.columns)) == set(comparison.rows[0])


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(ConfigError, match="needs the package pandas"):
        compare_jobs([logged_job("a")]).to_frame()


# --- HTML -----------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Checks that tags are balanced, and collects their names and attributes."""

    VOID = frozenset({"meta", "input", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.found)


def three_jobs() -> Comparison:
    return compare_jobs(
        [
            logged_job(
                f"j{n}", workers=n, samples_per_s=90 * n, scores={"f1": 80 + n}, usd_per_worker_h=1
            )
            for n in (1, 2, 4)
        ]
    )  # fmt: skip


def test_page_is_self_contained_and_has_a_chart_per_column_and_axis() -> None:
    page = three_jobs().to_html()

    tags = Tags(page)
    assert tags.count("script") == 0
    links = [attrs for _, attrs in tags.found if {"src", "href"} & attrs.keys()]
    assert links == []
    assert "default-src 'none'" in page
    # loss, two evaluations (loss and f1) and workers, over four axes; and the scaling
    assert tags.count("svg") == 4 * 4 + 1
    assert [attrs["id"] for tag, attrs in tags.found if tag == "input"] == [
        "over-steps", "over-samples", "over-time", "over-usd",
    ]  # fmt: skip
    assert page.count("j4") > 3


def test_page_of_jobs_without_prices_has_no_axis_of_dollars() -> None:
    page = compare_jobs([logged_job("a"), logged_job("b")]).to_html()

    assert "over-time" in page
    assert "over-usd" not in page


def test_output_of_a_cell_has_images_that_a_sanitizer_keeps() -> None:
    tags = Tags(three_jobs()._repr_html_())

    assert tags.count("img") == 5
    assert {tag for tag, _ in tags.found} & {"script", "style", "svg", "input"} == set()


@given(
    text=st.text(st.characters(codec="utf-8"), max_size=20) | st.just('"><script>alert(1)</script>')
)
def test_text_of_a_log_cannot_add_tags(text: str) -> None:
    # Another user may have written the log: model, metrics and devices are any text.
    jobs = [
        logged_job(
            name, num_steps=2, config={"model": text + name}, scores={text: 1.0}, device=text + name
        )
        for name in "ab"
    ]

    comparison = compare_jobs(jobs)

    assert Tags(comparison.to_html()).count("script") == 0
    assert Tags(comparison._repr_html_()).count("script") == 0


def test_page_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    assert three_jobs().write_html(path) == path

    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "analysis.ipynb"
    path.write_text("work of a day")

    with pytest.raises(ConfigError, match=r"does not end in \.html") as caught:
        three_jobs().write_html(path)

    assert caught.value.hint == "write analysis.html"
    assert path.read_text() == "work of a day"


def test_page_in_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EtrainError, match="No such file or directory"):
        three_jobs().write_html(tmp_path / "missing" / "report.html")


# --- curves ---------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000))
def test_reduced_curve_stays_within_the_values_and_in_order(losses: list[float]) -> None:
    job = logged_job("a", num_steps=len(losses), batch=1, lr=losses)
    run = read_run(job)

    [curve] = curves_of(["a"], [run], "lr", "samples")

    assert len(curve.x) <= MAX_POINTS
    assert np.all(np.diff(curve.x) > 0)
    assert min(losses) - 1e-6 <= curve.y.min() <= curve.y.max() <= max(losses) + 1e-6


def test_curve_of_workers_keeps_every_change() -> None:
    job = logged_job("a", num_steps=0)
    for number, workers in enumerate((1, 3, 2)):
        job.add_steps(
            num_steps=1000, batch=1, workers=workers, step_s=1.0,
            first_step=1 + 1000 * number, began_at=START + 1000 * number,
        )  # fmt: skip

    [curve] = curves_of(["a"], [read_run(job)], "world_size", "steps")

    assert curve.x.tolist() == [1, 1001, 2001, 3000]
    assert curve.y.tolist() == [1, 3, 2, 2]


def test_values_that_are_not_finite_are_left_out() -> None:
    run = read_run(logged_job("a", num_steps=5, lr=[1.0, math.nan, math.inf, 1e301, 2.0]))

    [curve] = curves_of(["a"], [run], "lr", "steps")

    assert (curve.x.tolist(), curve.y.tolist()) == ([1, 5], [1.0, 2.0])
