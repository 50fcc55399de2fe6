"""``reproducible``: the same correct bits for any number of ranks and any history.

The jobs run in real processes over gloo. The tests compare digests of the weights, and the records
of every step and evaluation, including losses.
"""

from __future__ import annotations

import pytest
import torch

from etrain_jupyter.config.vocabulary import NAMED_LR
from etrain_jupyter.rules.samples.shard_plan import Subtree, shard_merges
from etrain_jupyter.trainer.gradients.tree_sum import merge
from etrain_jupyter.trainer.seeds import seed_all
from etrain_jupyter.trainer.state.capture import digest_of
from tests.unit.trainer.plain_loop import PlainJob, add_up, train_plainly
from tests.unit.trainer.rank_processes import Generation, Job, Outcome, RankProcesses
from tests.unit.trainer.reproducible_jobs import (
    BATCH,
    NUM_SAMPLES,
    SHARDS,
    STEPS,
    Net,
    deep,
    keys,
    make_data,
    matrices,
    noisy,
    plain,
    recomputing,
    recomputing_in_pieces,
)

ALONE = [Generation(members=(0,))]
HISTORIES = {
    "2 ranks": [Generation(members=(0, 1))],
    "3 ranks": [Generation(members=(2, 0, 1))],
    "4 ranks": [Generation(members=(0, 1, 2, 3))],
    "joins and leaves": [
        Generation(members=(0, 1), until=2),
        Generation(members=(1, 2, 3, 0), until=3),
        Generation(members=(3, 2), until=5),
        Generation(members=(2, 0, 1)),
    ],
    "losses": [
        Generation(members=(0, 1, 2), until=1, lost=1),
        Generation(members=(0, 2), until=4, lost=0),
        Generation(members=(2, 0, 1, 3)),
    ],
}


def train(ranks: RankProcesses, history, names=plain, **more) -> list[Outcome]:
    return ranks.train(Job(config=keys(**more), names=names, history=history))


def assert_same(outcomes: list[Outcome], expected: Outcome) -> None:
    assert {o.digest for o in outcomes} == {expected.digest}
    # A rank that joined later has fewer records, and these are the same bit for bit.
    for op in ("step", "eval"):
        due = expected.records(op)
        for outcome in outcomes:
            for record in outcome.records(op):
                assert record in due


@pytest.mark.parametrize("name", HISTORIES)
def test_no_history_changes_a_bit_of_weights_losses_or_metrics(ranks, name):
    [expected] = train(ranks, ALONE)
    assert_same(train(ranks, HISTORIES[name]), expected)


@pytest.mark.parametrize("optimizer", sorted(NAMED_LR))
def test_every_optimizer_gives_the_same_weights_on_any_number_of_ranks(ranks, optimizer):
    names = matrices if optimizer == "Muon" else plain
    config = {"optimizer": {"name": optimizer, "lr": 0.01}}
    [expected] = train(ranks, ALONE, names, **config)
    for members in [(0, 1), (0, 1, 2), (0, 1, 2, 3)]:
        assert_same(train(ranks, [Generation(members=members)], names, **config), expected)
    assert_same(train(ranks, HISTORIES["joins and leaves"], names, **config), expected)


@pytest.mark.parametrize(
    ("names", "more"),
    [
        pytest.param(deep, {"steps": 3}, id="several buckets"),
        pytest.param(noisy, {}, id="augmented data"),
        pytest.param(recomputing, {}, id="recomputed activations"),
        pytest.param(plain, {"batch": {"global": BATCH, "micro": 2}}, id="micro batches"),
        pytest.param(
            plain, {"batch": {"global": BATCH, "aggregation_frequency": 2}}, id="several passes"
        ),
        pytest.param(plain, {"clip_grad_norm": 0.5}, id="clipped gradients"),
        pytest.param(plain, {"precision": "bf16"}, id="bf16"),
        pytest.param(plain, {"precision": "fp16", "clip_grad_norm": 0.5}, id="fp16"),
        pytest.param(plain, {"reproducible": {"shards": 7}}, id="shards that are no power of two"),
        pytest.param(plain, {"reproducible": {"shards": 16}}, id="one sample a shard at times"),
        pytest.param(plain, {"reproducible": True}, id="as many shards as workers"),
    ],
)
def test_every_kind_of_job_gives_the_same_weights_on_any_number_of_ranks(ranks, names, more):
    if more.get("reproducible") == {"shards": 16}:
        names = deep  # without BatchNorm, which refuses a single sample
    [expected] = train(ranks, ALONE, names, **more)
    for name in ("2 ranks", "3 ranks", "losses"):
        assert_same(train(ranks, HISTORIES[name], names, **more), expected)


def test_seed_and_number_of_shards_do_change_the_weights(ranks):
    digests = {
        train(ranks, ALONE, **more)[0].digest
        for more in ({}, {"seed": 1}, {"reproducible": {"shards": 2}}, {"reproducible": False})
    }
    assert len(digests) == 4


def test_weights_equal_those_of_a_plain_loop(ranks):
    [outcome] = train(ranks, ALONE)
    job = PlainJob(
        model=Net, data=make_data(), batch_size=BATCH, num_steps=STEPS, num_shards=SHARDS
    )
    by_hand = train_plainly(job)
    assert outcome.digest == digest_of(by_hand.model)
    assert [r["loss"] for r in outcome.records("step")] == by_hand.losses


def test_plain_loop_adds_in_the_order_of_the_tree():
    values = list(torch.randn(4, 100, generator=torch.Generator().manual_seed(0)))
    by_hand = add_up(values, 4)
    merge(values, shard_merges(Subtree(0, 4)))
    assert torch.equal(values[0], by_hand)


def test_second_gradient_after_the_first_was_sent_is_refused(ranks):
    with pytest.raises(
        AssertionError, match=r"gradients twice in one backward pass.*use_reentrant"
    ):
        train(ranks, HISTORIES["2 ranks"], recomputing_in_pieces)


def test_layer_that_no_shard_touches_is_not_updated(ranks):
    seed_all(0, step=0, rank=0)
    start = Net()
    decay = {"name": "AdamW", "lr": 0.01, "weight_decay": 0.5}
    _, outcome = train(ranks, HISTORIES["2 ranks"], optimizer=decay)
    trained = outcome.model
    assert torch.equal(trained["never.weight"], start.never.weight)
    assert not torch.equal(trained["rare.weight"], start.rare.weight)


@pytest.mark.parametrize("reproducible", [{"shards": SHARDS}, False])
def test_change_in_the_middle_of_an_evaluation_interrupts_it_on_all_ranks(ranks, reproducible):
    # 50 samples in batches of 4 on 3 ranks: the ranks have different numbers of batches.
    config = {"steps": 4, "batch": {"global": BATCH, "micro": 4}, "reproducible": reproducible}
    history = [Generation(members=(0, 1, 2), told_in_eval=2), Generation(members=(1, 0))]
    outcomes = train(ranks, history, **config)
    assert [o.ends for o in outcomes] == [["planned", "done"]] * 2
    # The interrupted evaluation is repeated in full, and both ranks keep its record.
    [record] = outcomes[0].records("eval")
    assert outcomes[1].records("eval") == [record]
    assert record["samples"] == NUM_SAMPLES
    if reproducible:
        assert [record] == train(ranks, ALONE, **config)[0].records("eval")


@pytest.mark.parametrize("more", [{}, {"reproducible": False}])
@pytest.mark.parametrize("step", [3, STEPS])
def test_ranks_with_different_weights_fail_at_the_next_step_or_the_end(ranks, step, more):
    fault = {"id": 1, "kind": "diverge", "rank": 1, "step": step, "at": "commit"}
    job = Job(config=keys(**more), names=matrices, history=HISTORIES["3 ranks"], faults=[fault])
    found = (
        rf"WeightsDivergedError: the weights of the 3 workers differ in 1 of \d+ tensors .* {step},"
    )
    with pytest.raises(AssertionError, match=found):
        ranks.train(job)


def test_default_mode_shows_the_order_of_its_additions(ranks):
    """Control: without ``reproducible``, the results depend on the number of ranks."""
    config = {"reproducible": False, "batch": {"global": BATCH, "micro": 4}}
    [alone] = train(ranks, ALONE, matrices, **config)
    outcomes = train(ranks, HISTORIES["4 ranks"], matrices, **config)
    assert alone.digest not in {o.digest for o in outcomes}
    assert len({o.digest for o in outcomes}) == 1
