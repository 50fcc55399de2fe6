from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.config import ParsedJob, check_references, parse_cell, parse_mapping, template
from etrain_jupyter.config.cell import keys_of
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.config.source_map import SourceMap, Span, did_you_mean, in_words, nearest
from etrain_jupyter.config.vocabulary import keys_of_other_tools
from etrain_jupyter.errors import CellError, ConfigError

GOOD = "model: Net()\ndata: {train: train_set}\nloss: loss\n"
SMALL: dict[str, Any] = {"model": "Net()", "data": {"train": "train_set"}, "loss": "loss"}


class Net:
    def forward(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


def cross_entropy(output: Any, target: Any) -> Any:
    return output


def adam(params: Any) -> Any:
    raise AssertionError("never called")


class Made:
    """As much of a built optimizer as the checks look at."""

    param_groups = ()


class TorchsAdam:
    __module__ = "torch.optim.adam"


def python(names: dict[str, Any] | None = None, **keys: Any) -> ParsedJob:
    return parse_mapping({**SMALL, **keys}, names or {})


# ------------------------------------------------------------------------------------ the cell


def test_the_example_of_the_contract_is_read() -> None:
    body = """\
model: Net(hidden=128)
data:
  train: train_set
  eval: eval_set
loss: F.cross_entropy
metrics: {accuracy: accuracy}
optimizer: {name: RAdam, lr: 3e-4}
batch: {global: 256}
epochs: 3
workers: {min: 1, max: 4}
"""
    config = parse_cell(body, namespace={}).config
    assert config.model == "Net(hidden=128)"
    assert config.metrics == {"accuracy": "accuracy"}
    assert (config.optimizer.name, config.optimizer.lr) == ("RAdam", 3e-4)
    assert config.batch.global_batch_size == 256
    assert (config.epochs, config.steps) == (3.0, None)
    assert config.max_workers(64) == 4


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("batch: 64\n", "batch: {global: 64}\n"),
        ("workers: 4\n", "workers: {max: 4}\n"),
        ("batch: 64\nworkers: 4\n", "batch: {global: 64}\nworkers: {min: 1, max: 4}\n"),
    ],
)
def test_number_in_place_of_a_group_sets_its_usual_key(short: str, long: str) -> None:
    configs = [parse_cell(GOOD + body, namespace={}).config for body in (short, long)]

    assert configs[0] == configs[1]


def test_a_job_from_python_takes_the_shorthands_too() -> None:
    config = python(batch=np.int64(64), workers=4).config

    assert (config.batch.global_batch_size, config.workers.max, config.workers.min) == (64, 4, 1)


def test_flags_override_the_body() -> None:
    job = parse_cell(GOOD + "name: a\nseed: 1\n", namespace={}, overrides={"name": "b"})
    assert (job.config.name, job.config.seed) == ("b", 1)


def test_flag_overrides_only_one_key_of_a_group() -> None:
    body = GOOD + "workers: {min: 2, max: 3}\n"
    job = parse_cell(body, namespace={}, overrides={"workers": {"max": 4}})
    assert (job.config.workers.min, job.config.workers.max) == (2, 4)


def test_error_in_a_flag_points_at_the_first_line() -> None:
    line = "%%etrain distributed --name ' '"
    with pytest.raises(CellError) as caught:
        parse_cell(GOOD + "name: digits\n", namespace={}, overrides={"name": " "}, first_line=line)
    assert (caught.value.line, caught.value.text) == (1, line)


def test_values_come_from_the_notebook_with_py() -> None:
    job = parse_cell(GOOD + "seed: !py base + 1\n", namespace={"base": 41})
    assert job.config.seed == 42


@pytest.mark.parametrize("value", [np.int64(3), np.array(3), 3])
def test_numpy_numbers_are_numbers(value: Any) -> None:
    assert parse_cell(GOOD + "seed: !py n\n", namespace={"n": value}).config.seed == 3


def test_object_from_py_is_added_to_the_namespace() -> None:
    net = Net()
    body = "model: !py nets[0]\ndata: {train: !py '[1, 2]'}\nloss: loss\n"
    job = parse_cell(body, namespace={"nets": [net]})
    assert job.namespace_extra[job.config.model] is net
    assert job.namespace_extra[job.config.data.train] == [1, 2]


def test_list_literal_in_the_cell_is_refused_as_data() -> None:
    with pytest.raises(CellError, match="not a list"):
        parse_cell("model: Net\ndata: {train: [1, 2]}\nloss: loss\n", namespace={})


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*keys_of(TrainConfig), "lr", "epoch", "x"]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text(max_size=8),
            st.lists(st.integers(), max_size=2),
            st.dictionaries(
                st.sampled_from(["global", "min", "max", "every", "name", "lr", "train", "y"]),
                st.one_of(st.integers(-2, 5), st.text(max_size=5), st.none()),
                max_size=3,
            ),
        ),
        max_size=5,
    )
)
def test_any_mapping_is_a_job_or_a_config_error(keys: dict[str, Any]) -> None:
    try:
        job = parse_mapping({**SMALL, **keys}, {})
    except ConfigError:
        return
    assert TrainConfig.model_validate(job.config.model_dump(mode="json")) == job.config


# --------------------------------------------------------------------------------- from Python


def test_python_api_raises_the_same_error_without_a_line_number() -> None:
    with pytest.raises(ConfigError) as caught:
        python(optimiser={})
    error = caught.value
    assert type(error) is ConfigError
    assert (str(error), error.path) == ("unknown key 'optimiser'", ("optimiser",))
    assert error.render() == ["etrain: unknown key 'optimiser'", "  did you mean 'optimizer'?"]


def test_step_and_weight_can_be_python_objects() -> None:
    def num_tokens(batch: Any) -> int:
        return len(batch)

    job = python({}, loss=None, step=cross_entropy, weight=num_tokens)
    assert (job.config.step, job.config.weight) == ("cross_entropy", "num_tokens")
    assert job.namespace_extra["cross_entropy"] is cross_entropy


def test_key_that_is_not_a_string_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown key '3'"):
        parse_mapping({**SMALL, 3: 4}, {})  # type: ignore[dict-item]


@pytest.mark.parametrize("keys", [{"data": "train_set"}, {"data": None}, {"metrics": ["a"]}])
def test_a_group_must_be_a_group(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        python(**keys)


def test_a_class_keeps_its_name() -> None:
    job = python({"Net": Net}, model=Net)
    assert (job.config.model, dict(job.namespace_extra)) == ("Net", {})


def test_an_instance_that_has_a_name_keeps_it() -> None:
    net = Net()
    assert python({"_": net, "net": net}, model=net).config.model == "net"


def test_an_instance_without_a_name_gets_one() -> None:
    net = Net()
    job = python({}, model=net)
    assert (job.config.model, job.namespace_extra["model_net"]) == ("model_net", net)


def test_library_function_keeps_its_name() -> None:
    job = python({}, loss=cross_entropy)
    assert (job.config.loss, job.namespace_extra) == (
        "cross_entropy",
        {"cross_entropy": cross_entropy},
    )


def test_name_of_the_notebook_is_not_overwritten() -> None:
    job = python({"cross_entropy": 3}, loss=cross_entropy)
    assert job.config.loss == "cross_entropy_2"
    assert job.namespace({"cross_entropy": 3}) == {
        "cross_entropy": 3,
        "cross_entropy_2": cross_entropy,
    }


def test_lambda_gets_a_valid_identifier_as_its_name() -> None:
    job = python({}, loss=lambda o, t: o, metrics={"a": lambda o, t: t})
    assert job.config.loss == "the_lambda"
    assert job.config.metrics == {"a": "the_lambda_2"}


def test_object_used_twice_gets_one_name() -> None:
    data = [1, 2, 3]
    job = python({}, data={"train": data, "eval": data})
    assert job.config.data.train == job.config.data.eval


def test_pairs_dicts_and_factories_are_accepted_in_the_mapping() -> None:
    pair = ([1], [2])
    table = {"x": [1]}
    job = python({}, data={"train": pair, "eval": table}, optimizer=dict)
    assert job.namespace_extra[job.config.data.train] is pair
    assert job.namespace_extra[str(job.config.data.eval)] is table
    assert job.config.optimizer.reference == "dict_2"


def test_live_objects_are_checked_like_names() -> None:
    job = python({}, data={"train": []})
    with pytest.raises(ConfigError, match=r"data\.train is empty"):
        check_references(job.config, job.namespace({"Net": Net, "loss": cross_entropy}))


def test_none_as_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="model is empty"):
        python(model=None)


def test_paths_and_tuples_are_accepted_as_values() -> None:
    job = python(checkpoint={"to": Path("out")}, optimizer={"betas": (0.9, 0.99)})
    assert job.config.checkpoint.to == "out"
    assert job.config.model_dump(mode="json")["optimizer"]["options"] == {"betas": [0.9, 0.99]}


# ------------------------------------------------------------------------------------ template


def test_the_template_is_a_job() -> None:
    config = parse_cell(template(), namespace={}).config
    assert (config.model, config.data.train, config.loss) == (
        "Net()",
        "train_set",
        "F.cross_entropy",
    )


def test_the_uncommented_template_is_a_job_too() -> None:
    body = re.sub(r"(?m)^( *)# (?!later: |or )", r"\1", template())
    config = parse_cell(body, namespace={}).config
    assert config.data.eval == "eval_set"
    assert config.workers.max == 4
    assert config.optimizer.name == "AdamW"


def test_the_template_shows_every_key_and_what_comes_later() -> None:
    text = template()
    for key in keys_of(TrainConfig):
        assert re.search(rf"(?m)^(# )?(later: |or )?{key}:", text), key
    assert "#   tensorboard: true" in text
    assert re.search(r"(?m)^# or steps: ", text)
    assert all("  # " in line for line in text.splitlines())


# ------------------------------------------------------------------------------ small helpers


def test_hints_for_keys_of_other_systems_hide_no_key_of_ours() -> None:
    ours = {*keys_of(TrainConfig)}
    for name, section in keys_of(TrainConfig).items():
        ours |= {f"{name}.{key}" for key in keys_of(section)} if section else set()
    assert ours & set(keys_of_other_tools("cell")) == set()


def test_error_for_a_key_of_another_system_suggests_ours() -> None:
    for key, hint in keys_of_other_tools("cell").items():
        if "." not in key:
            with pytest.raises(CellError) as caught:
                parse_cell(GOOD + f"{key}: 3\n", namespace={})
            assert caught.value.hint == hint


def test_nearest_ignores_case_and_suggests_nothing_for_a_distant_word() -> None:
    assert nearest("ADAM", ["Adam", "SGD"]) == ["Adam"]
    assert did_you_mean("zzz", ["Adam"]) == ""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "empty"),
        (True, "true"),
        (3, "the number 3"),
        ("x", "the text 'x'"),
        ([], "a list"),
        ({}, "a group of keys"),
        (object(), "an object"),
    ],
)
def test_in_words_describes_each_kind_of_value(value: Any, words: str) -> None:
    assert in_words(value) == words


def test_tab_in_a_line_does_not_shift_the_caret() -> None:
    source = SourceMap(lines=("%%etrain", "a:\tb"))
    error = source.error_at(Span(line=2, column=4), "x")
    assert error.render()[1:3] == ["    2 | a: b", "      |    ^"]


def test_error_for_a_missing_key_points_at_its_group() -> None:
    with pytest.raises(CellError) as caught:
        parse_cell("model: Net()\nloss: l\ndata:\n  eval: x\n", namespace={})
    assert (caught.value.line, caught.value.column, caught.value.length) == (4, 1, 4)


# ------------------------------------------------------------- names of the notebook and of torch


@pytest.mark.parametrize(
    ("text", "names"),
    [("adam", {"adam": adam}), ("lbfgs", {"lbfgs": adam}), ("sgd", {"sgd": Made()})],
)
def test_object_of_the_notebook_is_preferred_to_an_optimizer_of_torch(
    text: str, names: dict[str, Any]
) -> None:
    job = parse_cell(f"{GOOD}optimizer: {text}\n", namespace=names)
    assert (job.config.optimizer.name, job.config.optimizer.reference) == (None, text)
    assert job.data["optimizer"] == {"reference": text}
    assert f"optimizer: {text} is the notebook's '{text}'" in job.warnings[0]


def test_optimizer_function_given_to_python_is_not_taken_for_torchs() -> None:
    job = python(optimizer=adam)
    assert job.config.references()["optimizer"] == "adam"
    check_references(
        job.config,
        {
            "Net": Net,
            "train_set": [1],
            **job.namespace({"loss": max}),
        },
    )


@pytest.mark.parametrize(
    "names", [{}, {"Adam": adam}, {"adam": re}, {"adam": 0.1}, {"adam": TorchsAdam}]
)
def test_name_of_torch_is_used_without_a_function_of_the_notebook(names: dict[str, Any]) -> None:
    job = python(names, optimizer="adam")
    assert (job.config.optimizer.name, job.warnings) == ("Adam", ())


def test_options_select_the_optimizer_of_torch_with_a_warning() -> None:
    job = python({"adam": adam}, optimizer={"name": "adam", "lr": 0.5})
    assert (job.config.optimizer.name, job.config.optimizer.lr) == ("Adam", 0.5)
    assert "optimizer.name=adam is Adam of torch.optim, not 'adam' of the n" in job.warnings[0]
