"""Metrics of torchmetrics: on any ranks, the value of one process over the whole set."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassF1Score

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from etrain_jupyter.trainer.objective.whole_set import is_torchmetric
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.state.train_state import TrainState, WorkPlan
from etrain_jupyter.trainer.workload import build_workload
from etrain_jupyter.wire import messages
from tests.unit.trainer.loop.test_train_loop import Names, run
from tests.unit.trainer.rank_processes import Generation, Job
from tests.unit.trainer.whole_set_jobs import UNFIT, keys, make_data, metrics, names

ALONE = (Generation(members=(0,)),)


def train(ranks, *history, **more):
    return ranks.train(Job(config=keys(**more), names=names, history=history))


def in_one_go(model: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the values of torchmetrics over the whole set at once."""
    x, y = make_data()
    output = torch.nn.functional.linear(x, model["weight"], model["bias"])
    found = {}
    for name, metric in metrics().items():
        metric.update(output, y)
        found[name] = float(metric.compute())
    return found


@pytest.mark.parametrize("members", [(0,), (0, 1), (2, 0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("shards", [None, 7], ids=["averaged", "reproducible"])
def test_value_equals_that_of_the_whole_set_at_once(ranks, members, shards):
    more = {"reproducible": {"shards": shards}} if shards else {}
    outcomes = train(ranks, Generation(members=members), **more)
    told = outcomes[0].records("eval")[-1]["metrics"]
    expected = in_one_go(outcomes[0].model)
    assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert list(told) == ["accuracy", *expected]
    steps = outcomes[0].records("step")
    assert all(list(record["metrics"]) == ["accuracy"] for record in steps)


def test_slots_of_one_sample_or_two_give_the_same_value(ranks):
    batch = {"global": 48, "micro": 3}
    [alone] = train(ranks, *ALONE, reproducible={"shards": 40}, batch=batch)
    many = train(ranks, Generation(members=(0, 1, 2, 3)), reproducible={"shards": 40}, batch=batch)
    assert many[0].records("eval") == alone.records("eval")


def test_reproducible_values_are_the_same_bit_for_bit(ranks):
    more = {"reproducible": {"shards": 4}}
    [alone] = train(ranks, *ALONE, **more)
    due = alone.records("eval")
    histories = [
        [Generation(members=(0, 1))],
        [Generation(members=(0, 1, 2), until=3, lost=1), Generation(members=(2, 0))],
        [Generation(members=(0, 1, 2), until=4, told_in_eval=1), Generation(members=(0, 1, 2, 3))],
    ]
    for history in histories:
        found = train(ranks, *history, **more)[0].records("eval")
        assert found == due[-len(found) :]


def make_loop(metric, **more):
    config = TrainConfig.model_validate(keys(metrics={"m": "m"}, **more))
    given = Names(**names(), **{"metrics.m": metric})
    workload = build_workload(config, given, torch.device("cpu"))
    sent: list[dict] = []
    state = TrainState(workload, config, WorkPlan.of(config, workload))
    loop = TrainLoop(state, sent.append)
    loop.warm_up()
    return loop, sent


def test_each_evaluation_begins_with_an_empty_state():
    metric = MulticlassF1Score(3, average="macro")
    metric.update(*reversed([torch.tensor([0, 1]), torch.tensor([1, 1])]))
    loop, sent = make_loop(metric)
    run(loop)
    values = [m.record["metrics"]["m"] for m in sent if isinstance(m, messages.EvalFinished)]
    assert len(values) == 2
    assert values[-1] == pytest.approx(in_one_go(loop.workload.model.state_dict())["f1"])
    assert metric.update_count == 1  # the notebook's own metric is not updated


def test_class_is_made_on_the_rank():
    class MeanLogit(MeanSquaredError):
        def update(self, output, target):
            super().update(output[:, 0], target.float())

    loop, sent = make_loop(MeanLogit)
    run(loop)
    assert [len(m.record["metrics"]) for m in sent if isinstance(m, messages.EvalFinished)] == [
        1,
        1,
    ]


def test_logits_of_an_output_are_what_torchmetrics_gets():
    loop, _ = make_loop(MulticlassF1Score(3))
    [metric] = loop.workload.whole_set.values()
    for output in ({"logits": torch.eye(3)}, type("Output", (), {"logits": torch.eye(3)})()):
        metric.try_on(output, torch.arange(3), torch.device("cpu"))
    with pytest.raises(AttributeError, match="'dict' object"):
        metric.try_on({"scores": torch.eye(3)}, torch.arange(3), torch.device("cpu"))


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (UNFIT["several values"], r"'m' computes a Tensor of shape \(3,\).*average='macro'"),
        (UNFIT["wrapped"], "'m' is a MinMaxMetric, which wraps other metrics"),
        (UNFIT["sum of two"], "'m' is a CompositionalMetric, which wraps other metrics"),
        (UNFIT["merged by None"], "PearsonCorrCoef, whose state '.*' is merged by None"),
        (
            MetricCollection([MulticlassF1Score(3)]),
            r"'m' is a MetricCollection, .* Name each under metrics: \{a: ...",
        ),
    ],
)
def test_metric_that_cannot_be_exact_is_refused_before_training(metric, text):
    with pytest.raises(WorkloadError, match=text):
        make_loop(metric)


def test_metric_without_evaluation_data_is_refused():
    text = (
        "metric 'm' is from torchmetrics: .* data.eval, which is missing. Add for example 'data: "
    )
    with pytest.raises(WorkloadError, match=text):
        make_loop(MulticlassF1Score(3), data={"train": "d"})


def test_functions_and_modules_are_not_mistaken_for_torchmetrics():
    assert is_torchmetric(MulticlassF1Score(3))
    assert not is_torchmetric(torch.nn.CrossEntropyLoss())
    assert not is_torchmetric(len)
