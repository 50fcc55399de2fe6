"""``weight``: the mean over all tokens, for any split of a batch over passes and ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from etrain_jupyter.trainer.objective.measures import Measures, Portion, share_of_loss
from etrain_jupyter.trainer.objective.one_pass import Passed
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.state.capture import digest_of
from etrain_jupyter.trainer.state.train_state import TrainState, WorkPlan
from etrain_jupyter.trainer.workload import build_workload
from etrain_jupyter.wire import messages
from tests.unit.trainer.loop.test_train_loop import Names, run
from tests.unit.trainer.rank_processes import Generation, Job
from tests.unit.trainer.token_jobs import (
    BATCH,
    IGNORED,
    STEPS,
    by_hand,
    keys,
    make_tokens,
    num_tokens,
    opaque,
    step_keys,
    stepping,
    tagging,
)

RANKS = {1: (0,), 2: (0, 1), 3: (2, 0, 1)}


def told(outcome) -> list[dict[str, float]]:
    records = [*outcome.records("step"), *outcome.records("eval")[-1:]]
    return [{"loss": r["loss"], **r["metrics"]} for r in records]


def assert_equals_by_hand(outcomes, expected) -> None:
    model, numbers = expected
    for outcome in outcomes:
        for name, value in model.state_dict().items():
            assert torch.allclose(outcome.model[name], value, atol=2e-6), name
    for ours, theirs in zip(told(outcomes[0]), numbers, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-6)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("micro", [None, 1, 3])
@pytest.mark.parametrize("shards", [None, 8], ids=["averaged", "reproducible"])
def test_mean_over_tokens_depends_on_neither_ranks_nor_passes(ranks, num_ranks, micro, shards):
    more = {"batch": {"global": BATCH, **({"micro": micro} if micro else {})}}
    more |= {"reproducible": {"shards": shards}} if shards else {}
    job = Job(
        config=keys(eval="2 steps", **more),
        names=tagging,
        history=[Generation(members=RANKS[num_ranks])],
    )
    assert_equals_by_hand(ranks.train(job), by_hand())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_step_gives_the_same_result_with_any_method_of_the_model(ranks, num_ranks):
    job = Job(config=step_keys(), names=stepping, history=[Generation(members=RANKS[num_ranks])])
    assert_equals_by_hand(ranks.train(job), by_hand())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_loss_is_found_in_an_output_of_any_kind_where_some_parameters_are_not_used(
    ranks, num_ranks
):
    """DDP finds used parameters from the output, if that is made of tensors, dicts and tuples."""
    job = Job(config=keys(), names=opaque, history=[Generation(members=RANKS[num_ranks])])
    assert_equals_by_hand(ranks.train(job), by_hand())


def test_mean_of_means_would_be_another_number(ranks):
    """8 samples on 3 ranks, each averaging its own tokens: what DDP would do."""
    without = {k: v for k, v in keys().items() if k != "weight"}
    history = [Generation(members=RANKS[3])]
    outcome = ranks.train(Job(config=without, names=tagging, history=history))[0]
    _, numbers = by_hand()
    assert abs(told(outcome)[0]["loss"] - numbers[0]["loss"]) > 1e-3


def test_reproducible_weights_and_losses_are_the_same_bit_for_bit(ranks):
    config = keys(reproducible={"shards": 4}, batch={"global": BATCH, "micro": 1})
    histories = [
        [Generation(members=(0,))],
        [Generation(members=(0, 1))],
        [Generation(members=(0, 1, 2), until=2, lost=1), Generation(members=(2, 0))],
    ]
    found = [ranks.train(Job(config=config, names=tagging, history=h)) for h in histories]
    assert len({o.digest for outcomes in found for o in outcomes}) == 1
    records = [told(outcomes[0]) for outcomes in found]
    assert records[0] == records[1] == records[2]


def make_loop(names=None, **more):
    config = TrainConfig.model_validate(keys(**more))
    workload = build_workload(config, Names(**{**tagging(), **(names or {})}), torch.device("cpu"))
    sent: list[dict] = []
    state = TrainState(workload, config, WorkPlan.of(config, workload))
    loop = TrainLoop(state, sent.append)
    loop.warm_up()
    return loop, sent


def test_weight_holds_in_bf16():
    loop, _ = make_loop(precision="bf16", batch={"global": BATCH, "micro": 3})
    assert run(loop) == "done"
    model, _ = by_hand()
    for name, value in loop.workload.model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=0.02), name


def no_tokens(data):
    return lambda: {**data, "labels": torch.full_like(data["labels"], IGNORED)}


def test_step_of_weight_0_changes_nothing_and_is_logged():
    names = {"data.train": no_tokens(make_tokens())}
    loop, sent = make_loop(names, optimizer={"name": "AdamW", "lr": 0.1, "weight_decay": 0.5})
    before = digest_of(loop.workload.model)
    assert run(loop) == "done"
    assert digest_of(loop.workload.model) == before
    records = [m for m in sent if isinstance(m, dict)]
    assert [(math.isnan(r["loss"]), r["skipped"]) for r in records] == [(True, True)] * STEPS
    assert all(math.isnan(r["metrics"]["token_accuracy"]) for r in records)
    assert all(r["metrics"]["empty_share"] == 1.0 for r in records)
    texts = [m.text for m in sent if isinstance(m, messages.TextLogged)]
    assert texts[0] == (
        "step 1: weight is 0 for every batch, so no rank updated its weights; its loss, a mean "
        "over nothing, is NaN"
    )
    assert len(texts) == STEPS


def scaled_weight(factor):
    return lambda batch: float(num_tokens(batch)) * factor


@pytest.mark.parametrize("factor", [2.0**-30, 1024.0, 2.0**60])
def test_unit_of_the_weight_cancels_out_exactly(factor):
    loops = [make_loop({"weight": scaled_weight(f)})[0] for f in (1.0, factor)]
    for loop in loops:
        run(loop)
    assert len({digest_of(loop.workload.model) for loop in loops}) == 1
    units = [loop.state.counters()["weight_exponent"] for loop in loops]
    assert units[1] - units[0] == math.log2(factor)


def test_first_step_alone_may_overflow_in_fp16_because_of_the_weight():
    loop, sent = make_loop({"weight": scaled_weight(2.0**20)}, precision="fp16")
    run(loop)
    skipped = [m["skipped"] for m in sent if isinstance(m, dict)]
    assert skipped == [True, False, False, False]


def test_new_rank_uses_the_same_unit(ranks):
    history = [Generation(members=(0, 1), until=2), Generation(members=(1, 2, 0))]
    job = Job(config=keys(), names=tagging, history=history)
    assert_equals_by_hand(ranks.train(job)[:1], by_hand())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda b: -1, "weight returned -1, a int, for a batch of 8 samples"),
        (lambda b: math.nan, "weight returned nan"),
        (lambda b: torch.tensor(math.inf), r"weight returned tensor\(inf\), a Tensor"),
        (lambda b: (b["labels"] > 0).sum(1), r"weight returned tensor\(\[.*Return one number"),
        (lambda b: None, "weight returned None, a NoneType"),
        (lambda b: "7", "weight returned '7', a str"),
    ],
)
def test_invalid_weight_is_reported_before_training(value, text):
    with pytest.raises(WorkloadError, match=text):
        make_loop({"weight": value})


def test_metric_that_is_only_sometimes_a_mean_is_refused():
    def moody(output, target):
        values = (target == IGNORED).float().mean(dim=1)
        return values if len(target) == BATCH else values.mean()

    loop, _ = make_loop({"metrics.empty_share": moody})
    with pytest.raises(
        WorkloadError, match="'empty_share' returned one number per batch in one pass"
    ):
        run(loop)


PARTS = st.lists(
    st.tuples(
        st.integers(min_value=1, max_value=9),
        st.one_of(st.just(0.0), st.floats(min_value=0.01, max_value=1e6)),
        st.floats(min_value=-1e3, max_value=1e3),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(parts=PARTS)
def test_shares_add_up_to_the_weighted_mean(parts):
    measures = Measures({"mean": lambda output, target: output}, is_weighted=True)
    num_samples = sum(count for count, _, _ in parts)
    columns = torch.zeros(3, dtype=torch.float64)
    for count, weight, value in parts:
        portion = Portion(count, num_samples, weight)
        # The mean over no tokens.
        loss = torch.tensor(value if weight else math.nan, dtype=torch.float64)
        passed = Passed(loss, output=loss)
        share = share_of_loss(loss, portion, source="loss")
        columns += torch.stack([share, *measures.shares(passed, portion)])
    means = measures.means(columns.tolist())
    total = math.fsum(weight for _, weight, _ in parts)
    if not total:
        assert math.isnan(means.loss)
        assert means.weight == 0
        return
    expected = math.fsum(w * v for _, w, v in parts) / total
    assert means.loss == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert means.metrics["mean"] == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert means.weight == pytest.approx(total / num_samples)


@settings(max_examples=20, deadline=None)
@given(micro=st.integers(min_value=1, max_value=BATCH), passes=st.integers(1, 4))
def test_any_split_of_a_batch_gives_the_mean_over_its_tokens(micro, passes):
    batch = {"global": BATCH, "micro": micro, "aggregation_frequency": passes}
    loop, _ = make_loop(batch=batch)
    assert run(loop) == "done"
    model, _ = by_hand()
    for name, value in loop.workload.model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=2e-6), name


def test_some_batches_of_the_job_have_weight_0():
    """Otherwise the tests above would not detect a NaN."""
    data = make_tokens()
    counted = [int(num_tokens({"labels": row[None]})) for row in data["labels"]]
    assert counted.count(0) == 2
    assert len(set(counted)) > 3
