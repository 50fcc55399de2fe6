"""Experiments: they time variants of a step, and change neither weights nor order."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from etrain_jupyter.trainer.loop import experiments
from etrain_jupyter.trainer.loop.trial_steps import COSTS, UnsuitableBatchError, enlarge
from etrain_jupyter.trainer.micro_batch import DeviceMemory
from etrain_jupyter.wire.messages import ExperimentEnded, RequestExperiment, TextLogged
from tests.unit.trainer.loop.test_train_loop import make_loop, run
from tests.unit.trainer.rank_processes import Generation, Job, Outcome, rank_processes
from tests.unit.trainer.reproducible_jobs import keys, plain

NAP_S = 0.02
EVERYTHING = tuple(COSTS)


@pytest.fixture(scope="module")
def ranks():
    with rank_processes(2) as processes:
        yield processes


def request(*variants: str, **more: Any) -> RequestExperiment:
    return RequestExperiment(
        trainer="",
        request="r1",
        cause="communication",
        variants=variants,
        **{"seconds": 1000.0, **more},
    )


def reports_of(outcome: Outcome) -> list[dict[str, Any]]:
    return [m.record for m in outcome.sent if isinstance(m, ExperimentEnded)]


def times_of(report: dict[str, Any]) -> dict[str, float]:
    """Return the median seconds of a step by variant; ``own`` for the job's steps."""
    columns = ["own", *report["variants"]]
    table = np.array(report["times_s"]).reshape(-1, len(columns))
    return dict(zip(columns, np.median(table, axis=0), strict=True))


def slow_metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if output.requires_grad:
        time.sleep(NAP_S)
    return (output.argmax(1) == target).double()


def slow_metrics():
    return {**plain(), "metrics.accuracy": slow_metric}


def slow_on_rank_1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        time.sleep(NAP_S)
    return F.cross_entropy(output, target)


def one_slow_rank():
    return {**plain(), "loss": slow_on_rank_1}


def fails_in_trials(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # Trials of ``large`` have more samples than any step of the job.
    if len(target) > 20 and output.requires_grad:
        raise RuntimeError("a batch this large is a bug")
    return F.cross_entropy(output, target)


def failing():
    return {**plain(), "loss": fails_in_trials}


@pytest.mark.parametrize("more", [{}, {"reproducible": False}])
def test_all_variants_leave_weights_order_and_records_unchanged(ranks, more):
    history = [Generation(members=(0, 1))]
    config = keys(**more, steps=64)  # at most 20 between two rounds, and some to settle
    without = ranks.train(Job(config=config, names=plain, history=history))
    tried = ranks.train(
        Job(
            config=config,
            names=plain,
            history=history,
            experiment=request(*EVERYTHING, left_out=(1,)),
        )
    )
    assert [one.digest for one in tried] == [one.digest for one in without]
    for kind in ("step", "eval"):
        assert tried[0].records(kind) == without[0].records(kind)
    [report] = reports_of(tried[0])
    assert reports_of(tried[1]) == []
    assert report["times_s"], report["reason"]
    assert len(report["times_s"]) % (1 + len(EVERYTHING)) == 0
    assert report["stall_s"] > 0


def test_variant_without_metrics_is_faster_by_their_time(ranks):
    [first, _] = ranks.train(
        Job(
            config=keys(steps=16),
            names=slow_metrics,
            history=[Generation(members=(0, 1))],
            experiment=request("local", "bare"),
        )
    )
    [report] = reports_of(first)
    times = times_of(report)
    assert times["bare"] < times["local"]
    assert times["local"] >= 0.99 * NAP_S


def test_variant_without_the_straggler_does_not_wait_for_it(ranks):
    [first, _] = ranks.train(
        Job(
            config=keys(steps=16, reproducible=False),
            names=one_slow_rank,
            history=[Generation(members=(0, 1))],
            experiment=request("cached", "left_out", left_out=(1,)),
        )
    )
    times = times_of(reports_of(first)[0])
    assert times["left_out"] < times["cached"]


def test_rank_lost_in_an_experiment_leaves_the_state_of_the_last_step(ranks):
    history = [Generation(members=(0, 1), until=4, lost=1, lost_at="experiment")]
    config = keys(steps=20)
    without = ranks.train(
        Job(config=config, names=plain, history=[Generation(members=(0, 1), until=4)])
    )
    tried = ranks.train(
        Job(config=config, names=plain, history=history, experiment=request("cached", "local"))
    )
    assert [one.ends for one in tried] == [["failed"], ["failed"]]
    assert [one.digest for one in tried] == [one.digest for one in without]
    [report] = reports_of(tried[0])
    assert report["reason"] == "the generation ended before it was complete"


def test_error_in_a_trial_leaves_the_variant_out_and_the_job_continues(ranks):
    [first, second] = ranks.train(
        Job(
            config=keys(steps=64, reproducible=False),  # a round may need 20 steps of the job
            names=failing,
            history=[Generation(members=(0, 1))],
            experiment=request("cached", "large"),
        )
    )
    assert first.ends == second.ends == ["done"]
    [report] = reports_of(first)
    assert report["times_s"]
    assert set(report["times_s"][2::3]) == {0.0}
    [text] = {m.text for m in first.sent if isinstance(m, TextLogged) and m.level == "info"}
    assert text == (
        "experiment: large was not measured, because RuntimeError: a batch this large is a bug"
    )


def test_experiment_abstains_if_a_copy_of_the_state_does_not_fit(monkeypatch):
    monkeypatch.setattr(experiments, "memory_of", lambda _: DeviceMemory(free=10, total=10**9))
    loop, sent = make_loop()

    def after_step() -> None:
        if loop.step == 2:
            loop.experiments.request(request("cached"))

    assert run(loop, after_step=after_step) == "done"
    [report] = [m.record for m in sent if isinstance(m, ExperimentEnded)]
    assert report["reason"].startswith("a copy of the state does not fit into memory (0.00 GiB")


def test_batch_is_enlarged_by_repeating_its_rows():
    x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2])
    indices, (big_x, big_y) = enlarge(np.array([7, 8, 9]), (x, y), 1.5)
    assert indices.tolist() == [7, 8, 9, 7]
    assert big_y.tolist() == [0, 1, 2, 0]
    assert big_x[3].tolist() == x[0].tolist()


@pytest.mark.parametrize("batch", [torch.ones(2), {"x": torch.ones(3), "text": "abc"}, [], 3.0])
def test_batch_without_a_row_per_sample_cannot_be_enlarged(batch):
    with pytest.raises(UnsuitableBatchError, match="one row per sample"):
        enlarge(np.array([7, 8, 9]), batch, 4)
