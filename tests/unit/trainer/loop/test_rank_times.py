"""Times of the parts of a step: they are separate, add up, and belong to the right rank."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from etrain_jupyter.config.schema import ScalingConfig
from etrain_jupyter.trainer import rank_times
from etrain_jupyter.trainer.loop.learning_rate import LearningRate
from etrain_jupyter.trainer.rank_times import RankTimes
from etrain_jupyter.trainer.times import StepTimes
from etrain_jupyter.wire import messages
from tests.unit.trainer.batch_noise_jobs import keys, make_data, names
from tests.unit.trainer.loop.test_train_loop import alone
from tests.unit.trainer.rank_processes import Generation, Job, rank_processes

NAP_S = 0.1
PARTS = tuple(asdict(StepTimes()))


@pytest.fixture(scope="module")
def ranks():
    with rank_processes(2) as processes:
        yield processes


class SlowData:
    """Fetching a sample is slow."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(NAP_S / 8)
        x, y = make_data()
        return x[index], y[index]


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(NAP_S)
    return F.cross_entropy(output, target)


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(NAP_S)
        return super().step(closure)


def slow_optimizer(parameters):
    return SlowSGD(parameters, lr=0.1)


def slow_on_rank_1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        time.sleep(NAP_S)
    return F.cross_entropy(output, target)


def slow_metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(NAP_S)
    return (output.argmax(1) == target).double()


def slow_metrics():
    return {**names(), "metrics.slow": slow_metric}


def slow_in_evaluations(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if not output.requires_grad:
        time.sleep(NAP_S)
    return (output.argmax(1) == target).double()


def slow_evaluations():
    return {**names(), "data.eval": make_data(), "metrics.slow": slow_in_evaluations}


def slow_data():
    return {**names(), "data.train": SlowData()}


def slow_passes():
    return {**names(), "loss": slow_loss}


def slow_updates():
    return {**names(), "optimizer": slow_optimizer}


def one_slow_rank():
    return {**names(), "loss": slow_on_rank_1}


def reports_of(outcome) -> list[dict]:
    return [m.record for m in outcome.sent if isinstance(m, messages.RankTimesMeasured)]


def steps_of(outcome) -> list[dict]:
    return [m for m in outcome.sent if isinstance(m, dict)]


@pytest.mark.parametrize(
    ("part", "notebook", "more"),
    [
        ("data_s", slow_data, {}),
        ("compute_s", slow_passes, {}),
        ("compute_s", slow_passes, {"reproducible": {"shards": 2}}),
        ("optimizer_s", slow_updates, {"optimizer": "slow_optimizer"}),
    ],
)
def test_the_part_that_sleeps_has_that_time_in_every_step(ranks, part, notebook, more):
    config = keys(batch={"global": 16}, epochs=2, **more)
    history = [Generation(members=(0, 1))]
    for outcome in ranks.train(Job(config=config, names=notebook, history=history)):
        for step in steps_of(outcome):
            assert step[part] >= 0.99 * NAP_S
            assert (
                sum(step[name] for name in PARTS) <= step["samples"] / step["samples_per_s"] + 1e-5
            )


@pytest.mark.parametrize("more", [{}, {"reproducible": {"shards": 2}}])
def test_waiting_for_a_slow_rank_is_communication_of_the_fast_one_only(ranks, more):
    config = keys(batch={"global": 16}, epochs=1, **more)
    history = [Generation(members=(0, 1))]
    fast, slow = ranks.train(Job(config=config, names=one_slow_rank, history=history))
    waited = [sum(s["communication_s"] for s in steps_of(outcome)) for outcome in (fast, slow)]
    assert waited[0] > waited[1]
    assert all(s["compute_s"] >= 0.99 * NAP_S for s in steps_of(slow))


@pytest.mark.parametrize("more", [{}, {"reproducible": {"shards": 2}}])
def test_only_the_fast_rank_waits_and_the_wait_is_part_of_its_communication(ranks, more):
    config = keys(batch={"global": 16}, epochs=1, **more)  # 6 steps
    history = [Generation(members=(0, 1))]
    fast, slow = (
        reports_of(outcome)[-1]
        for outcome in ranks.train(Job(config=config, names=one_slow_rank, history=history))
    )
    # On a busy machine, the fast rank is late in some steps.
    assert NAP_S < fast["wait_s"] < fast["communication_s"]
    assert 0 <= slow["wait_s"] < fast["wait_s"]


def test_generation_reports_no_wait_of_the_previous_generation(ranks):
    config = keys(batch={"global": 16}, epochs=1)
    history = [Generation(members=(0, 1), until=3), Generation(members=(0,))]
    first, alone = reports_of(
        ranks.train(Job(config=config, names=one_slow_rank, history=history))[0]
    )
    assert first["wait_s"] > 0
    assert (alone["world_size"], alone["wait_s"]) == (1, 0.0)


def test_time_of_metrics_is_part_of_the_passes(ranks):
    config = keys(batch={"global": 16}, epochs=1, metrics={"slow": "metrics.slow"})
    history = [Generation(members=(0, 1))]
    for outcome in ranks.train(Job(config=config, names=slow_metrics, history=history)):
        [report] = reports_of(outcome)
        assert 0.99 * report["num_steps"] * NAP_S <= report["metrics_s"] <= report["compute_s"]


def test_time_of_metrics_in_evaluations_is_not_part_of_the_steps(ranks):
    config = keys(
        batch={"global": 16},
        epochs=1,
        data={"train": "data.train", "eval": "data.eval"},
        metrics={"slow": "metrics.slow"},
        eval="2 steps",
    )
    history = [Generation(members=(0, 1))]
    for outcome in ranks.train(Job(config=config, names=slow_evaluations, history=history)):
        [report] = reports_of(outcome)
        assert report["evaluation_s"] >= NAP_S
        assert report["metrics_s"] <= report["compute_s"]


def test_ranks_report_their_own_samples_in_each_generation(ranks):
    config = keys(batch={"global": 15}, epochs=2)  # 7 steps an epoch, the last of 6 samples
    history = [Generation(members=(0, 1), until=3), Generation(members=(1,))]
    outcomes = ranks.train(Job(config=config, names=names, history=history))
    told = reports_of(outcomes[0])
    assert [
        (t["rank"], t["world_size"], t["step"], t["num_steps"], t["samples"]) for t in told
    ] == [
        (1, 2, 3, 3, 21),
        (0, 1, 14, 11, 147),
    ]
    for record in told:
        assert sum(record[part] for part in PARTS) <= record["elapsed_s"] + 1e-5
    assert all(record["communication_s"] == 0 for record in told[1:])


def test_first_report_is_early_and_later_ones_are_rare(monkeypatch):
    now, told = 100.0, []
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: now)
    times = RankTimes(lambda _: None)
    for step in range(1, 481):  # four a second, for two minutes
        now += 0.25
        times.add_step(step, StepTimes(), samples=1, elapsed_s=0.25)
        if times.is_due(epoch_ends=False):
            told.append(now - 100.0)
            times.report()
    assert told == [2.5, 7.5, 17.5, 37.5, 67.5, 97.5]


def test_ranks_of_a_large_generation_report_less_often(monkeypatch):
    now, told = 100.0, []
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: now)
    times = RankTimes(lambda _: None)
    times.begin(SimpleNamespace(generation=1, rank=0, world_size=1000))
    for step in range(1, 301):
        now += 1.0
        times.add_step(step, StepTimes(), samples=1, elapsed_s=1.0)
        if times.is_due(epoch_ends=False):
            told.append(now - 100.0)
            times.report()
    assert told == [10, 30, 70, 150, 270]


def test_short_epochs_share_a_report_and_long_ones_report_at_their_ends(monkeypatch):
    now, told = 100.0, []
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: now)
    times = RankTimes(lambda _: None)
    for step in range(1, 61):  # one a second, three an epoch, for a minute
        now += 1.0
        times.add_step(step, StepTimes(), samples=1, elapsed_s=1.0)
        if times.is_due(epoch_ends=step % 3 == 0):
            told.append(now - 100.0)
            times.report()
    assert told == [3, 8, 18, 30, 42, 54]


def test_gradient_noise_is_reported_if_it_is_measured():
    sent: list[dict] = []
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    rates = LearningRate(
        torch.optim.SGD(parameters, lr=0.1), scaling=ScalingConfig(rule="adascale")
    )
    times = RankTimes(sent.append, rates.noise_fields)
    times.begin(alone(generation=1))
    times.add_step(1, StepTimes(), samples=8, elapsed_s=1.0)
    times.report()
    rates.take_noise(mean_of_squares=5.0, square_of_mean=3.0, world_size=2)
    rates.commit()
    times.add_step(2, StepTimes(), samples=8, elapsed_s=1.0)
    times.report()
    without, with_noise = (message.record for message in sent)
    assert "noise_variance" not in without
    assert (with_noise["noise_variance"], with_noise["noise_square_norm"]) == (4.0, 1.0)


def test_checkpoints_and_evaluations_are_not_part_of_the_steps():
    sent: list[dict] = []
    times = RankTimes(sent.append)
    times.begin(alone(generation=4))
    times.add_step(1, StepTimes(compute_s=1.0), samples=8, elapsed_s=2.0)
    times.add_checkpoint(0.5)
    times.add_step(2, StepTimes(compute_s=1.0), samples=8, elapsed_s=2.5)
    times.add_checkpoint(0.25)
    times.add_evaluation(3.0)
    times.add_step(3, StepTimes(compute_s=1.0), samples=8, elapsed_s=2.0)
    times.begin(alone(generation=5))
    [message] = sent
    assert message.generation == 4
    record = message.record
    assert (record["step"], record["num_steps"], record["samples"]) == (3, 3, 24)
    assert (record["elapsed_s"], record["checkpoint_s"], record["evaluation_s"]) == (6.0, 0.75, 3.0)
    assert (record["wait_s"], record["metrics_s"]) == (0.0, 0.0)
    times.report()
    assert len(sent) == 1  # nothing to report


def test_report_sums_waits_and_metrics_and_has_none_if_one_step_did_not_measure_them():
    sent: list[messages.RankTimesMeasured] = []
    times = RankTimes(sent.append)
    for first_metrics_s in (0.5, None):
        times.add_step(
            1, StepTimes(), samples=8, elapsed_s=2.0, wait_s=0.25, metrics_s=first_metrics_s
        )
        times.add_step(2, StepTimes(), samples=8, elapsed_s=2.0, wait_s=0.5, metrics_s=0.125)
        times.report()
    assert [m.record["wait_s"] for m in sent] == [0.75, 0.75]
    assert [m.record["metrics_s"] for m in sent] == [0.625, None]


def test_report_has_the_wait_for_a_core_since_the_previous_report(monkeypatch, tmp_path):
    thread = tmp_path / str(threading.get_native_id())
    thread.mkdir()
    monkeypatch.setattr(rank_times, "_TASKS", tmp_path)
    sent: list[messages.RankTimesMeasured] = []
    # Nanoseconds on a core, waiting for one, and the number of times on a core.
    (thread / "schedstat").write_text("5000000000 1000000000 7\n")
    times = RankTimes(sent.append)
    for waited_ns in (1_500_000_000, 1_500_000_000, 3_500_000_000):
        (thread / "schedstat").write_text(f"9000000000 {waited_ns} 9\n")
        times.add_step(1, StepTimes(), samples=8, elapsed_s=2.0)
        times.report()
    (thread / "schedstat").unlink()
    times.add_step(1, StepTimes(), samples=8, elapsed_s=2.0)
    times.report()
    assert [m.record["core_wait_s"] for m in sent] == [0.5, 0.0, 2.0, None]


def test_report_has_the_processor_time_since_the_previous_report(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(rank_times.time, "process_time", lambda: now_s[0])
    sent: list[messages.RankTimesMeasured] = []
    times = RankTimes(sent.append)
    for computed_s in (5.0, 3.0):
        now_s[0] += computed_s
        times.add_step(1, StepTimes(), samples=8, elapsed_s=2.0)
        times.report()
    assert [m.record["cpu_s"] for m in sent] == [5.0, 3.0]
