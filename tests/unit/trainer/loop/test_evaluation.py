"""Loss and metrics of an evaluation that is interrupted, in real process groups."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.trainer.loop import evaluation
from tests.unit.trainer import eval_jobs
from tests.unit.trainer.rank_processes import Generation, Job

STEPS = (4, 8)
"""The last steps of the two epochs, which are evaluated."""
REPRODUCIBLE = {"reproducible": {"shards": 4}}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls") / "calls"


@pytest.fixture(scope="module")
def calm(ranks: Any, calls: Path) -> dict[bool, tuple[dict[int, dict[str, Any]], int]]:
    """Provide the evaluations of one rank, and the number of batches, without and with shards."""
    found = {}
    for mode in ({}, REPRODUCIBLE):
        records = train(ranks, calls, Generation(members=(0,)), **mode)
        found[bool(mode)] = (records, sum(num_calls(calls)))
    return found


@pytest.fixture(scope="module")
def alone(calm: Any) -> dict[int, dict[str, Any]]:
    return calm[True][0]


def train(
    ranks: Any, calls: Path, *history: Generation, names: Any = eval_jobs.names, **more: Any
) -> dict[int, dict[str, Any]]:
    """Return the evaluations by step; each may be reported several times, but never differ."""
    calls.write_text("")
    outcomes = ranks.train(
        Job(
            config=eval_jobs.keys(**more),
            names=functools.partial(names, str(calls)),
            history=history,
        )
    )
    found: dict[int, dict[str, Any]] = {}
    for outcome in outcomes:
        for record in outcome.records("eval"):
            assert found.setdefault(record["step"], record) == record
            assert record["samples"] == eval_jobs.NUM_SAMPLES
    return found


def num_calls(calls: Path) -> list[int]:
    """Return how often each part was evaluated, with the trials of the warm-up."""
    return list(Counter(calls.read_text().split()).values())


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
    "two notices": ([told((0, 1), 1), told((0, 2), 0), Generation(members=(2,))], 0),
    "kill after a notice": ([told((0, 1), 1), lost((1, 2), 0), Generation(members=(2, 3))], 2),
}
"""Generations, and the largest number of parts that are evaluated again."""


@pytest.mark.parametrize("mode", [{}, REPRODUCIBLE], ids=["averaged", "reproducible"])
@pytest.mark.parametrize("name", HISTORIES)
def test_interrupted_evaluation_evaluates_only_lost_parts_again(
    ranks: Any, calm: Any, calls: Path, name: str, mode: dict[str, Any]
) -> None:
    reference, num_once = calm[bool(mode)]
    history, max_again = HISTORIES[name]
    found = train(ranks, calls, *history, **mode)
    assert 8 in found
    if mode:
        assert found == {step: reference[step] for step in found}
    else:
        for step, record in found.items():
            assert record["loss"] == pytest.approx(reference[step]["loss"], rel=1e-4)
    assert 0 <= sum(num_calls(calls)) - num_once <= max_again


@pytest.mark.parametrize("seed", range(6))
def test_reproducible_metrics_are_equal_after_random_changes_of_members(
    ranks: Any, alone: Any, calls: Path, seed: int
) -> None:
    dice = random.Random(seed)
    history, staying = [], {0}
    for _ in range(4):
        members = list(staying | set(dice.sample(range(4), dice.randint(0, 3))))
        dice.shuffle(members)
        is_reported = dice.random() < 0.5 or len(members) == 1
        rank = dice.randrange(len(members))
        history.append(told(tuple(members), rank) if is_reported else lost(tuple(members), rank))
        others = [m for m in members if is_reported or m != members[rank]]
        staying = set(dice.sample(others, dice.randint(1, len(others))))
    found = train(ranks, calls, *history, Generation(members=tuple(staying)), **REPRODUCIBLE)
    assert 8 in found
    assert found == {step: alone[step] for step in found}


def names_with_limit(calls: str, *, max_bytes: int) -> dict[str, Any]:
    """Limit the exchange before a planned change, in this process."""
    evaluation.SHARE_BYTES = max_bytes
    return eval_jobs.names(calls)


@pytest.fixture
def names_without_sharing(ranks: Any, calls: Path) -> Iterator[Any]:
    """Provide names that forbid the exchange, as for states above 64 MB; allow it afterwards."""
    yield functools.partial(names_with_limit, max_bytes=-1)
    names = functools.partial(names_with_limit, max_bytes=evaluation.SHARE_BYTES)
    train(ranks, calls, Generation(members=(0, 1, 2, 3)), names=names)


def test_leaver_with_large_states_leaves_at_once_and_its_parts_are_evaluated_again(
    ranks: Any, alone: Any, calls: Path, names_without_sharing: Any
) -> None:
    history = (told((0, 1), 1), Generation(members=(0, 2)))
    found = train(ranks, calls, *history, names=names_without_sharing, **REPRODUCIBLE)
    assert found == {step: alone[step] for step in found}
    # The leaver evaluated three parts before the ranks had exchanged the flag.
    assert sorted(num_calls(calls))[-4:] == [2, 3, 3, 3]
