from __future__ import annotations

import functools
import math
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.config import check_references, parse_cell, parse_mapping
from etrain_jupyter.config.references import free_names, import_path
from etrain_jupyter.data import Shards
from etrain_jupyter.errors import CellError, ConfigError


class Net:
    def __init__(self, hidden: int = 8) -> None:
        self.hidden = hidden

    def forward(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


class Columns:
    """As much of a tensor as the checks look at."""

    def __init__(self, length: int) -> None:
        self.shape = (length, 3)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> int:
        return index


def loss(output: Any, target: Any) -> Any:
    return output - target


NOTEBOOK: dict[str, Any] = {
    "Net": Net,
    "net": Net(),
    "loss": loss,
    "train_set": [(1, 2)],
    "functools": functools,
    "math": math,
    "os": os,
}


def check(**keys: Any) -> None:
    names = {**NOTEBOOK, **keys.pop("names", {})}
    body = {"model": "Net()", "data": {"train": "train_set"}, "loss": "loss", **keys}
    job = parse_mapping(body, names)
    check_references(job.config, job.namespace(names))


class IterableDataset:
    """Like those of torch and Hugging Face, with the length that some of them have."""

    def __len__(self) -> int:
        return 3


class DatasetDict(dict[str, Any]):
    """Like that of Hugging Face."""


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(**keys)
    return str(caught.value)


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("Net(hidden=128)", {"Net"}),
        ("nn.CrossEntropyLoss(label_smoothing=0.1)", {"nn"}),
        ("functools.partial(f, k=2)", {"functools", "f"}),
        ("lambda o, t: loss(o, t) * scale", {"loss", "scale"}),
        ("lambda x, y=base: x + y", {"base"}),
        ("[f(x) for x in xs if x in keep]", {"f", "xs", "keep"}),
        ("{k: v for k, v in pairs}", {"pairs"}),
        ("[[y for y in x] for x in xs]", {"xs"}),
        ("[x for x in x]", {"x"}),
        ("[lambda: x for x in xs]", {"xs"}),
        ("(n := 3) + n", set()),
        ("[(lambda z: z + n)(1) for i in r]", {"n", "r"}),
        ("f'{a}{b!r:{width}}'", {"a", "b", "width"}),
        ("len(xs)", {"len", "xs"}),
        ("package.module:attribute", set()),
        ("None", set()),
        ("a if b else c[d:e]", {"a", "b", "c", "d", "e"}),
        ("{**a, 'k': b}", {"a", "b"}),
        ("  Net()  ", {"Net"}),
    ],
)
def test_free_names_are_those_not_bound_in_the_expression(expression: str, names: set[str]) -> None:
    assert free_names(expression) == names


identifiers = st.from_regex(r"v[a-z]{0,5}", fullmatch=True)


@settings(deadline=None)
@given(st.lists(identifiers, min_size=1, max_size=4, unique=True), identifiers)
def test_evaluating_needs_exactly_the_free_names(names: list[str], bound: str) -> None:
    expression = f"sum({bound} for {bound} in [{', '.join(names)}])"
    assert free_names(expression) == {"sum", *names}
    namespace = dict.fromkeys(names, 1)
    assert eval(expression, namespace) == len(names)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_has_free_names_or_is_not_an_expression(text: str) -> None:
    try:
        found = free_names(text)
    except (SyntaxError, ValueError):
        return
    assert all(isinstance(name, str) for name in found)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("pkg.mod:Net", ("pkg.mod", "Net")),
        ("mod:Net.build", ("mod", "Net.build")),
        ("lambda:x", None),
        ("lambda: x", None),
        ("xs[a:b]", None),
        ("Net()", None),
        ("mod:", None),
        ("mod:Net()", None),
    ],
)
def test_import_path_is_distinguished_from_an_expression(
    text: str, path: tuple[str, str] | None
) -> None:
    assert import_path(text) == path


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"model": "Net"},
        {"model": "net"},
        {"model": "lambda: Net(hidden=3)"},
        {"loss": "functools.partial(loss, target=3)"},
        {"loss": "os.path.join"},
        {"loss": "operator:sub"},
        {"data": {"train": "[(i, i) for i in range(10)]"}},
        {"data": {"train": "lambda: train_set"}},
        {"optimizer": "functools.partial"},
        {"metrics": {"accuracy": "loss"}},
        {"model": "max"},
    ],
)
def test_valid_references_pass(keys: dict[str, Any]) -> None:
    check(**keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "None"}, "model: the value of 'None' is None"),
        ({"model": "n", "names": {"n": None}}, "model: the value of 'n' is None"),
        ({"loss": "n", "names": {"n": None}}, "loss: the value of 'n' is None"),
        (
            {"metrics": {"a": "n"}, "names": {"n": None}},
            "metrics.a: the value of 'n' is None",
        ),
        (
            {"data": {"train": "train_set", "eval": "n"}, "names": {"n": None}},
            "data.eval: the value of 'n' is None",
        ),
        ({"model": "d", "names": {"d": {}}}, "model: 'd' is a dict, not an nn.Module"),
        ({"model": "math"}, "model: 'math' is the module 'math'"),
        ({"model": "Net(1, 2)"}, "model: Net() too many positional arguments"),
        ({"model": "train_set()"}, "model: 'train_set' is a list and cannot be called"),
        ({"loss": "train_set"}, "loss: 'train_set' is a list and cannot be called"),
        ({"metrics": {"a": "m"}, "names": {"m": 0.5}}, "metrics.a: 'm' is a number"),
        (
            {"data": {"train": "train_set", "collate": "train_set"}},
            "data.collate: 'train_set' is a list and cannot be called",
        ),
        ({"data": {"train": "e"}, "names": {"e": []}}, "data.train is empty: len(e) is 0"),
        ({"data": {"train": "e"}, "names": {"e": {}}}, "data.train is empty: len(e) is 0"),
        (
            {"data": {"train": "p"}, "names": {"p": (Columns(0), Columns(0))}},
            "data.train is empty: len(p[0]) is 0",
        ),
        (
            {"data": {"train": "p"}, "names": {"p": (Columns(5), Columns(4))}},
            "data.train: its parts differ in length: len(p[0]) is 5, len(p[1]) is 4",
        ),
        (
            {"data": {"train": "p"}, "names": {"p": {"x": Columns(5), "y": Columns(4)}}},
            "data.train: its parts differ in length: len(p['x']) is 5, len(p['y']) is 4",
        ),
        (
            {"data": {"train": "g"}, "names": {"g": iter([1])}},
            "data.train: 'g' is a list_iterator: a stream, which has no index",
        ),
        ({"data": {"train": "s"}, "names": {"s": {1, 2}}}, "data.train: 's' is a set and cannot"),
        (
            {"data": {"train": "s"}, "names": {"s": Shards("/no/such/folder")}},
            "data.train: /no/such/folder does not exist on this machine.",
        ),
        (
            {"data": {"train": "s"}, "names": {"s": IterableDataset()}},
            "data.train: 's' is an IterableDataset: a stream, which has no index.",
        ),
        (
            {"data": {"train": "d"}, "names": {"d": DatasetDict(train=[1], test=[2])}},
            "data.train: 'd' is a DatasetDict with the splits train, test",
        ),
        ({"data": {"train": "p"}, "names": {"p": "a.csv"}}, "data.train: 'p' is a text"),
        (
            {"optimizer": "o", "names": {"o": SimpleNamespace(param_groups=[])}},
            "optimizer: 'o' is a SimpleNamespace, whose parameters are not those of a worker",
        ),
        ({"model": "build", "names": {"build": lambda a: a}}, "model: build() missing a required"),
        ({"loss": "os.pth.join"}, "loss: module 'os' has no 'pth'"),
        ({"loss": "[x for x in unknown]"}, "loss: 'unknown' is not defined in this notebook"),
        ({"loss": "x = 3"}, "loss: 'x = 3' is not a valid Python expression"),
        ({"loss": "operator:no_such"}, "loss: module 'operator' has no 'no_such'"),
        ({"loss": "no_such_module.at_all:f"}, "loss: module 'no_such_module.at_all' was not found"),
        ({"loss": "__main__:f"}, "loss: '__main__:f' is defined in this notebook"),
    ],
)
def test_invalid_references_are_refused_before_submit(keys: dict[str, Any], message: str) -> None:
    assert refusal(**keys).startswith(message)


class Criterion(Net):
    """As much of an nn.Module as the checks look at; torch's ``__call__`` takes any arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...

    def forward(self, output: Any, target: Any) -> None: ...  # type: ignore[override]


def one(batch: Any) -> None: ...


def two(model: Any, batch: Any) -> None: ...


def three(model: Any, batch: Any, optimizer: Any) -> None: ...


FUNCTIONS = {
    "one": one,
    "two": two,
    "three": three,
    "criterion": Criterion(),
    "Criterion": Criterion,
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss": "one"}, "loss: the job calls 'one' with (output, target), but it takes (batch)"),
        ({"loss": "lambda output: 0"}, "loss: the job calls this lambda with (output, target)"),
        ({"loss": None, "step": "three"}, "step: the job calls 'three' with (model, batch), but"),
        ({"metrics": {"f1": "one"}}, "metrics.f1: the job calls 'one' with (output, target)"),
        (
            {"weight": "two"},
            "weight: the job calls 'two' with (batch), but it takes (model, batch)",
        ),
        ({"data": {"train": "train_set", "collate": "two"}}, "data.collate: the job calls 'two'"),
        ({"eval": {"predict": "one", "score": "one"}}, "eval.predict: the job calls 'one' with"),
        ({"eval": {"predict": "two", "score": "two"}}, "eval.score: the job calls 'two' with (rec"),
        ({"optimizer": "two"}, "optimizer: the job calls 'two' with (parameters), but it takes"),
        ({"optimizer": "lambda: 0"}, "optimizer: the job calls this lambda with (parameters)"),
        ({"loss": "criterion", "weight": "criterion"}, "weight: the job calls 'criterion' with"),
    ],
)
def test_function_with_the_wrong_parameters_is_refused_before_submit(
    keys: dict[str, Any], message: str
) -> None:
    keys = {"data": {"train": "train_set", "eval": "train_set"}, **keys}
    assert refusal(**{"names": FUNCTIONS, **keys}).startswith(message)


@pytest.mark.parametrize(
    "keys",
    [
        {"loss": "criterion"},
        {"loss": "Criterion"},
        {"loss": "lambda output, target, scale=no_such_name_is_evaluated: 0"},
        {"loss": None, "step": "lambda *args: 0"},
        {"loss": None, "step": "functools.partial(three, optimizer=None)"},
        {"optimizer": "one"},
    ],
)
def test_function_with_fitting_parameters_passes(keys: dict[str, Any]) -> None:
    check(names={**FUNCTIONS, "no_such_name_is_evaluated": 1}, **keys)


def test_error_for_a_hugging_face_metric_suggests_eval_score() -> None:
    with pytest.raises(ConfigError) as caught:
        check(metrics={"f1": "one"}, names=FUNCTIONS)
    assert "eval: {predict: predict, score: score}" in caught.value.hint


def test_error_for_a_data_loader_suggests_its_data_set() -> None:
    class Loader:
        batch_sampler, dataset = 1, (1, 2)

        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ConfigError) as caught:
        check(data={"train": "loader"}, names={"loader": Loader()})
    assert "data.train: loader.dataset" in caught.value.hint


def test_error_for_a_dataset_dict_suggests_a_split() -> None:
    with pytest.raises(ConfigError) as caught:
        check(data={"train": "d"}, names={"d": DatasetDict(train=[1], test=[2])})
    expression = caught.value.hint.partition(": ")[2].strip('"')
    check(data={"train": expression}, names={"d": DatasetDict(train=[1], test=[2])})


def test_error_for_an_optimizer_call_suggests_its_name() -> None:
    class Adam:
        def __init__(self, params: Any = (), lr: float = 1) -> None: ...

    with pytest.raises(ConfigError) as caught:
        check(optimizer="Adam(net, lr=3)", names={"Adam": Adam})
    assert "{name: Adam, lr: 1e-3}" in caught.value.hint


def test_misspelled_optimizer_is_also_searched_for_in_torch() -> None:
    with pytest.raises(ConfigError) as caught:
        check(optimizer="RAdm")
    assert "'RAdam'" in caught.value.hint


def test_error_quotes_the_exception_of_a_package_that_fails_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_pkg_for_test").mkdir()
    (tmp_path / "broken_pkg_for_test" / "__init__.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = refusal(loss="broken_pkg_for_test.mod:f")
    assert text.endswith("'broken_pkg_for_test.mod' was not found (RuntimeError: no)")


def test_a_module_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heavy_for_test.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    check(loss="heavy_for_test:f")
    assert "heavy_for_test" not in sys.modules


def test_check_runs_no_code_of_the_notebook() -> None:
    class Trap(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    def boom() -> Any:
        raise AssertionError("called")

    check(model="boom()", names={"boom": boom})
    check(loss="trap.anything", names={"trap": Trap("trap")})


def test_first_error_in_the_cell_is_reported() -> None:
    body = "loss: losss\nmodel: Nett\ndata: {train: train_set}\n"
    job = parse_cell(body, namespace=NOTEBOOK)
    with pytest.raises(CellError) as caught:
        check_references(job.config, NOTEBOOK, source=job.source)
    assert (caught.value.line, str(caught.value)[:5]) == (2, "loss:")


@pytest.mark.parametrize(
    ("value", "line", "column", "length"),
    [
        ("Nett(1)", 2, 8, 4),
        ("'Nett(1)'", 2, 9, 4),
        ("[Net, Nett][1]()", 2, 8, 11),
        ("'[Net, Nett][1]()'", 2, 15, 4),
        ("'x[\"ä\"] + Nett'", 2, 9, 1),
        ("|\n  Nett(\n    1)", 2, 8, 1),
    ],
)
def test_carets_mark_the_name(value: str, line: int, column: int, length: int) -> None:
    body = f"model: {value}\ndata: {{train: train_set}}\nloss: loss\n"
    try:
        job = parse_cell(body, namespace=NOTEBOOK)
        check_references(job.config, NOTEBOOK, source=job.source)
    except CellError as exc:
        error = exc
    if value.startswith("[Net"):
        # YAML reads a list and then text behind it.
        assert str(error).startswith("this is not valid YAML")
    else:
        assert (error.line, error.column, error.length) == (line, column, length)
