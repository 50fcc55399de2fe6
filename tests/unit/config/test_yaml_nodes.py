from __future__ import annotations

import math
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.config.source_map import Span
from etrain_jupyter.config.yaml_nodes import load_body, visible_names
from etrain_jupyter.errors import CellError


def load(text: str, **namespace: Any) -> Any:
    return load_body(text, namespace=namespace)[0]


def fails(text: str, **namespace: Any) -> CellError:
    with pytest.raises(CellError) as caught:
        load(text, **namespace)
    return caught.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("2.", 2.0),
        ("-0.25", -0.25),
        ("+7", 7),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("12:30:00", "12:30:00"),
        ("2026-01-02", "2026-01-02"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("true", True),
        ("FALSE", False),
        ("tRue", "tRue"),
        ("null", None),
        ("~", None),
        ("", None),
        ("None", "None"),
        ("'3'", "3"),
        ('"no"', "no"),
        ("!!str 3", "3"),
        ("=", "="),
        ("<<", "<<"),
        ("Net(hidden=128)", "Net(hidden=128)"),
        ("pkg.mod:attribute", "pkg.mod:attribute"),
    ],
)
def test_scalars_have_their_yaml_1_2_values(text: str, value: Any) -> None:
    loaded = load(f"key: {text}")["key"]
    assert loaded == value
    assert type(loaded) is type(value)


def test_nan_is_parsed_as_a_float() -> None:
    assert math.isnan(load("key: .nan")["key"])


@settings(deadline=None)
@given(st.integers())
def test_every_integer_round_trips(value: int) -> None:
    assert load(f"key: {value}") == {"key": value}


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_round_trips_as_python_writes_it(value: float) -> None:
    loaded = load(f"key: {value!r}")["key"]
    assert loaded == value
    assert isinstance(loaded, float)


@settings(deadline=None)
@given(st.text(alphabet=string.printable + "äπ", max_size=40))
def test_every_quoted_text_round_trips(value: str) -> None:
    printable = "".join(c for c in value if c.isprintable())
    assert load("key: '" + printable.replace("'", "''") + "'") == {"key": printable}


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused_with_a_position(body: str) -> None:
    error = None
    try:
        load(body)
    except CellError as exc:
        error = exc
    if error is not None:
        assert error.line >= 1
        assert error.column >= 1
        assert error.render()[0].startswith(f"etrain: line {error.line}, column {error.column}: ")


def test_groups_and_lists_nest() -> None:
    assert load("a: {b: [1, x]}\nc:\n  - d: 2\n") == {"a": {"b": [1, "x"]}, "c": [{"d": 2}]}


def test_an_alias_repeats_its_anchor() -> None:
    assert load("a: &x {b: 1}\nc: *x") == {"a": {"b": 1}, "c": {"b": 1}}


def test_positions_count_from_the_magic_line() -> None:
    _, source = load_body("epochs: 3\nbatch: {global: 256}\n", namespace={})
    assert source.keys["epochs",] == Span(line=2, column=1, length=6)
    assert source.values["epochs",] == Span(line=2, column=9, length=1)
    assert source.values["batch", "global"] == Span(line=3, column=17, length=3)


def test_windows_line_endings_keep_the_line_numbers() -> None:
    error = fails("a: 1\r\nb: 2\r\na: 3\r\n")
    assert (error.line, error.column, error.text) == (4, 1, "a: 3")


def test_duplicate_key_in_a_group_is_refused() -> None:
    assert str(fails("batch: {global: 1, global: 2}")) == "duplicate key 'global'"


@pytest.mark.parametrize("key", ["1", "true", "null", "3.5"])
def test_key_that_is_not_a_word_is_refused(key: str) -> None:
    assert str(fails(f"{key}: x")) == f"a key must be a word, not '{key}'"


def test_list_as_a_key_is_refused() -> None:
    assert str(fails("? [a, b]\n: x")) == "a key must be a word, not a group or a list"


@pytest.mark.parametrize(
    ("body", "line", "column", "hint"),
    [
        ("a: 1\nb: [1, 2\n", 3, 4, "close the bracket"),
        ("a: b: c", 2, 5, "put quotes"),
        ("a: 1\n  b: 2", 3, 4, "put quotes around a value that contains ': '"),
        ("a: 1\n\tb: 2", 3, 1, "indent with spaces"),
        ("a: @x", 2, 4, "put quotes"),
        ("a: 'x", 2, 4, "close the quotes"),
        ("a: *x", 2, 4, "starts with *"),
        ("a: 1\n---\nb: 2", 3, 1, "remove the line '---'"),
        ("lr 3\nseed: 1", 2, 1, "write 'key: value'"),
    ],
)
def test_error_points_at_the_invalid_syntax(body: str, line: int, column: int, hint: str) -> None:
    error = fails(body)
    assert str(error).startswith("this is not valid YAML: ")
    assert hint in error.hint
    assert (error.line, error.column) == (line, column)


def test_error_names_an_invisible_character() -> None:
    error = fails("a: 1\nb: x\x01y")
    assert (error.line, error.column) == (3, 5)
    assert str(error) == "the character U+0001 is not allowed in a cell"


def test_deep_nesting_is_refused_without_a_crash() -> None:
    assert "nested too deeply" in str(fails("a: " + "[" * 20000))


def test_an_alias_inside_its_own_value_is_refused() -> None:
    assert "alias" in str(fails("a: &x [*x]"))


@pytest.mark.parametrize("tag", ["!!python/object:os.system", "!!set", "!foo", "!!binary"])
def test_unknown_tags_are_refused(tag: str) -> None:
    error = fails(f"a: {tag} x")
    assert str(error) == f"unknown tag '{tag}'"
    assert "!py" in error.hint


def test_core_tag_that_does_not_match_its_value_is_refused() -> None:
    assert str(fails("a: !!int x")) == "'x' cannot be read as !!int"


def test_py_reads_names_of_the_notebook() -> None:
    assert load("seed: !py base + 1", base=41) == {"seed": 42}


def test_quoted_py_expression_may_contain_yaml_syntax() -> None:
    assert load('a: !py "{1: [2, 3]}[1]"') == {"a": [2, 3]}


def test_py_sees_names_inside_comprehensions() -> None:
    assert load("a: !py sum(x * k for x in xs)", xs=[1, 2], k=10) == {"a": 30}


def test_py_does_not_change_the_notebook() -> None:
    namespace: dict[str, Any] = {"x": 1}
    assert load_body("a: !py (y := x + 1)", namespace=namespace)[0] == {"a": 2}
    assert namespace == {"x": 1}


def test_keys_computed_by_py_are_recorded() -> None:
    _, source = load_body("a: !py 1\nb: {c: !py 2, d: 3}", namespace={})
    assert source.computed == {("a",), ("b", "c")}


def test_py_with_an_unknown_name_suggests_the_nearest() -> None:
    error = fails("seed: !py base_sed + 1", base_seed=1)
    assert str(error) == "!py base_sed + 1: 'base_sed' is not defined in this notebook"
    assert error.hint == "did you mean 'base_seed'?"
    assert (error.line, error.column, error.length) == (2, 7, 16)


def test_error_of_a_py_expression_keeps_its_cause() -> None:
    error = fails("seed: !py 1 / 0")
    assert str(error) == "!py 1 / 0 raised ZeroDivisionError: division by zero"
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_py_with_a_syntax_error_points_into_the_expression() -> None:
    error = fails("seed: !py base + * 2")
    assert (error.line, error.column) == (2, 18)


@pytest.mark.parametrize("body", ["a: !py", "a: !py ''"])
def test_py_without_an_expression_is_refused(body: str) -> None:
    assert str(fails(body)) == "!py without an expression"


def test_error_for_py_before_a_group_suggests_quotes() -> None:
    assert "quotes" in fails("a: !py {b: 1}").hint


def test_history_and_private_names_are_never_suggested() -> None:
    assert visible_names({"net": 1, "_i3": 1, "In": 1, "Out": 1, "quit": 1}) == ["net"]
