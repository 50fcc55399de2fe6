"""A checkpoint says what it is of, and goes into a job that was changed since."""

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
from etrain_jupyter.trainer.loop.best_tracker import Judge
from etrain_jupyter.trainer.loop.schedule import WorkPlan
from etrain_jupyter.trainer.state.checkpoint_metadata import config_digest
from etrain_jupyter.trainer.state.checkpointer import STATE_PART, Checkpointer, restore
from etrain_jupyter.wire.messages import CheckpointWritten

KINDS = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}


def config_of(name: str = "Adam", lr: float = 0.1, **keys: Any) -> TrainConfig:
    values = {"model": "m", "data": {"train": "d", "eval": "e"}, "loss": "l", "seed": 5}
    return TrainConfig.model_validate({**values, "optimizer": {"name": name, "lr": lr}, **keys})


class Loop:
    """What a checkpoint is made of, without training."""

    def __init__(self, config: TrainConfig, width: int = 3) -> None:
        model = nn.Linear(4, width)
        optimizer = KINDS[str(config.optimizer.name)](model.parameters(), lr=config.optimizer.lr)
        self.config = config
        self.judge = Judge(config)
        extras = dict(self.judge.extras)
        self.workload = SimpleNamespace(model=model, optimizer=optimizer, extras=extras)
        self.plan = WorkPlan(
            num_train=10, num_eval=4, global_batch_size=2, steps_per_epoch=5, total_steps=5
        )
        self.step, self.page, self.is_done = 0, None, False

    def counters(self) -> dict[str, int]:
        return {"step": self.step}

    def set_counters(self, counters: dict[str, int]) -> None:
        self.step = counters["step"]

    def train(self) -> None:
        self.workload.model(torch.ones(2, 4)).sum().backward()
        self.workload.optimizer.step()
        self.workload.optimizer.zero_grad()
        self.step += 1


def saved(folder: Path, loop: Loop) -> dict[str, Path]:
    store = LocalStore(folder)
    told: list[dict[str, Any]] = []
    Checkpointer(
        store=store,
        loop=loop,  # type: ignore[arg-type]
        job_id="job",
        config=loop.config,
        send=told.append,
        code_digest="c0de",
    ).save_now(1)
    assert [type(message) for message in told] == [CheckpointWritten]
    return open_newest(store, job_id="job").files


def put(files: dict[str, Path], loop: Loop) -> list[str]:
    """Restore, and return what the log is told."""
    warnings: list[str] = []
    restore(loop, files, config=loop.config, warn=warnings.append)  # type: ignore[arg-type]
    return warnings


def test_state_says_what_it_is_of(tmp_path: Path) -> None:
    config = config_of()

    told = json.loads(saved(tmp_path, Loop(config))[STATE_PART].read_text())["about"]

    assert told["versions"]["torch"] == torch.__version__
    assert told["versions"]["python"] == platform.python_version()
    assert set(told["versions"]) == {"etrain_jupyter", "torch", "numpy", "python"}
    assert told["config"] == config.model_dump(mode="json")
    assert told["config_digest"] == config_digest(config)
    assert (told["code_digest"], told["seed"], told["optimizer"]) == ("c0de", 5, "Adam")


def test_same_job_takes_everything_without_a_word(tmp_path: Path) -> None:
    first, fresh = Loop(config_of()), Loop(config_of())
    first.train()

    assert put(saved(tmp_path, first), fresh) == []

    for loop in (first, fresh):
        loop.train()
    assert torch.equal(first.workload.model.weight, fresh.workload.model.weight)


def test_checkpoint_of_an_older_version_is_read(tmp_path: Path) -> None:
    first, fresh = Loop(config_of()), Loop(config_of(lr=0.2))
    first.train()
    files = saved(tmp_path, first)
    header = json.loads(files[STATE_PART].read_text())
    del header["about"]
    older = tmp_path / "state.json"
    older.write_text(json.dumps(header))

    assert put({**files, STATE_PART: older}, fresh) == []

    assert fresh.step == 1
    assert fresh.workload.optimizer.param_groups[0]["lr"] == 0.1


def test_changed_rate_of_the_cell_holds_and_the_moments_stay(tmp_path: Path) -> None:
    first, fresh = Loop(config_of(lr=0.1)), Loop(config_of(lr=0.7))
    first.train()

    [warning] = put(saved(tmp_path, first), fresh)

    assert "other options" in warning
    optimizer = fresh.workload.optimizer
    assert optimizer.param_groups[0]["lr"] == 0.7
    moments = [s["exp_avg"] for s in first.workload.optimizer.state.values()]
    kept = [s["exp_avg"] for s in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))


@pytest.mark.parametrize(("old", "new"), [("Adam", "SGD"), ("SGD", "Adam")])
def test_another_optimizer_begins_anew(tmp_path: Path, old: str, new: str) -> None:
    first, fresh = Loop(config_of(old)), Loop(config_of(new, lr=0.3))
    first.train()

    [warning] = put(saved(tmp_path, first), fresh)

    assert f"was {old} and is {new}" in warning
    assert torch.equal(first.workload.model.weight, fresh.workload.model.weight)
    assert dict(fresh.workload.optimizer.state) == {}
    assert fresh.workload.optimizer.param_groups[0]["lr"] == 0.3
    fresh.train()


def test_another_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not fit this model .* all checkpoints"):
        put(saved(tmp_path, Loop(config_of())), Loop(config_of(), width=5))


def test_early_stopping_that_was_removed_is_dropped(tmp_path: Path) -> None:
    stops = config_of(early_stopping={"metric": "loss", "patience": 1})

    [warning] = put(saved(tmp_path, Loop(stops)), Loop(config_of()))

    assert "'judge'" in warning


def test_what_is_judged_by_another_metric_begins_anew(tmp_path: Path) -> None:
    def loop(metric: str, patience: int) -> Loop:
        asked = {"metric": metric, "mode": "min", "patience": patience}
        return Loop(config_of(early_stopping=asked))

    first = loop("loss", 1)
    for step, value in ((1, 1.0), (2, 2.0)):
        first.judge.take(step, {"loss": value, "error": value})
    assert first.judge.is_over
    files = saved(tmp_path, first)
    same, patient, other = (
        loop("loss", 1),
        loop("loss", 2),
        Loop(
            config_of(
                metrics={"error": "e"},
                early_stopping={"metric": "error", "mode": "min", "patience": 1},
            )
        ),
    )

    for fresh in (same, patient, other):
        put(files, fresh)

    assert [fresh.judge.is_over for fresh in (same, patient, other)] == [True, False, False]
    other.judge.take(3, {"loss": 9.0, "error": 9.0})
    assert not other.judge.is_over, "it knows no better error"
