from __future__ import annotations

import inspect
from typing import Any

import pytest

from etrain_jupyter.config import parse_cell
from etrain_jupyter.config.cell import keys_of
from etrain_jupyter.config.describe import (
    all_keys,
    describe,
    describe_optimizer,
    example_body,
    keys_in_words,
)
from etrain_jupyter.config.fields import Interval, Section
from etrain_jupyter.config.keys import KeyPath, accepts, group_at, is_reference, units_of, words_of
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.config.vocabulary import NAMED_LR, OPTIONS, SWITCHES
from etrain_jupyter.config.yaml_nodes import load_body

KEYS = [key.path for key in all_keys()]


def paths_of(section: type[Section], start: KeyPath = ()) -> set[KeyPath]:
    """Return every key of the schema, found without what is tested here."""
    found: set[KeyPath] = set()
    for key, group in keys_of(section).items():
        found.add((*start, key))
        if group is not None and group is not Interval:
            found |= paths_of(group, (*start, key))
    return found


def test_every_key_of_the_schema_is_described() -> None:
    assert set(KEYS) == paths_of(TrainConfig) - {("optimizer", "options")}


@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_description_of_a_key_has_its_type_and_meaning(path: KeyPath) -> None:
    key = describe(path)

    assert key is not None
    assert key.takes
    assert key.meaning.endswith((".", "}."))
    assert key.meaning in str(key)
    assert key.facts in key.markdown()


@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_example_of_a_key_is_accepted(path: KeyPath) -> None:
    key = describe(path)
    assert key is not None
    value: Any = load_body(key.example, namespace={})[0]
    for part in path:
        value = value[part]

    assert accepts(path, value), key.example


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        (("model",), "Python expression; required"),
        (("batch", "global"), "whole number, 1 or more"),
        (("batch", "micro"), "whole number or auto"),
        (("optimizer", "lr"), "number, above 0; default 0.001"),
        (("precision",), "fp32, bf16 or fp16; default fp32"),
        (("compile",), "true or false; default false"),
        (("eval",), "steps, epochs, time or group of keys; default 1 epoch"),
        (("eval", "every"), "steps, epochs or time; default 1 epoch"),
        (("schedule", "warmup"), "steps or epochs"),
        (("checkpoint", "every"), "steps, epochs, time or auto"),
        (("checkpoint", "best"), "group of keys"),
        (("metrics", "anything"), "Python expression"),
        (("optimizer", "amsgrad"), "true or false"),
        (("optimizer", "weight_decay"), "number or list of numbers"),
    ],
)
def test_facts_of_a_key_follow_from_its_annotation(path: KeyPath, facts: str) -> None:
    key = describe(path)

    assert key is not None
    assert key.facts == facts


@pytest.mark.parametrize(
    "path", [(), ("nonsense",), ("model", "hidden"), ("eval", "at"), ("optimizer", "nonsense")]
)
def test_unknown_key_has_no_description(path: KeyPath) -> None:
    assert describe(path) is None


def test_options_are_those_of_the_named_optimizer() -> None:
    assert describe(("optimizer", "momentum")) is None
    found = describe(("optimizer", "momentum"), optimizer="sgd")

    assert found is not None
    assert "torch.optim.SGD" in found.meaning


def test_description_of_an_optimizer_names_its_rate_and_options() -> None:
    found = describe_optimizer("rprop")

    assert found is not None
    assert found.takes == "torch.optim.Rprop"
    assert "0.01" in found.meaning
    assert "step_sizes" in found.meaning
    assert describe_optimizer("make_optimizer") is None


@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_every_offered_word_is_accepted(path: KeyPath) -> None:
    for word in words_of(path):
        value = {"true": True, "false": False}.get(word, word)
        assert accepts(path, value), word


def test_words_are_the_enumerations_of_the_schema() -> None:
    assert words_of(("compression",)) == ("none", "bf16", "fp16", "powersgd")
    assert words_of(("scaling", "rule")) == ("none", "linear", "sqrt", "adascale", "auto")
    assert words_of(("optimizer", "name")) == tuple(NAMED_LR)
    assert words_of(("checkpoint", "every")) == ("auto", "1 epoch", "200 steps", "5 min")
    assert words_of(("name",)) == ()


@pytest.mark.parametrize(
    ("path", "number", "units"),
    [
        (("eval",), "5", ["steps", "epochs", "s", "min", "h"]),
        (("eval", "every"), "1", ["step", "epoch", "s", "min", "h"]),
        (("schedule", "warmup"), "5", ["steps", "epochs"]),
        (("schedule", "warmup"), "0.5", ["epochs"]),
        (("log", "every"), "10", ["steps"]),
        (("scaling", "ramp"), "10", ["steps"]),
        (("epochs",), "5", []),
        (("name",), "5", []),
    ],
)
def test_offered_units_match_the_key(path: KeyPath, number: str, units: list[str]) -> None:
    assert units_of(path, number) == units


def test_references_are_the_keys_whose_values_are_shipped() -> None:
    expected = {("model",), ("loss",), ("step",), ("weight",), ("optimizer",)}
    expected |= {("data", "train"), ("data", "eval"), ("data", "collate")}
    expected |= {("eval", "predict"), ("eval", "score")}

    assert {p for p in KEYS if is_reference(p)} == expected | {("optimizer", "reference")}


def test_the_example_is_a_valid_body() -> None:
    assert parse_cell(example_body(), namespace={}).config.optimizer.lr == 3e-4


def test_help_lists_every_key_with_its_default() -> None:
    text = keys_in_words()

    assert [p for p in KEYS if f"  {'.'.join(p)} " not in text] == []
    assert "checkpoint.keep          whole number, 1 or more; default 3" in text
    assert max(map(len, text.splitlines())) <= 100


def test_switches_are_the_boolean_options_of_torch() -> None:
    optim = pytest.importorskip("torch.optim")
    package = pytest.importorskip("pytorch_optimizer")
    own = {"LAMB": package.Lamb, "LARS": package.LARS}
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name in OPTIONS:
        kind = own.get(name) or getattr(optim, name)
        for parameter in inspect.signature(kind.__init__).parameters.values():
            if parameter.name in OPTIONS[name]:
                is_switch = parameter.annotation in (bool, "bool", "bool | None", bool | None)
                found[is_switch].add(parameter.name)

    assert found[True] == SWITCHES
    assert not found[False] & SWITCHES


def test_groups_are_found_by_path() -> None:
    assert group_at(()) is TrainConfig
    assert group_at(("checkpoint", "best")) is not None
    assert group_at(("model",)) is None
    assert group_at(("eval", "every", "more")) is None


def test_description_explains_what_a_single_number_sets() -> None:
    batch = describe(("batch",))

    assert batch is not None
    assert batch.takes == "whole number or group of keys"
    assert batch.meaning.endswith("A number N is short for {global: N}.")
