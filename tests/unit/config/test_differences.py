"""What may differ between a job and the cell that resumes it."""

from __future__ import annotations

from typing import Any

import pytest

from etrain_jupyter.config.differences import compare_configs, with_values
from etrain_jupyter.config.schema import TrainConfig

BASE: dict[str, Any] = {
    "model": "Net()",
    "data": {"train": "train_set", "eval": "eval_set"},
    "loss": "loss",
    "metrics": {"accuracy": "accuracy"},
    "epochs": 3.0,
}


def config(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({**BASE, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"workers": {"min": 2, "max": 6}},
        {"epochs": 5.0},
        {"epochs": None, "steps": 500},
        {"checkpoint": {"every": "10 steps", "keep": 9, "best": {"metric": "loss"}}},
        {"log": {"every": 10}},
        {"early_stopping": {"metric": "loss", "patience": 3}},
        {"eval": "10 steps"},
        {"on_nan_loss": "pause"},
        {"backend": "gloo"},
        {"metrics": {"accuracy": "accuracy", "f1": "f1"}},
        {"data": {"train": "train_set", "eval": "eval_set", "num_workers": 2}},
        {"batch": {"global": 32, "micro": 4}},
        {"compile": True},
    ],
    ids=str,
)
def test_harmless_changes_are_listed_without_a_reason(changes: dict[str, Any]) -> None:
    found = compare_configs(config(), config(**changes))

    assert found != []
    assert [difference.why for difference in found if difference.why] == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": "Net(32)"}, "model: Net() -> Net(32)"),
        ({"seed": 7}, "seed: 0 -> 7"),
        ({"batch": {"global": 64}}, "batch.global: 32 -> 64"),
        ({"batch": {"per_worker": 8}}, "batch.per_worker: none -> 8"),
        ({"optimizer": "SGD"}, "optimizer.name: AdamW -> SGD"),
        ({"optimizer": {"name": "AdamW", "lr": 0.1}}, "optimizer.lr: 0.001 -> 0.1"),
        ({"data": {"train": "more", "eval": "eval_set"}}, "data.train: train_set -> more"),
        ({"data": {"train": "train_set"}}, "data.eval: eval_set -> none"),
        ({"loss": "other"}, "loss: loss -> other"),
        ({"precision": "bf16"}, "precision: fp32 -> bf16"),
        ({"compression": "bf16"}, "compression: none -> bf16"),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm: none -> 1.0"),
        ({"ema": 0.9}, "ema.decay: none -> 0.9"),
        ({"sync_batchnorm": True}, "sync_batchnorm: False -> True"),
        ({"schedule": {"decay": "cosine"}}, "schedule.decay: none -> cosine"),
        ({"reproducible": {"shards": 8}}, "reproducible.shards: none -> 8"),
        ({"checkpoint": {"to": "/elsewhere"}}, "checkpoint.to: none -> /elsewhere"),
    ],
    ids=str,
)
def test_changes_that_alter_the_curve_are_listed_with_a_reason(
    changes: dict[str, Any], line: str
) -> None:
    matters = [d for d in compare_configs(config(), config(**changes)) if d.why]

    assert line in [str(difference) for difference in matters]


def test_every_key_that_is_not_known_to_be_harmless_matters() -> None:
    harmless = {"name", "pool", "workers", "log", "eval_every", "early_stopping", "on_nan_loss"}
    harmless |= {"metrics", "compile", "epochs", "steps", "checkpoint", "batch", "data"}
    harmless |= {"backend", "shard"}
    known = {"model", "loss", "step", "weight", "optimizer", "schedule", "scaling", "precision"}
    known |= {"compression", "clip_grad_norm", "reproducible", "seed", "ema", "sync_batchnorm"}

    assert set(TrainConfig.model_fields) == harmless | known, "decide what a new key means"


def test_extending_a_job_with_a_decaying_rate_matters() -> None:
    falls = {"schedule": {"decay": "linear"}}

    [found] = compare_configs(config(**falls), config(**falls, epochs=6.0))

    assert "the learning rate jumps" in found.why


def test_shards_that_follow_from_workers_max_matter() -> None:
    old = config(reproducible=True, workers={"min": 1, "max": 4})
    new = config(reproducible=True, workers={"min": 1, "max": 8})

    matters = [str(d) for d in compare_configs(old, new) if d.why]

    assert matters == ["reproducible.shards: 4 -> 8"]


def test_changed_values_keep_the_shards_and_replace_the_length() -> None:
    old = config(reproducible=True, workers={"min": 1, "max": 4})

    new = with_values(old, {"max": 2, "steps": 90, "min": None})

    assert (new.workers.min, new.workers.max) == (1, 2)
    assert (new.epochs, new.steps) == (None, 90)
    assert [d for d in compare_configs(old, new) if d.why] == []
    assert with_values(old, {}) == old
