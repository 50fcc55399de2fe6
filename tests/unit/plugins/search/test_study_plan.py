"""The output of ``%%etrain search --dry-run``: rungs, and the most that the study can use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from etrain_jupyter.plugins.search.commands import plan_search
from etrain_jupyter.pools.local import LocalPool

BODY = """\
model: Net(width)
data: {train: train_set, eval: eval_set}
loss: loss
batch: 64
epochs: 8
workers: {min: 1, max: 2}
search:
  space: {width: {choice: [4, 8, 16, 32]}}
  metric: loss
  mode: min
  divisor: 2
  trials: 4
  concurrent: 2
"""


def make_set(size: int) -> TensorDataset:
    return TensorDataset(torch.zeros(size, 8), torch.zeros(size))


NAMES: dict[str, Any] = {
    "Net": lambda width: torch.nn.Linear(8, width),
    "train_set": make_set(640),
    "eval_set": make_set(64),
    "loss": lambda output, target: output.sum(),
}


class PricedPool(LocalPool):
    """A pool whose prices say only for how many workers they are."""

    def price(self, max_workers: int) -> str:
        """Return the price of this number of workers as text."""
        return f"price of {max_workers} workers"


def describe(more: str = "", *, body: str = BODY, **names: Any) -> dict[str, str]:
    """Return the lines of the plan by their titles."""
    plan = plan_search(body + more, NAMES | names, {}, "%%etrain search")
    plan = dataclasses.replace(plan, trial=dataclasses.replace(plan.trial, pool=PricedPool()))
    lines = [line for line in str(plan).splitlines()[1:] if not line.startswith("  note")]
    return {line[2:12].strip(): line[12:] for line in lines}


pytestmark = pytest.mark.usefixtures("private_folders")


@pytest.fixture
def private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))


def test_plan_shows_rungs_and_worst_case() -> None:
    shown = describe()

    assert shown["rungs"] == "640, 1,280, 2,560 of 5,120 samples; the best 1/2 continue at each"
    assert shown["at most"] == "20,480 samples, if all 4 trials run to their end"
    assert shown["budget"] == "no limit"


def test_worst_price_is_that_of_all_trials_at_the_same_time() -> None:
    # workers: {max: 2}
    assert describe()["price"] == "price of 4 workers", "concurrent: 2"
    body = BODY.replace("  concurrent: 2\n", "")
    assert describe(body=body)["price"] == "price of 8 workers", "4 trials"


def test_budget_limits_the_worst_case() -> None:
    shown = describe("  budget: {samples: 6000, time: 90 min, usd: 5}\n")

    assert shown["budget"] == "6,000 samples, 1.5 h, $5.00"
    assert shown["at most"] == "6,000 samples, by the budget"
    assert shown["price"] == "price of 4 workers; the study stops at $5.00"


def test_length_of_a_set_that_only_the_workers_build_is_not_guessed() -> None:
    def build() -> TensorDataset:
        return make_set(640)

    shown = describe(train_set=build)

    assert shown["rungs"] == "at the length of a trial divided by 2, again and again"
    assert shown["at most"] == "4 whole trials"
