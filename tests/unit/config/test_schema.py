from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from etrain_jupyter.config.cell import parse_mapping
from etrain_jupyter.config.schema import (
    Interval,
    OptimizerConfig,
    Section,
    TrainConfig,
)
from etrain_jupyter.config.vocabulary import DEFAULT_LR, EXTRA_LR, OPTIONS, REFUSED

SMALL = {"model": "Net()", "data": {"train": "train_set"}, "loss": "f"}


def config(**keys: object) -> TrainConfig:
    return parse_mapping({**SMALL, **keys}, {}).config


def sections(kind: type[Section] = TrainConfig) -> list[type[Section]]:
    inner = [f.annotation for f in kind.model_fields.values()]
    groups = [k for k in inner if isinstance(k, type) and issubclass(k, Section)]
    return [kind, *(s for group in groups for s in sections(group))]


def test_defaults_are_those_of_the_contract() -> None:
    made = config()
    assert made.optimizer == OptimizerConfig(name="AdamW", lr=1e-3)
    assert (made.batch.global_batch_size, made.batch.micro_batch_size) == (32, None)
    assert (made.epochs, made.steps) == (1.0, None)
    assert made.eval.every == Interval(value=1, unit="epochs")
    assert (made.checkpoint.to, made.checkpoint.every, made.checkpoint.keep) == (None, None, 3)
    assert (made.workers.min, made.workers.max) == (1, None)
    assert (made.pool, made.seed, made.log.every, made.name) == ("local", 0, 1, None)
    assert made.metrics == {}
    assert made.clip_grad_norm is None
    assert (made.checkpoint.best, made.early_stopping, made.on_nan_loss) == (None, None, "fail")


def test_every_field_has_a_docstring() -> None:
    missing = [
        f"{section.__name__}.{name}"
        for section in sections()
        for name, info in section.model_fields.items()
        if not info.description
    ]
    assert missing == []


def test_a_full_cell_survives_json() -> None:
    made = config(
        data={"train": "a", "eval": "b", "collate": "c", "num_workers": 2},
        metrics={"accuracy": "acc"},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
        batch={"global": 256, "micro": 32},
        epochs=2.5,
        eval={"every": "500 steps"},
        checkpoint={"to": "out", "every": "5 min", "keep": 1, "best": {"metric": "loss"}},
        early_stopping={"metric": "accuracy", "mode": "max", "min_delta": 0.5},
        on_nan_loss="pause",
        workers={"min": 2, "max": 4},
        seed=7,
        log={"every": "10 steps"},
        clip_grad_norm=1,
        name="digits",
    )
    text = json.dumps(made.model_dump(mode="json", by_alias=False))
    assert TrainConfig.model_validate(json.loads(text)) == made
    assert json.loads(text)["eval_every"] == "500 steps"
    assert json.loads(text)["batch"]["global_batch_size"] == 256
    assert json.loads(text)["checkpoint"]["best"] == {"metric": "loss", "mode": "min"}
    assert json.loads(text)["early_stopping"]["patience"] == 3


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"reproducible": False}, None),
        ({"reproducible": True}, 4),
        ({"reproducible": True, "workers": {"max": 5}}, 8),
        ({"reproducible": True, "workers": {"min": 6}}, 8),
        ({"reproducible": True, "workers": {"max": 1}}, 1),
        ({"reproducible": True, "batch": {"global": 3}}, 3),
        ({"reproducible": {"shards": 6}}, 6),
    ],
)
def test_number_of_shards_follows_from_the_cell_alone(keys, expected) -> None:
    assert config(**keys).num_shards() == expected


def test_no_more_workers_than_shards() -> None:
    assert config(reproducible={"shards": 2}).max_workers(cores=8) == 2
    assert config(reproducible=True, batch={"global": 3}).max_workers(cores=8) == 3


@pytest.mark.parametrize(
    "keys",
    [
        {"steps": 10},
        {"optimizer": "make_optimizer"},
        {"optimizer": "adam"},
        {"reproducible": True},
        {"reproducible": {"shards": 8}},
        {},
    ],
)
def test_other_forms_survive_json(keys: dict[str, object]) -> None:
    made = config(**keys)
    assert TrainConfig.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (False, None),
        (0.99, {"decay": 0.99, "warmup": True}),
        ({"decay": 0.9, "warmup": False}, {"decay": 0.9, "warmup": False}),
        ({}, {"decay": 0.999, "warmup": True}),
    ],
)
def test_ema_is_a_decay_or_a_group(value: Any, expected: Any) -> None:
    made = config(ema=value)

    assert made.model_dump(mode="json")["ema"] == expected
    assert TrainConfig.model_validate(made.model_dump(mode="json")) == made


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        config().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "value", "unit", "shown"),
    [
        ("200 steps", 200, "steps", "200 steps"),
        ("1 step", 1, "steps", "1 step"),
        ("200steps", 200, "steps", "200 steps"),
        ("1 epoch", 1, "epochs", "1 epoch"),
        ("0.5 epochs", 0.5, "epochs", "0.5 epochs"),
        ("1.5 epochs", 1.5, "epochs", "1.5 epochs"),
        ("30 s", 30, "s", "30 s"),
        ("5 min", 300, "s", "300 s"),
        ("2 Hours", 7200, "s", "7200 s"),
        ("1 s", 1, "s", "1 s"),
    ],
)
def test_an_interval_is_a_number_and_a_unit(text: str, value: float, unit: str, shown: str) -> None:
    interval = Interval.parse(text)
    assert (interval.value, interval.unit, str(interval)) == (value, unit, shown)


@settings(deadline=None)
@given(
    st.floats(min_value=1e-6, max_value=1e9, allow_nan=False),
    st.sampled_from(["epochs", "s"]),
)
def test_interval_round_trips_through_its_text(value: float, unit: str) -> None:
    interval = Interval.model_validate({"value": value, "unit": unit})
    assert Interval.parse(str(interval)) == interval


@pytest.mark.parametrize(
    "bad", ["", "often", "5", "0 steps", "-1 epoch", "1.5 steps", "3 weeks", "1..2 s", 200, True]
)
def test_invalid_interval_is_refused(bad: object) -> None:
    with pytest.raises(ValidationError):
        Interval.model_validate(bad)


def test_references_are_named_by_their_key() -> None:
    made = config(
        data={"train": "a", "eval": "b", "collate": "c"},
        metrics={"top.5": "m"},
        optimizer="make_optimizer",
    )
    assert made.references() == {
        "model": "Net()",
        "data.train": "a",
        "data.eval": "b",
        "data.collate": "c",
        "loss": "f",
        "optimizer": "make_optimizer",
        "metrics.top.5": "m",
    }


@pytest.mark.parametrize(
    ("keys", "cores", "expected"),
    [
        ({}, 1, 2),
        ({}, 3, 3),
        ({}, 64, 4),
        ({"workers": {"max": 7}}, 2, 7),
        ({"workers": {"min": 6}}, 2, 6),
        ({"batch": {"global": 3}}, 64, 3),
        ({"batch": {"global": 2}, "workers": {"max": 8}}, 64, 2),
    ],
)
def test_max_workers_leaves_no_worker_without_a_sample(
    keys: dict[str, object], cores: int, expected: int
) -> None:
    assert config(**keys).max_workers(cores) == expected


def test_default_max_workers_follows_from_the_cores_of_this_machine() -> None:
    assert 2 <= config().max_workers() <= 4


@pytest.mark.parametrize("name", ["adamw", "AdamW", "ADAMW", " AdamW "])
def test_an_optimizer_is_known_in_any_case(name: str) -> None:
    assert config(optimizer=name).optimizer.name == "AdamW"


def test_other_keys_of_an_optimizer_are_its_options() -> None:
    made = config(optimizer={"name": "RAdam", "lr": 3e-4, "weight_decay": 0.01}).optimizer
    assert (made.name, made.lr, made.options) == ("RAdam", 3e-4, {"weight_decay": 0.01})


def test_an_optimizer_without_a_name_is_adamw() -> None:
    assert config(optimizer={"lr": 0.1}).optimizer == OptimizerConfig(name="AdamW", lr=0.1)


def test_optimizer_without_a_rate_uses_torchs_default() -> None:
    assert config(optimizer="Adadelta").optimizer.lr == 1.0
    assert config(optimizer={"name": "RMSprop"}).optimizer.lr == 0.01


def test_unknown_optimizer_name_is_a_reference_to_a_function() -> None:
    made = config(optimizer="make_optimizer").optimizer
    assert (made.name, made.reference) == (None, "make_optimizer")


def test_optimizer_rates_and_options_match_torch() -> None:
    optim = pytest.importorskip("torch.optim")
    for name, lr in DEFAULT_LR.items():
        parameters = inspect.signature(getattr(optim, name).__init__).parameters
        assert parameters["lr"].default == pytest.approx(lr), name
        assert set(parameters) - {"self", "params", "lr"} == OPTIONS[name], name
    public = {n for n in dir(optim) if n[:1].isupper() and n != "Optimizer"}
    assert public <= {*DEFAULT_LR, *REFUSED}


def test_optimizer_rates_and_options_match_the_optional_package() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    for name, kind in {"LAMB": package.Lamb, "LARS": package.LARS}.items():
        parameters = inspect.signature(kind.__init__).parameters
        assert parameters["lr"].default == pytest.approx(EXTRA_LR[name]), name
        own = {"self", "params", "lr", "degenerated_to_sgd", "n_sma_threshold", "kwargs"}
        assert set(parameters) - own == OPTIONS[name], name


def test_no_decay_is_kept_out_of_the_optimizer_options() -> None:
    made = config(optimizer={"name": "lamb", "no_decay": "auto", "weight_decay": 0.01}).optimizer
    assert (made.name, made.lr, made.no_decay) == ("LAMB", 0.001, "auto")
    assert made.options == {"weight_decay": 0.01}


def test_steps_replace_epochs() -> None:
    assert (config(steps=5).epochs, config(steps=5).steps) == (None, 5)


@pytest.mark.parametrize("text", ["500 steps", {"every": "500 steps"}])
def test_an_interval_alone_is_recorded_as_in_older_logs(text: object) -> None:
    config = TrainConfig.model_validate({"model": "m", "data": {"train": "t"}, "eval": text})

    assert config.model_dump(mode="json")["eval_every"] == "500 steps"
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config


def test_predict_and_score_survive_the_round_trip_and_are_references() -> None:
    group = {"every": "2 epochs", "predict": "predict", "score": "score"}
    config = TrainConfig.model_validate(
        {"model": "m", "data": {"train": "t", "eval": "e"}, "eval": group}
    )

    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config
    assert config.eval.every == Interval(value=2, unit="epochs")
    assert config.references()["eval.predict"] == "predict"
    assert config.references()["eval.score"] == "score"


def test_a_best_metric_may_be_one_that_score_returns() -> None:
    keys = {"eval": {"predict": "f", "score": "g"}}
    best = {"checkpoint": {"best": {"metric": "f1", "mode": "max"}}}
    data = {"train": "t", "eval": "e"}
    TrainConfig.model_validate({"model": "m", "data": data, "loss": "l", **keys, **best})

    alone = {"eval": {**keys["eval"], "loss": False}}
    TrainConfig.model_validate({"model": "m", "data": data, "loss": "l", **alone, **best})
