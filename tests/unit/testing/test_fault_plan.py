"""Plans of faults: data that can be printed, repeated and sent."""

from __future__ import annotations

from typing import Any

import pytest

from etrain_jupyter.notebook.job import open_jobs
from etrain_jupyter.pools.local import LocalPool
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.testing import FaultPlan, submit_with_faults
from etrain_jupyter.testing.fault_plan import AT_A_PLACE, KINDS, PLACES, PLANTED
from etrain_jupyter.trainer.control import faults

ADDRESS = SchedulerAddress(cluster_id="c", address="tcp://127.0.0.1:1")
PLAN = FaultPlan().kill(rank=1, step=3).notice(rank=0, step=7).hang(rank=2, step=9, at="commit")


def test_plan_is_converted_to_numbered_dicts() -> None:
    assert PLAN.to_list() == [
        {"id": 1, "kind": "kill", "rank": 1, "step": 3, "at": "forward"},
        {"id": 2, "kind": "notice", "rank": 0, "step": 7, "at": "forward", "notice_s": 120.0},
        {"id": 3, "kind": "hang", "rank": 2, "step": 9, "at": "commit"},
    ]


def test_extending_a_plan_does_not_change_the_original() -> None:
    short = FaultPlan().kill(rank=0, step=1)

    short.exit(rank=1, step=2)

    assert len(short.faults) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_method_of_its_name(kind: str) -> None:
    plan = getattr(FaultPlan(), kind)(rank=None, step=4)

    assert [(f.kind, f.rank, f.step) for f in plan.faults] == [(kind, None, 4)]


def test_trainer_implements_every_fault_kind_meant_for_it() -> None:
    assert frozenset(AT_A_PLACE) == faults._AT_A_PLACE
    assert frozenset(PLANTED) == faults._CORRUPTIONS


@pytest.mark.parametrize("seed", range(50))
def test_random_plan_prints_as_code_that_reproduces_it(seed: int) -> None:
    plan = FaultPlan.random(seed, num_steps=40)

    assert plan == FaultPlan.random(seed, num_steps=40)
    assert eval(str(plan)) == plan
    assert all(0 <= f.step <= 40 and f.at in PLACES for f in plan.faults)


def test_random_plans_differ_and_have_every_kind() -> None:
    plans = [FaultPlan.random(seed, num_steps=40) for seed in range(100)]

    assert len(set(plans)) > 90
    assert {f.kind for plan in plans for f in plan.faults} == {*KINDS} - {*PLANTED}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "kil", "rank": 0, "step": 1}, "kind 'kil' is unknown. Did you mean 'kill'"),
        ({"kind": "fire", "rank": 0, "step": 1}, "kind 'fire' is unknown. Use one of: kill, "),
        ({"kind": "kill", "rank": 0, "step": 1, "at": "comit"}, "Did you mean 'commit'"),
        ({"kind": "kill", "rank": -1, "step": 1}, "rank=-1 must be at least 0"),
        ({"kind": "hang", "rank": 0, "step": -2}, "hang: step=-2 must be at least 0"),
    ],
)
def test_invalid_plan_is_refused_with_an_explanation(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        FaultPlan().add(**values)


def test_faults_are_sent_separately_from_the_job_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: dict[str, Any] = {}
    monkeypatch.setattr(LocalPool, "up", lambda self: ADDRESS)
    monkeypatch.setattr(
        open_jobs, "submit_job", lambda config, bundle, **given: sent.update(given, config=config)
    )
    net, train = (lambda: None), [(1, 2)]

    submit_with_faults({"model": "net", "data": {"train": "train"}, "loss": "max"}, PLAN)

    assert sent["faults"] == PLAN.to_list()
    assert sent["address"] is ADDRESS
    assert sent["config"].model == "net"
    assert net() is None
    assert train
