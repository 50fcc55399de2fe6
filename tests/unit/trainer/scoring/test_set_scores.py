"""Scores over the whole set, in real process groups with changing members."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.wire.messages import EvalScoreLost
from tests.unit.trainer import score_jobs
from tests.unit.trainer.rank_processes import Generation, Job, Outcome

NUM_PARTS = -(-score_jobs.NUM_SAMPLES // score_jobs.MICRO)
STEPS = (4, 8)
"""The last steps of the two epochs, which are evaluated."""
SYNC = {"checkpoint": {"best": {"metric": "count", "mode": "max"}}}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    return tmp_path_factory.mktemp("calls") / "calls"


@pytest.fixture(scope="module")
def alone(ranks, calls) -> dict[int, dict[str, float]]:
    return scores_of(train(ranks, calls, Generation(members=(0,))))


def train(
    ranks: Any,
    calls: Path,
    *history: Generation,
    names: Callable[[str], dict[str, Any]] = score_jobs.names,
    **more: Any,
) -> list[Outcome]:
    names_of_calls = functools.partial(names, str(calls))
    return ranks.train(Job(config=score_jobs.keys(**more), names=names_of_calls, history=history))


def scores_of(outcomes: list[Outcome]) -> dict[int, dict[str, float]]:
    """Return the scores by step; each may be reported several times, but never differ."""
    found: dict[int, dict[str, float]] = {}
    for outcome in outcomes:
        for record in outcome.records("score"):
            assert found.setdefault(record["step"], record["scores"]) == record["scores"]
            assert record["samples"] == score_jobs.NUM_SAMPLES
    return dict(sorted(found.items()))


def num_calls(calls: Path) -> Counter[int]:
    """Return how often each part was evaluated."""
    return Counter(map(int, calls.read_text().split()))


def test_one_rank_scores_each_evaluation(alone):
    assert list(alone) == list(STEPS)
    assert alone[4]["digest"] != alone[8]["digest"]
    assert alone[4]["count"] == score_jobs.NUM_SAMPLES


@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("more", [{}, SYNC], ids=["training continues", "training waits"])
def test_scores_are_equal_on_any_number_of_ranks(ranks, alone, calls, members, more):
    calls.write_text("")
    assert scores_of(train(ranks, calls, Generation(members=members), **more)) == alone
    assert set(num_calls(calls).values()) == {2}
    assert len(num_calls(calls)) == NUM_PARTS


def test_records_of_several_windows_are_merged_and_shared(ranks, alone, calls):
    history = (told((0, 1, 2), 1), Generation(members=(2, 3)))
    assert scores_of(train(ranks, calls, *history, names=score_jobs.large_names)) == alone


@pytest.mark.parametrize("more", [{}, SYNC], ids=["training continues", "training waits"])
def test_data_without_targets_is_scored_without_a_loss(ranks, alone, calls, more):
    history = (told((0, 1), 1), Generation(members=(1, 2)))
    keys = {"eval": {"predict": "p", "score": "s", "loss": False}, **more}
    outcomes = train(ranks, calls, *history, names=score_jobs.names_without_targets, **keys)
    assert scores_of(outcomes) == alone
    assert all(outcome.records("eval") == [] for outcome in outcomes)


def told(members: tuple[int, ...], rank: int) -> Generation:
    return Generation(members=members, told_in_eval=rank)


def lost(members: tuple[int, ...], rank: int) -> Generation:
    return Generation(members=members, until=4, lost=rank, lost_at="eval")


HISTORIES = {
    "notice": ([told((0, 1, 2), 1), Generation(members=(0, 2))], 0),
    "notice of rank 0": ([told((0, 1, 2), 0), Generation(members=(2, 1))], 0),
    "join": ([told((0, 1), 1), Generation(members=(0, 1, 2, 3))], 0),
    "kill": ([lost((0, 1, 2), 1), Generation(members=(0, 2))], 2),
    "kill of rank 0": ([lost((0, 1, 2, 3), 0), Generation(members=(3, 1, 2))], 2),
    "survivor of an abort": ([lost((0, 1), 1), Generation(members=(1, 0))], 0),
    "only a newcomer and a survivor": ([told((0, 1, 2), 1), Generation(members=(1, 3))], 0),
}
"""Generations, and the largest number of parts that are evaluated again."""


@pytest.mark.parametrize("more", [{}, SYNC], ids=["training continues", "training waits"])
@pytest.mark.parametrize("name", HISTORIES)
def test_interrupted_evaluation_evaluates_only_lost_parts_again(ranks, alone, calls, name, more):
    history, max_again = HISTORIES[name]
    calls.write_text("")
    outcomes = train(ranks, calls, *history, **more)
    found = scores_of(outcomes)
    assert found == {step: alone[step] for step in found}
    assert 8 in found
    assert 4 in found
    again = sum(num_calls(calls).values()) - 2 * NUM_PARTS
    assert 0 <= again <= max_again


@pytest.mark.parametrize("leaver", [0, 1])
def test_scores_survive_a_generation_that_ends_before_they_are_known(ranks, alone, calls, leaver):
    # The generation ends in the step after the evaluation: its scores are known only later.
    stays = 1 - leaver
    history = [
        Generation(members=(0, 1), until=5, lost=leaver),
        Generation(members=(stays, 2), until=6),
        Generation(members=(2, 3)),
    ]
    outcomes = train(ranks, calls, *history)
    found = scores_of(outcomes)
    assert found == {step: alone[step] for step in found}
    assert 8 in found
    assert not [s for o in outcomes for s in o.sent if isinstance(s, EvalScoreLost)]


def random_history(seed: int) -> list[Generation]:
    """Return generations of random members, each interrupted in mid-evaluation."""
    dice = random.Random(seed)
    history, staying = [], {0}
    for _ in range(4):
        joining = set(dice.sample(range(4), dice.randint(0, 3)))
        members = list(staying | joining)
        dice.shuffle(members)
        is_reported = dice.random() < 0.5 or len(members) == 1
        rank = dice.randrange(len(members))
        history.append(told(tuple(members), rank) if is_reported else lost(tuple(members), rank))
        # After a loss, the lost rank leaves; after a notice, any may leave except one.
        others = [m for m in members if is_reported or m != members[rank]]
        staying = set(dice.sample(others, dice.randint(1, len(others))))
    return [*history, Generation(members=tuple(staying))]


@pytest.mark.parametrize("seed", range(8))
def test_scores_are_equal_after_random_changes_of_members(ranks, alone, calls, seed):
    outcomes = train(ranks, calls, *random_history(seed), **(SYNC if seed % 2 else {}))
    found = scores_of(outcomes)
    assert found == {step: alone[step] for step in found}
    assert 8 in found
