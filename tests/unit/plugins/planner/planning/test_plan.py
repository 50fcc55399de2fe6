"""Plans: from a log to text, HTML, a table and a chart."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.errors import ConfigError, TraceError
from etrain_jupyter.plugins.planner.planning.line import plan_job, types_of
from etrain_jupyter.plugins.planner.planning.plan import TrainingPlan
from tests.unit.insight.logged_jobs import LoggedJob
from tests.unit.plugins.planner.planning.measured_jobs import CPU, GPUS, measured_job, model_of


def plan_of(job: Any, **options: Any) -> TrainingPlan:
    """Plan a job of the pool ``local`` on two cores."""
    return plan_job(job, pool="local", cores=2, **options)


def on_gpus(*, samples: int = 2_000_000) -> LoggedJob:
    """Return a job that was measured on one and two g5.xlarge."""
    at = [(1, 512), (1, 64), (2, 512)]
    return measured_job(
        GPUS, at, machine="g5.xlarge", lifecycle="spot", usd_per_h=0.4, total_samples=samples
    )


def test_text_has_the_recommendation_the_options_and_what_was_guessed() -> None:
    plan = plan_of(on_gpus(), deadline_h=5.0, types=("g5.xlarge", "g6.xlarge"))

    head, table, notes = str(plan).split("\n\n")
    first, size, second = head.splitlines()
    assert first == (
        "Plan for net-00000000: 1,978,240 samples left of 2,000,000, predicted from 60 steps with "
        "3 combinations of workers and batch."
    )
    assert size == "The model has 10,000,000 parameters."
    assert re.fullmatch(
        r"Recommended: \d workers on g\d\.xlarge spot, \d\.\d h and \$\d+\.\d\d \(\+-\d+%\): the "
        r"cheapest that meets the deadline of 5\.0 h even if steps are \d+% slower, with .* to "
        r"spare\.",
        second,
    )
    assert table.splitlines()[0].split() == [
        "MACHINE", "WORKERS", "PAID", "BATCH", "STEP", "SAMPLES/S", "EFFICIENCY", "TIME", "COST",
        "+-", "BASIS",
    ]  # fmt: skip
    assert sum(line.startswith(">") for line in table.splitlines()) == 2  # the row and the legend
    assert "Guessed: g6.xlarge has not run the job." in notes
    assert "Guessed: a spot machine costs 30 % of one on demand (g6.xlarge)." in notes
    assert "EC2 reclaims 0.6 spot machines per machine and hour" in notes


def test_predicted_time_is_that_of_the_true_steps() -> None:
    plan = plan_of(on_gpus(), types=("g5.xlarge",))

    for option in plan.options:
        if option.workers <= 8:
            true_s = GPUS.predict(option.workers, 512 / option.workers).step_s
            assert option.step_s == pytest.approx(true_s, rel=0.1)
            assert option.error < 0.1


def test_plan_of_a_local_job_has_worker_hours_instead_of_dollars() -> None:
    plan = plan_of(measured_job(CPU, [(1, 64), (2, 64)]))

    assert plan.recommended is not None
    assert math.isnan(plan.recommended.usd)
    assert "COST" not in str(plan)
    assert "no price is known" in str(plan)
    assert "* no option is both faster and of fewer worker hours" in str(plan)
    assert plan._repr_html_().count("<tr>") == len(plan.options) + 1


def test_budget_without_prices_gives_no_recommendation_but_says_why() -> None:
    plan = plan_of(measured_job(CPU, [(1, 64), (2, 64)]), budget_usd=5.0)

    assert plan.recommended is None
    assert "Recommended: none; the budget of $5.00 cannot be checked" in str(plan)


def test_deadline_beyond_the_limit_names_the_number_of_workers_that_would_do() -> None:
    plan = plan_of(on_gpus(), deadline_h=5.0, workers=2, types=("g5.xlarge",))

    assert plan.recommended is None
    [workers] = re.findall(r"Alternatives: --deadline \S+; --workers (\d+)", plan.advice.reason)
    again = plan_of(on_gpus(), deadline_h=5.0, workers=int(workers), types=("g5.xlarge",))
    assert again.recommended is not None


def test_finished_job_is_planned_for_another_run() -> None:
    plan = plan_of(measured_job(CPU, [(1, 64)], status="finished"))

    assert "1,000,000 samples of another run" in str(plan)


def test_batch_per_worker_says_that_more_samples_may_be_needed() -> None:
    plan = plan_of(measured_job(CPU, [(1, 64), (2, 128)], per_worker=True))

    assert "a larger batch may need more samples" in str(plan)


def test_measured_noise_shows_how_much_samples_contribute_in_larger_batches() -> None:
    job = measured_job(CPU, [(1, 64), (2, 128)], per_worker=True, noise=(4.0, 1.0))

    plan = plan_of(job, workers=4)

    # AdaScale's gain of four workers over one is 2.5, for four times the samples.
    progress = {one.workers: one.statistical_efficiency for one in plan.options}
    assert progress[1] == 1.0
    assert progress[4] == pytest.approx(2.5 / 4)
    assert "PROGRESS" in str(plan)
    assert "by the measured gradient noise" in str(plan)


def test_progress_of_samples_is_absent_without_noise_and_for_a_fixed_batch() -> None:
    unknown = plan_of(measured_job(CPU, [(1, 64), (2, 128)], per_worker=True))
    fixed = plan_of(measured_job(CPU, [(1, 64), (2, 64)], noise=(4.0, 1.0)))

    assert all(math.isnan(one.statistical_efficiency) for one in unknown.options)
    assert all(one.statistical_efficiency == 1.0 for one in fixed.options)
    for plan in (unknown, fixed):
        assert "PROGRESS" not in str(plan)


def test_html_has_the_table_and_the_chart_as_an_image_and_escapes_names() -> None:
    job = measured_job(CPU, [(1, 64)], device="<b>cpu</b>")

    html = plan_of(job)._repr_html_()

    assert "<b>" not in html
    assert "&lt;b&gt;cpu" in html
    assert html.count('<img alt="chart" src="data:image/svg+xml;base64,') == 1


def test_html_explains_the_marks_and_the_colors_of_the_chart() -> None:
    plan = plan_of(on_gpus(), deadline_h=5.0, types=("g5.xlarge", "g6.xlarge"))

    html = plan._repr_html_()

    row = r'color:(#\w+)">●</span> (\S*)</th><td>([^<]+)</td><td>\d+</td><td>([^<]+)<'
    rows = re.findall(row, html)
    colors = {(machine, paid): color for color, _, machine, paid in rows}
    assert len(set(colors.values())) == len(colors) == 4
    assert [mark for _, mark, *_ in rows].count("&gt;") == 1
    assert "&gt; recommended; * no option is both faster and cheaper; 1" in html
    assert "more options are in plan.to_frame(); the dots have the colors of the chart<" in html


def test_frame_has_all_options() -> None:
    pytest.importorskip("pandas")
    plan = plan_of(on_gpus(), deadline_h=5.0, types=("g5.xlarge", "g6.xlarge", "p3.2xlarge"))

    frame = plan.to_frame()

    assert len(frame) == len(plan.options) > 16
    assert f"{len(frame) - 16} more options are in plan.to_frame()." in str(plan)
    assert list(frame[frame.is_recommended].workers) == [plan.recommended.workers]  # type: ignore[union-attr]


def test_figure_shows_cost_over_time_with_the_front_and_the_recommendation() -> None:
    pytest.importorskip("matplotlib")
    plan = plan_of(on_gpus(), types=("g5.xlarge",))

    [axis] = plan.plot().axes

    labels = [line.get_label() for line in axis.get_lines()]
    assert labels == [
        "g5.xlarge on demand", "g5.xlarge spot", "not beaten in time and cost", "recommended",
    ]  # fmt: skip
    assert axis.get_xlabel() == "hours"


def test_figure_without_prices_shows_throughput_by_workers() -> None:
    pytest.importorskip("matplotlib")

    [axis] = plan_of(measured_job(CPU, [(1, 64), (2, 64)])).plot().axes

    assert (axis.get_xlabel(), axis.get_ylabel()) == ("workers", "samples/s")
    assert "linear scaling" in [line.get_label() for line in axis.get_lines()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_usd": 0.0}, "--budget 0: US dollars above 0"),
        ({"budget_usd": math.nan}, "--budget nan: US dollars above 0"),
        ({"deadline_h": -1.0}, "--deadline -1h: a time above 0"),
        ({"workers": 0}, "--workers 0 is not between 1 and 1000"),
        ({"types": ("g5.xlarge",)}, "cannot be predicted on any of g5.xlarge"),
    ],
)
def test_invalid_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_of(measured_job(CPU, [(1, 64)]), **options)


def test_missing_trace_is_refused_before_the_plan_is_made(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv does not exist"):
        plan_of(on_gpus(), types=("g5.xlarge",), trace=str(tmp_path / "none.csv"))


def test_trace_simulates_the_spot_options(tmp_path: Path) -> None:
    trace = tmp_path / "market.csv"
    trace.write_text("seconds,capacity\n0,4\n7200,2\n10800,4\n36000,4\n")

    plan = plan_of(on_gpus(samples=200_000), types=("g5.xlarge",), workers=8, trace=str(trace))

    assert {one.policy for one in plan.traced} == {"spot", "deadline"}
    assert all(one.option.lifecycle == "spot" for one in plan.traced)
    assert max(one.option.machines for one in plan.traced) <= 4
    for one in plan.traced:
        # The trace cannot make a job faster than it is on demand.
        same = next(o for o in plan.options
                    if (o.workers, o.lifecycle) == (one.option.workers, "on-demand"))  # fmt: skip
        assert one.median_hours >= 0.9 * same.hours
        assert one.mean_usd > 0
    assert "SIMULATED  WORKERS  POLICY" in str(plan)
    assert "20 runs of each policy" in str(plan)
    assert "TIME (MEDIAN)" in plan._repr_html_()


def test_options_that_the_trace_or_the_deadline_excludes_are_named(tmp_path: Path) -> None:
    trace = tmp_path / "market.csv"
    trace.write_text("seconds,capacity\n0,3\n36000,3\n")

    plan = plan_of(
        on_gpus(samples=200_000), types=("g5.xlarge",), workers=4, trace=str(trace), deadline_h=0.8
    )

    notes = " ".join(plan.notes)
    assert "4 workers on g5.xlarge spot was not simulated: the trace never has 4 machines" in notes
    assert "1 worker on g5.xlarge spot was not simulated: with replacements of lost" in notes


@pytest.mark.parametrize(
    ("text", "types"),
    [(None, ()), ("", ()), ("g5.xlarge", ("g5.xlarge",)), ("a, b,a,", ("a", "b"))],
)
def test_list_of_types(text: str | None, types: tuple[str, ...]) -> None:
    assert types_of(text) == types


@settings(max_examples=20, deadline=None)
@given(
    fixed_ms=st.floats(0.1, 100), sample_ms=st.floats(0.01, 50), workers=st.integers(1, 40),
    deadline_h=st.none() | st.floats(0.01, 100), batch=st.integers(1, 300),
)  # fmt: skip
def test_plans_are_finite_and_recommend_one_of_their_options(
    fixed_ms: float, sample_ms: float, workers: int, deadline_h: float | None, batch: int
) -> None:
    model = model_of(CPU.placement, fixed_s=fixed_ms / 1e3, sample_s=sample_ms / 1e3,
                     s_per_byte=1e-9)  # fmt: skip
    plan = plan_of(
        measured_job(model, [(1, batch)]), deadline_h=deadline_h, workers=workers
    )  # fmt: skip

    assert 1 <= max(one.workers for one in plan.options) <= min(workers, batch)
    assert all(0 < one.hours < math.inf for one in plan.options)
    assert all(0 < one.efficiency <= 1.001 for one in plan.options)
    assert any(one.is_on_front for one in plan.options)
    assert plan.recommended is None or plan.recommended in plan.options
    assert str(plan)
    assert plan._repr_html_()
