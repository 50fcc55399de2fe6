"""Metadata of a checkpoint, and restoring it into a job that has changed."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import LocalStore
from etrain_jupyter.storage.checkpoints.base import open_newest
from etrain_jupyter.trainer.state.checkpoint_metadata import config_digest
from etrain_jupyter.trainer.state.checkpointer import Checkpointer
from etrain_jupyter.trainer.state.parts import STATE_PART, header_of
from etrain_jupyter.trainer.state.restoring import restore
from etrain_jupyter.trainer.state.train_state import BestTracker, WorkPlan
from etrain_jupyter.trainer.state.weight_average import WeightAverage
from etrain_jupyter.wire.messages import CheckpointWritten

KINDS = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}


def config_of(name: str = "Adam", lr: float = 0.1, **keys: Any) -> TrainConfig:
    values = {"model": "m", "data": {"train": "d", "eval": "e"}, "loss": "l", "seed": 5}
    return TrainConfig.model_validate({**values, "optimizer": {"name": name, "lr": lr}, **keys})


class State:
    """The state of a job, without training."""

    def __init__(self, config: TrainConfig, width: int = 3) -> None:
        model = nn.Linear(4, width)
        optimizer = KINDS[str(config.optimizer.name)](model.parameters(), lr=config.optimizer.lr)
        self.config = config
        self.best_tracker = BestTracker(config)
        extras = dict(self.best_tracker.extras)
        self.workload = SimpleNamespace(
            model=model, optimizer=optimizer, extras=extras, shards=None
        )
        self.plan = WorkPlan(
            num_train=10, num_eval=4, global_batch_size=2, steps_per_epoch=5, total_steps=5
        )
        self.step, self.is_done = 0, False

    def counters(self) -> dict[str, int]:
        return {"step": self.step}

    def set_counters(self, counters: dict[str, int]) -> None:
        self.step = counters["step"]

    def train(self) -> None:
        self.workload.model(torch.ones(2, 4)).sum().backward()
        self.workload.optimizer.step()
        self.workload.optimizer.zero_grad()
        self.step += 1


def saved(folder: Path, state: State) -> dict[str, Path]:
    store = LocalStore(folder)
    told: list[dict[str, Any]] = []
    Checkpointer(
        store=store,
        state=state,  # type: ignore[arg-type]
        job_id="job",
        send=told.append,
        code_digest="c0de",
    ).save_now(1)
    assert [type(message) for message in told] == [CheckpointWritten]
    return open_newest(store, job_id="job").files


def put(files: dict[str, Path], state: State) -> list[str]:
    """Restore, and return the warnings."""
    warnings: list[str] = []
    restore(state, files, config=state.config, warn=warnings.append)  # type: ignore[arg-type]
    return warnings


def test_state_has_the_metadata_of_its_job(tmp_path: Path) -> None:
    config = config_of()

    told = json.loads(saved(tmp_path, State(config))[STATE_PART].read_text())["about"]

    assert told["versions"]["torch"] == torch.__version__
    assert told["versions"]["python"] == platform.python_version()
    assert set(told["versions"]) == {"etrain_jupyter", "torch", "numpy", "python"}
    assert told["config"] == config.model_dump(mode="json")
    assert told["config_digest"] == config_digest(config)
    assert (told["code_digest"], told["seed"], told["optimizer"]) == ("c0de", 5, "Adam")


def test_unchanged_job_restores_everything_without_a_warning(tmp_path: Path) -> None:
    first, fresh = State(config_of()), State(config_of())
    first.train()

    assert put(saved(tmp_path, first), fresh) == []

    for state in (first, fresh):
        state.train()
    assert torch.equal(first.workload.model.weight, fresh.workload.model.weight)


def test_average_that_was_added_starts_from_the_restored_weights(tmp_path: Path) -> None:
    first, fresh = State(config_of()), State(config_of())
    first.train()
    average = WeightAverage(fresh.workload.model, decay=0.9, has_warmup=True)
    fresh.workload.extras["ema"] = average

    assert put(saved(tmp_path, first), fresh) == []

    assert torch.equal(average.tensors["weight"], first.workload.model.weight)


def test_average_continues_from_the_checkpoint(tmp_path: Path) -> None:
    averages = []
    states = [State(config_of()), State(config_of())]
    for state in states:
        averages.append(WeightAverage(state.workload.model, decay=0.9, has_warmup=True))
        state.workload.extras["ema"] = averages[-1]
    states[0].train()
    averages[0].after_update()

    assert put(saved(tmp_path, states[0]), states[1]) == []

    for state, average in zip(states, averages, strict=True):
        state.train()
        average.after_update()
    assert torch.equal(averages[0].tensors["weight"], averages[1].tensors["weight"])


def test_state_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / STATE_PART).write_text('{"extras": ' + "[" * 100_000 + "]" * 100_000 + "}")

    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        header_of({STATE_PART: tmp_path / STATE_PART})


def test_changed_rate_of_the_cell_is_used_and_the_moments_are_kept(tmp_path: Path) -> None:
    first, fresh = State(config_of(lr=0.1)), State(config_of(lr=0.7))
    first.train()

    [warning] = put(saved(tmp_path, first), fresh)

    assert "options have changed" in warning
    optimizer = fresh.workload.optimizer
    assert optimizer.param_groups[0]["lr"] == 0.7
    moments = [s["exp_avg"] for s in first.workload.optimizer.state.values()]
    kept = [s["exp_avg"] for s in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))


@pytest.mark.parametrize(("old", "new"), [("Adam", "SGD"), ("SGD", "Adam")])
def test_another_optimizer_starts_from_scratch(tmp_path: Path, old: str, new: str) -> None:
    first, fresh = State(config_of(old)), State(config_of(new, lr=0.3))
    first.train()

    [warning] = put(saved(tmp_path, first), fresh)

    assert f"from {old} to {new}" in warning
    assert torch.equal(first.workload.model.weight, fresh.workload.model.weight)
    assert dict(fresh.workload.optimizer.state) == {}
    assert fresh.workload.optimizer.param_groups[0]["lr"] == 0.3
    fresh.train()


def test_another_model_is_refused_with_an_explanation(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not fit this model .* all checkpoints"):
        put(saved(tmp_path, State(config_of())), State(config_of(), width=5))


def test_early_stopping_that_was_removed_is_dropped(tmp_path: Path) -> None:
    stops = config_of(early_stopping={"metric": "loss", "patience": 1})

    [warning] = put(saved(tmp_path, State(stops)), State(config_of()))

    assert "'evaluations'" in warning


def test_early_stopping_by_another_metric_starts_from_scratch(tmp_path: Path) -> None:
    def job(metric: str, patience: int) -> State:
        asked = {"metric": metric, "mode": "min", "patience": patience}
        return State(config_of(early_stopping=asked))

    first = job("loss", 1)
    for step, value in ((1, 1.0), (2, 2.0)):
        first.best_tracker.take(step, {"loss": value, "error": value})
    assert first.best_tracker.is_over
    files = saved(tmp_path, first)
    same, patient, other = (
        job("loss", 1),
        job("loss", 2),
        State(
            config_of(
                metrics={"error": "e"},
                early_stopping={"metric": "error", "mode": "min", "patience": 1},
            )
        ),
    )

    for fresh in (same, patient, other):
        put(files, fresh)

    assert [fresh.best_tracker.is_over for fresh in (same, patient, other)] == [True, False, False]
    other.best_tracker.take(3, {"loss": 9.0, "error": 9.0})
    assert not other.best_tracker.is_over, "it knows no better error"
