"""The body of ``%%etrain search``: what it becomes, and how errors in it read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.plugins.search.cell import (
    ParsedSearch,
    parse_search_cell,
    parse_search_mapping,
)
from etrain_jupyter.plugins.search.template import ArithmeticOnlyError, compute, insert_values


class Net:
    def __init__(self, width: int = 8) -> None:
        self.width = width


def accuracy(output: Any, target: Any) -> Any:
    return output


NOTEBOOK = {
    "Net": Net,
    "train_set": ([1], [1]),
    "eval_set": ([1], [1]),
    "loss": lambda output, target: 0.0,
    "accuracy": accuracy,
    "factor": 2,
    "table": {1: 2},
}


def warmup_of(config: Any) -> str:
    return str(config.schedule.warmup)


BODY = """\
model: Net(width=width)
data: {train: train_set, eval: eval_set}
loss: loss
metrics: {accuracy: accuracy}
optimizer: {name: Adam, lr: !py lr * factor}
epochs: 8
search:
  space:
    width: {choice: [8, 16]}
    lr: {low: 1e-4, high: 1e-1, log: true}
  metric: eval_accuracy
  mode: max
"""


def parse(body: str = BODY, **more: Any) -> ParsedSearch:
    return parse_search_cell(body, namespace={**NOTEBOOK, **more})


def test_names_of_the_space_are_inserted_in_expressions_and_values() -> None:
    parsed = parse()

    config = parsed.template.build({"width": 16, "lr": 0.01})

    assert config.model == "Net(width=16)"
    assert config.optimizer.lr == 0.02
    assert (parsed.search.metric, parsed.search.mode, parsed.num_trials) == ("accuracy", "max", 20)
    assert parsed.search.prunes


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("batch: {global: !py 'width * 4'}", 64, lambda c: c.batch.size(1)),
        ("seed: !py width", 16, lambda c: c.seed),
        ("clip_grad_norm: !py '1.0 if width > 8 else 0.5'", 1.0, lambda c: c.clip_grad_norm),
        ("schedule: {warmup: !py \"str(width) + ' steps'\"}", "16 steps", warmup_of),
        ("checkpoint: {keep: !py width}", 16, lambda c: c.checkpoint.keep),
    ],
)  # fmt: skip
def test_any_key_can_be_searched(key: str, value: Any, read: Any) -> None:
    config = parse(f"{BODY}{key}\n").template.build({"width": 16, "lr": 0.01})

    assert read(config) == value


def test_grid_tries_every_combination() -> None:
    body = BODY.replace("{low: 1e-4, high: 1e-1, log: true}", "{int: [1, 3]}")

    assert parse(f"{body}  method: grid\n").num_trials == 6


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("low: 1e-4, high: 1e-1", "low: 1, high: 1e-1", "from 1 to 0.1 is empty", "low: 0.1"),
        ("{choice: [8, 16]}", "{choice: []}", "the choice is empty", "choice: [64, 128]"),
        ("{choice: [8, 16]}", "{int: [4, 4]}", "the range from 4 to 4 is empty", "higher"),
        ("low: 1e-4", "low: 0", "cannot begin at 0", "above 0"),
        ("width: {choice", "depth: {choice", "'width' is not defined", ""),
        ("Net(width=width)", "Net(width=8)", "'width' is used nowhere", "!py width"),
        ("metric: eval_accuracy", "metric: acuracy", "reports the metric 'acuracy'", "accuracy"),
        ("  mode: max\n", "", "mode is missing", "mode: max"),
        ("mode: max", "mode: max\n  num_samples: 4", "unknown key 'num_samples'", "'trials'"),
        ("mode: max", "mode: max\n  method: hyperband", "search.method|method must be", "asha"),
        ("mode: max", "mode: max\n  method: grid", "finite number of values", "choice"),
        ("mode: max", "mode: max\n  max: 8 epochs", "both set the length", "keep one"),
        ("mode: max", "mode: max\n  max: 2 h", "number of epochs or steps", "budget"),
        ("mode: max", "mode: max\n  budget: {tme: 2 h}", "unknown key 'tme'", "time"),
        ("{choice: [8, 16]}", "[8, 16]", "not described in our words", "{choice: [8, 16]}"),
        ("{choice: [8, 16]}", "{type: int, minval: 1, maxval: 8}", "not described", "[1, 8]"),
        ("{choice: [8, 16]}", "tune.randint(1, 8)", "not described", "{int: [1, 8]}"),
        ("{choice: [8, 16]}", "tune.quniform(1, 8, 1)", "not described", "{low: 1, high: 8}"),
        ("{choice: [8, 16]}", "{grid_search: [8, 16]}", "not described", "{choice: [8, 16]}"),
        ("{choice: [8, 16]}", "'trial.suggest_int(\"width\", 1, 8, log=True)'", "not described",
         "{int: [1, 8], log: true}"),
        ("{choice: [8, 16]}", "{net: {type: int, minval: 1, maxval: 8}}", "not described",
         "net as a name of its own"),
        ("{choice: [8, 16]}", "8", "not described", "write the number 8 where width is used"),
        ("mode: max", "mode: max\n  grace_period: 2", "unknown key 'grace_period'", "eval: {every"),
        ("mode: max", "mode: max\n  method: tpe\n  divisor: 3", "no effect without a pruner",
         "pruner: asha"),
        ("search:", "searcher:", "'search' is missing", "space"),
        ("lr * factor", "'lr * table[1]'", "uses 'table' together with", "arithmetic"),
        ("lr * factor", "lr.real", "more than arithmetic", "arithmetic"),
        ("epochs: 8", "epochs: !py 16 - width", "width=16 gives no valid job: epochs must be", ""),
        ("epochs: 8", "pool: !py str(width)", "pool is the same for all trials", "fixed"),
        ("epochs: 8", "epochs: !py width", "epochs differs between trials", "pruner: none"),
        (", eval: eval_set", "", "data.eval is not set", "eval_set"),
        ("    width:", "    max:", "'max' is a name of Python itself", "another name"),
        ("Net(width=width)", "'(lambda width: Net(width))(1)'", "defines its own", "rename"),
    ],
)  # fmt: skip
def test_wrong_search_is_refused_with_a_remedy(old: str, new: str, message: str, hint: str) -> None:
    assert old in BODY

    with pytest.raises(ConfigError) as caught:
        parse(BODY.replace(old, new))

    assert any(part in str(caught.value) for part in message.split("|"))
    assert hint in caught.value.hint


def test_name_that_shadows_one_of_the_notebook_is_pointed_out() -> None:
    [warning] = parse(lr=0.1).warnings

    assert "'lr' is both a name of search.space and of the notebook" in warning


@pytest.mark.parametrize(
    "text", ["open('x')", "x.real", "[y for y in (1,)]", "lambda: 1", "max(x, key=x)", "'a' * 9**9"]
)
def test_values_are_computed_by_arithmetic_alone(text: str) -> None:
    with pytest.raises((ArithmeticOnlyError, TypeError, ValueError)):
        compute(text, {"x": 1})


def test_huge_power_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        compute("10 ** 10 ** 10", {})


@given(st.integers(-99, 99), st.floats(-1e3, 1e3), st.text(max_size=5))
def test_inserted_values_are_those_that_the_name_would_have(a: int, b: float, c: str) -> None:
    values = {"a": a, "b": b, "c": c}

    text = insert_values("dict(x=a, y=[b, -b], z=c + 'a', a=1)", values)

    assert eval(text) == {"x": a, "y": [b, -b], "z": c + "a", "a": 1}


KEYS: dict[str, Any] = {
    "model": "Net(width=width)",
    "data": {"train": "train_set", "eval": "eval_set"},
    "loss": "loss",
    "metrics": {"accuracy": "accuracy"},
    "optimizer": {"name": "Adam", "lr": "!py lr * factor"},
    "epochs": 8,
    "search": {
        "space": {
            "width": {"choice": [8, 16]},
            "lr": {"low": 1e-4, "high": 1e-1, "log": True},
        },
        "metric": "eval_accuracy",
        "mode": "max",
    },
}


def test_mapping_from_python_is_the_same_search_as_the_cell() -> None:
    cell, mapping = parse(), parse_search_mapping(KEYS, NOTEBOOK)

    assert (mapping.search, mapping.space) == (cell.search, cell.space)
    assert mapping.template == cell.template


def test_objects_in_a_mapping_get_names() -> None:
    data = {"train": ([1, 2], [3, 4]), "eval": ([5], [6])}

    parsed = parse_search_mapping({**KEYS, "data": data, "loss": print}, NOTEBOOK)

    config = parsed.template.build({"width": 8, "lr": 0.1})
    assert parsed.job.namespace({})[config.data.train] is data["train"]
    assert parsed.job.namespace({})[config.loss] is print


@pytest.mark.parametrize(
    ("changed", "path", "message"),
    [
        ({"optimizer": {"lr": "!py lr *"}}, ("optimizer", "lr"), "not a valid Python expression"),
        ({"optimizer": {"lr": "!py rate"}}, ("optimizer", "lr"), "'rate' is not defined"),
        ({"optimizer": {"lr": "!py 1 / 0"}}, ("optimizer", "lr"), "raised ZeroDivisionError"),
        ({"model": "Net()"}, ("search", "space", "width"), "'width' is used nowhere in the cell"),
        ({"epoch": 3}, ("epoch",), "unknown key 'epoch'"),
        ({"search": 3}, ("search",), "search must be a group"),
    ],
)
def test_errors_in_a_mapping_name_the_key(
    changed: dict[str, Any], path: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_search_mapping({**KEYS, **changed}, NOTEBOOK)

    assert message in str(caught.value)
    assert caught.value.path == path
