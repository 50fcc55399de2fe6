"""Diagnosis of a job from its log: what is read, the remedy, and its text, HTML and table."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.insight.diagnosis.measured import fixed_time, read_step_times
from etrain_jupyter.insight.diagnosis.remedies import Facts, Remedy, remedy_of
from etrain_jupyter.insight.diagnosis.report import Diagnosis, diagnose_job
from etrain_jupyter.insight.diagnosis.rules import CAUSES, Cause, Finding, StepParts
from etrain_jupyter.log import events as t
from tests.unit.insight.diagnosis.diagnosed_jobs import (
    job_with_times,
    joined,
    lockstep,
    parts,
    timed,
)
from tests.unit.insight.logged_jobs import CONFIG, logged_job

SLOW_DATA = {"data_s": 0.03, "compute_s": 0.01}
INPUT = {"w0": SLOW_DATA, "w1": SLOW_DATA}
STRAGGLER = {
    "w0": {"compute_s": 0.01, "communication_s": 0.03, "wait_s": 0.03},
    "w1": {"compute_s": 0.04},
}


# --- reading the log ------------------------------------------------------------------------------


def test_parts_are_means_over_the_steps_of_each_worker() -> None:
    seconds = {
        "data_s": 0.01, "compute_s": 0.02, "metrics_s": 0.005, "communication_s": 0.004,
        "wait_s": 0.003, "optimizer_s": 0.001, "elapsed_s": 0.04, "evaluation_s": 0.002,
        "checkpoint_s": 0.006,
    }  # fmt: skip

    [worker] = read_step_times(job_with_times({"w0": seconds})).workers

    expected = StepParts(
        worker="w0", place="10.0.0.1 (g5.xlarge)", data_s=0.01, passes_s=0.015, metrics_s=0.005,
        communication_s=0.004, wait_s=0.003, optimizer_s=0.001, rest_s=0.005, evaluation_s=0.002,
        checkpoint_s=0.006,
    )  # fmt: skip
    for name, value in vars(expected).items():
        assert getattr(worker, name) == (value if isinstance(value, str) else pytest.approx(value))
    assert worker.total_s == pytest.approx(0.048)


def test_first_report_of_a_generation_is_left_out_if_the_others_are_enough() -> None:
    job = job_with_times({"w0": {"compute_s": 9.0}}, num_reports=1, steps_per_report=5)
    for number in (1, 2):
        job.add(timed(job, "w0", 0, SLOW_DATA, num_steps=20, step=5 + 20 * number, world_size=1))

    measured = read_step_times(job)

    assert (measured.num_steps, measured.last_step) == (40, 45)
    assert measured.workers[0].total_s == pytest.approx(0.04)


def test_checkpoints_of_the_steps_give_their_interval_and_their_slowdown() -> None:
    job = job_with_times({"w0": {"compute_s": 0.01}}, num_reports=1, steps_per_report=100)
    for step in (20, 40, 60, 80, 100, 120):
        job.add(
            t.CheckpointCommitted(
                job_id=job.id, time=step, step=step, manifest="", size_bytes=1, stall_s=0.001,
                duration_s=0.2, slowed_s=0.05,
            )
        )  # fmt: skip

    measured = read_step_times(job)

    # The last one is after the measured steps.
    assert measured.saves.steps_between == 20
    assert measured.saves.writing_s == pytest.approx(5 * 0.2 / 100)
    assert measured.workers[0].slowed_s == pytest.approx(5 * 0.05 / 100)


def test_log_without_checkpoints_has_no_slowdown() -> None:
    measured = read_step_times(job_with_times(INPUT))

    assert math.isnan(measured.saves.steps_between)
    assert (measured.saves.writing_s, measured.workers[0].slowed_s) == (0.0, 0.0)


def test_newest_generation_with_enough_steps_is_diagnosed() -> None:
    job = job_with_times(INPUT)
    job.add(joined(job, "w2", 0))
    for generation, count in ((2, 30), (3, 4)):
        job.add(
            timed(job, "w2", 0, {"compute_s": 0.5}, num_steps=count, step=300,
                  world_size=1, generation=generation)
        )  # fmt: skip

    measured = read_step_times(job)

    assert measured.generation == 2
    assert [one.worker for one in measured.workers] == ["w2"]


def test_report_without_steps_does_not_count() -> None:
    job = job_with_times(INPUT)
    report = timed(job, "w0", 0, {}, num_steps=1, step=200, world_size=1, generation=9)
    job.add(dataclasses.replace(report, num_steps=0))

    assert read_step_times(job).generation == 1


def test_values_of_a_forged_log_are_not_used() -> None:
    seconds = {"data_s": math.nan, "compute_s": 0.01, "optimizer_s": -5.0, "elapsed_s": math.inf}

    [worker] = read_step_times(job_with_times({"w0": seconds})).workers

    assert (worker.data_s, worker.optimizer_s, worker.rest_s) == (0.0, 0.0, 0.0)
    assert "compute-bound" in str(diagnose_job(job_with_times({"w0": seconds})))


def test_job_without_steps_is_an_error_with_a_next_step() -> None:
    job = logged_job("digits", num_steps=0)

    with pytest.raises(ConfigError, match="digits-00000000 has no steps") as caught:
        diagnose_job(job)

    assert "%etrain logs digits-00000000" in caught.value.hint


def test_job_without_times_is_an_error_with_the_number_of_its_steps() -> None:
    with pytest.raises(ConfigError, match="has 7 steps, but no worker has reported"):
        diagnose_job(logged_job("digits", num_steps=7))


@given(st.floats(0, 1), st.floats(0.0001, 0.1))
def test_fixed_time_is_that_of_a_step_without_samples(fixed_s: float, per_sample_s: float) -> None:
    samples = np.array([64.0, 64, 64, 16] * 4)
    columns = {
        "generation": np.ones(16), "samples": samples, "compute_s": fixed_s + per_sample_s * samples
    }  # fmt: skip

    assert fixed_time(columns, 1) == pytest.approx(fixed_s, abs=1e-6)
    assert fixed_time(columns, 2) is None


def test_fixed_time_is_unknown_with_steps_of_one_size_or_few_smaller_ones() -> None:
    samples = np.array([64.0] * 8)
    columns = {"generation": np.ones(8), "samples": samples, "compute_s": samples}
    assert fixed_time(columns, 1) is None

    samples[-2:] = 16
    assert fixed_time(columns, 1) is None


# --- remedies -------------------------------------------------------------------------------------


def remedy(cause: Cause, workers: list[StepParts], **more: Any) -> Remedy:
    config = TrainConfig.model_validate({**CONFIG, **more.pop("config", {})})
    facts = Facts(config=config, workers=workers, fixed_s=more.pop("fixed_s", None), **more)
    return remedy_of(Finding(cause=cause, share=0.5), facts)


def test_loaders_are_as_many_as_hide_the_loading() -> None:
    found = remedy("input", [parts(data_s=0.03)])

    assert found.line == "data: {train: train_set, eval: test_set, num_workers: 4}"
    assert found.gain == pytest.approx(3.0)


def test_loaders_that_are_the_limit_are_increased() -> None:
    found = remedy(
        "input",
        [parts(data_s=0.01)],
        config={"data": {"train": "train_set", "num_workers": 2}},
    )

    assert "num_workers: 4" in found.line
    assert found.gain == pytest.approx(1.0)


def test_exchange_and_update_are_needed_once_for_four_passes() -> None:
    workers = lockstep(parts("w0"), parts("w1"), transfer_s=0.03)

    found = remedy("communication", workers, config={"batch": {"global": 64}})

    assert found.line == "batch: {global: 256, aggregation_frequency: 4}"
    assert found.gain == pytest.approx(4 * 40 / (4 * 10 + 30) - 1)


def test_larger_batch_needs_the_fixed_time_once() -> None:
    found = remedy(
        "overhead", [parts(passes_s=0.010)], fixed_s=0.009, config={"batch": {"per_worker": 2}}
    )

    assert found.line == "batch: {per_worker: 8}"
    assert found.gain == pytest.approx(4 * 10 / (9 + 4 * 1) - 1)


def test_without_the_straggler_the_other_workers_take_over_its_samples() -> None:
    workers = lockstep(parts("w0"), parts("w1"), parts("w2", passes_s=0.045))

    found = remedy("straggler", workers, running_job="digits-1")
    per_worker = remedy("straggler", workers, config={"batch": {"per_worker": 8}})

    assert found.line == "%etrain preempt w2 --job digits-1"
    assert found.gain == pytest.approx(45 / 15 - 1)
    assert (per_worker.line, per_worker.gain) == ("", pytest.approx(45 / 10 * 2 / 3 - 1))


@pytest.mark.parametrize("batch", [{"global": 32}, {"per_worker": 8}])
def test_straggler_without_which_training_is_slower_gets_fewer_samples(
    batch: dict[str, int],
) -> None:
    workers = lockstep(parts("w0"), parts("w1", passes_s=0.013))

    found = remedy("straggler", workers, running_job="digits-1", config={"batch": batch})

    assert found.text.startswith("give w1 fewer samples of each step")
    assert yaml.safe_load(found.line) == {"batch": {**batch, "split": "auto"}}
    # Both take 2 / (1 / 10 + 1 / 13) = 11.3 ms instead of 13 ms.
    assert found.gain == pytest.approx(13 / (2 / (1 / 10 + 1 / 13)) - 1)


def test_time_that_does_not_depend_on_the_samples_stays_with_fewer_of_them() -> None:
    workers = lockstep(parts("w0"), parts("w1", passes_s=0.013, optimizer_s=0.004))

    found = remedy("straggler", workers)

    own_s = (2 + 4 / 13) / (1 / 10 + 1 / 13)
    assert found.gain == pytest.approx(17 / own_s - 1)


@pytest.mark.parametrize("config", [{"batch": {"split": "auto"}}, {"reproducible": True}])
def test_straggler_whose_share_cannot_change_is_to_be_replaced(config: dict[str, Any]) -> None:
    workers = lockstep(parts("w0"), parts("w1", passes_s=0.013))

    found = remedy("straggler", workers, running_job="digits-1", config=config)

    assert found.text.startswith("replace w1 by a worker as fast as the others")
    assert (found.line, found.gain) == ("", pytest.approx(0.3))


def test_more_workers_are_not_suggested_if_the_exchange_takes_what_they_save() -> None:
    workers = lockstep(parts("w0"), parts("w1"), transfer_s=0.012)

    found = remedy("compute", workers, running_job="digits-1")

    assert found.text.startswith("keep 2 workers")
    assert found.line == ""
    assert found.gain == pytest.approx(22 / (22 - 5 + 12 * 0.5) - 1)


def test_gain_of_a_second_worker_is_not_predicted_but_that_of_the_fourth_is() -> None:
    one = remedy("compute", [parts()])
    two = remedy("compute", lockstep(parts("w0"), parts("w1"), transfer_s=0.002))

    assert (one.line, one.gain) == ("workers: {min: 1, max: 2}", None)
    assert two.gain == pytest.approx(12 / (12 - 5 + 2 * (1.5 - 1)) - 1)


@pytest.mark.parametrize(
    ("gradient_bytes", "transfer_ms"),
    [
        (1e9, 2 * 1.5),  # the volume: 3/4 instead of 1/2 of the gradients, twice
        (1.5e6, 2 * 1.5),  # one message between two workers, a ring of four
        (0.0, 2 * 2),  # the latency of 2 messages instead of 1
        (125_000, 1 * 2 + 1 * 2),  # 1 ms of it over a link of 1 Gbit/s
    ],
)
def test_exchange_of_small_gradients_grows_with_the_rounds(
    gradient_bytes: float, transfer_ms: float
) -> None:
    workers = lockstep(parts("w0"), parts("w1"), transfer_s=0.002)

    found = remedy("compute", workers, gradient_bytes=gradient_bytes)

    assert found.gain == pytest.approx(12 / (12 - 5 + transfer_ms - 2) - 1)


def test_more_workers_than_cores_take_turns_in_the_part_that_needs_a_core() -> None:
    # A device computes for 80 ms; 6 ms of each step need a core, 2 ms of these in the exchange.
    seconds = {"passes_s": 0.080, "rest_s": 0.004, "cpu_s": 0.006}
    workers = lockstep(parts("w0", **seconds), parts("w1", **seconds), transfer_s=0.002)

    unlimited = remedy("compute", workers)
    two_cores, four_cores = (remedy("compute", workers, cores=cores) for cores in (2, 4))

    assert unlimited.gain == pytest.approx(86 / (86 - 40 + 2 * 0.5) - 1)
    assert two_cores.gain == pytest.approx(86 / (86 - 40 + 2 * 0.5 + 6) - 1)
    assert "on 4 workers instead of 2, on the 2 cores of this machine" in two_cores.text
    assert four_cores == unlimited


@pytest.mark.parametrize("batch", [{"global": 64}, {"per_worker": 32}])
def test_more_workers_are_not_suggested_if_the_cores_are_busy(batch: dict[str, int]) -> None:
    seconds = {"passes_s": 0.080, "rest_s": 0.004, "cpu_s": 0.086}
    workers = lockstep(parts("w0", **seconds), parts("w1", **seconds), transfer_s=0.002)

    found = remedy("compute", workers, cores=2, config={"batch": batch})

    assert found.text.startswith("keep 2 workers: 4 would share the 2 cores of this machine")
    assert found.line == ""


def test_threads_of_a_worker_count_as_cores_that_it_needs() -> None:
    # 160 ms on two cores in 80 ms.
    seconds = {"passes_s": 0.080, "cpu_s": 0.160}
    workers = lockstep(parts("w0", **seconds), parts("w1", **seconds))

    assert remedy("compute", workers, cores=8).gain == pytest.approx(1.0)
    assert remedy("compute", workers, cores=4).gain == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("joined_with", "share"),
    [
        ({}, True),
        ({"device": "cuda:0"}, False),
        ({"machine": "c7i.large"}, False),
        ({"address": "tls://10.0.0.7:40000"}, False),
    ],
)
def test_workers_share_cores_in_the_slots_of_this_machine(
    joined_with: dict[str, str], share: bool
) -> None:
    job = job_with_times({"w0": {"compute_s": 0.01}})
    slot = {"address": "tls://127.0.0.1:40000", "device": "cpu", "machine": "", **joined_with}
    job.add(t.WorkerJoined(job_id=job.id, time=job.log[0].time, worker="w0", **slot))

    assert read_step_times(job).share_cores == share


@pytest.mark.parametrize(
    ("cause", "config", "line"),
    [
        ("metrics", {}, "metrics: {}"),
        ("evaluation", {}, "eval: 4 epochs"),
        ("evaluation", {"eval": {"every": "5 steps", "predict": "p", "score": "s"}},
         "eval: {every: 20 steps, predict: p, score: s}"),
        ("checkpoint", {"checkpoint": {"every": "1 step", "keep": 2}},
         "checkpoint: {every: 4 steps, keep: 2}"),
        ("checkpoint", {}, "checkpoint: {every: 1800 s}"),
        ("optimizer", {"batch": {"global": 8, "micro": "auto"}},
         "batch: {global: 32, micro: auto, aggregation_frequency: 4}"),
        ("overhead", {"batch": {"global": 8, "micro": 4}}, "batch: {global: 32, micro: 16}"),
        ("input", {"data": {"train": "Set('a, b', n=3)"}},
         'data: {train: "Set(\'a, b\', n=3)", num_workers: 2}'),
    ],
)  # fmt: skip
def test_line_keeps_the_other_keys_of_its_group(
    cause: Cause, config: dict[str, Any], line: str
) -> None:
    found = remedy(cause, [parts()], config=config)

    assert yaml.safe_load(found.line) == yaml.safe_load(line)
    assert "\n" not in found.line


@given(
    st.sampled_from(CAUSES),
    st.lists(st.floats(0.001, 1), min_size=1, max_size=4),
    st.floats(0, 1),
    st.sampled_from([{"global": 32}, {"per_worker": 3}, {"global": 8, "micro": 2}]),
)
def test_pasted_line_is_a_valid_cell(
    cause: Cause, passes: list[float], transfer_s: float, batch: dict[str, Any]
) -> None:
    workers = lockstep(
        *(parts(f"w{i}", passes_s=seconds) for i, seconds in enumerate(passes)),
        transfer_s=transfer_s,
    )
    if cause == "straggler":
        workers = lockstep(parts("w8"), parts("w9", passes_s=2.0))
    config = {**CONFIG, "batch": batch}

    found = remedy(cause, workers, config={"batch": batch})

    TrainConfig.model_validate({**config, **(yaml.safe_load(found.line) or {})})
    assert found.gain is None or found.gain >= -1


@pytest.mark.parametrize(
    ("between", "line"), [(math.nan, "4 steps"), (1.0, "4 steps"), (6.5, "28 steps")]
)
def test_checkpoints_that_are_rarer_than_the_cell_says_are_saved_less_often_than_now(
    between: float, line: str
) -> None:
    # A checkpoint that is due waits for the one that is being written.
    found = remedy(
        "checkpoint", [parts(checkpoint_s=0.01)], config={"checkpoint": {"every": "1 step"}},
        steps_between_saves=between,
    )  # fmt: skip

    assert yaml.safe_load(found.line) == {"checkpoint": {"every": line}}
    assert found.gain == pytest.approx(20 / (20 - 10 * 3 / 4) - 1)


def test_configuration_of_another_version_has_no_remedy() -> None:
    job = job_with_times(INPUT, config={"nonsense": 1})

    diagnosis = diagnose_job(job)

    assert diagnosis.remedy is None
    assert "input-bound" in str(diagnosis)


# --- output ---------------------------------------------------------------------------------------


def test_text_has_verdict_ceiling_remedy_and_parts() -> None:
    assert str(diagnose_job(job_with_times(INPUT))) == (
        "digits-00000000: input-bound (high confidence)\n"
        "Workers wait for samples for 75% (75% to 75%) of the time. Without it: +300%.\n"
        "Remedy: load samples in 4 processes per worker, ahead of the step (predicted +300%).\n"
        "    data: {train: train_set, eval: test_set, num_workers: 4}\n"
        "\n"
        "worker  data  passes  update  step\n"
        "w0      75%   25%     0%      40 ms\n"
        "w1      75%   25%     0%      40 ms\n"
        "\n"
        "Not measured: the fixed cost of a pass (it needs an epoch whose last step is smaller).\n"
        "From 150 steps up to step 200, with 2 workers (generation 1).\n"
        "The model has 1,000 parameters."
    )


def test_straggler_is_named_with_its_machine() -> None:
    text = str(diagnose_job(job_with_times(STRAGGLER), is_running=True))

    assert "held up by a straggler (high confidence)" in text
    assert "The other workers wait for w1 on 10.0.0.2 (g5.xlarge) for 75%" in text
    assert "    %etrain preempt w1 --job digits-00000000" in text


def test_frame_has_seconds_by_worker_and_nan_where_not_measured() -> None:
    seconds = {"compute_s": 0.01, "communication_s": 0.03, "metrics_s": None}

    frame = diagnose_job(job_with_times({"w0": seconds})).to_frame()

    assert frame["worker"].tolist() == ["w0"]
    assert frame["communication_s"].tolist() == [pytest.approx(0.03)]
    assert frame["metrics_s"].isna().all()
    assert frame["step_s"].tolist() == [pytest.approx(0.04)]


def test_html_escapes_what_comes_from_the_log() -> None:
    diagnosis = diagnose_job(
        job_with_times(
            {"<b>w0</b>": {"compute_s": 0.01}, "w1\x1b[2J": {"compute_s": 0.04}},
        )
    )

    html = diagnosis._repr_html_()

    assert "<b>" not in html
    assert "&lt;b&gt;w0" in html
    assert "\x1b" not in html + str(diagnosis)


def test_every_verdict_has_words() -> None:
    for cause in CAUSES:
        finding = Finding(cause=cause, share=0.5, workers=("w0",))
        measured = read_step_times(job_with_times(INPUT))
        verdict = dataclasses.replace(diagnose_job(job_with_times(INPUT)).verdict, main=finding)
        text = str(Diagnosis("job", measured, verdict, None))
        assert "50% of the time" in text


def test_reports_reach_the_diagnosis_as_events() -> None:
    job = job_with_times(INPUT)

    assert sum(isinstance(event, t.RankTimed) for event in job.log) == 8


# --- workers without cores ------------------------------------------------------------------------


def test_exchange_of_workers_that_wait_for_cores_has_no_verdict_but_a_note() -> None:
    times = {"compute_s": 0.01, "communication_s": 0.02, "core_wait_s": 0.004}

    diagnosis = diagnose_job(job_with_times({"w0": times, "w1": times}))

    assert diagnosis.verdict.main is None
    assert diagnosis.remedy is None
    assert "no verdict" in str(diagnosis)
    assert "The workers waited for a core 40% of the time" in str(diagnosis)


def test_logs_without_the_wait_for_cores_name_the_exchange() -> None:
    times = {"compute_s": 0.01, "communication_s": 0.02}

    diagnosis = diagnose_job(job_with_times({"w0": times, "w1": times}))

    assert diagnosis.verdict.main is not None
    assert diagnosis.verdict.main.cause == "communication"
    assert "waited for a core" not in str(diagnosis)
