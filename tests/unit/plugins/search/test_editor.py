"""Completion and hints for the group ``search`` of a cell."""

from __future__ import annotations

import pytest

from tests.unit.notebook.editor.test_completion import offered
from tests.unit.notebook.editor.test_hints import HEAD, hint

SEARCH = "%%etrain search -o study\nmodel: Net(width)\nmetrics: {accuracy: accuracy}\n"
SPACE = "search:\n  space:\n    width: {choice: [8, 16]}\n    lr: {low: 1e-4, high: 1.0}\n"


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        (f"{SEARCH}se|", ["seed: ", "search: "]),
        (f"{SEARCH}search:\n  |\n", ["space: ", "metric: ", "mode: ", "trials: "]),
        (f"{SEARCH}search: {{trials: 3, me|", ["metric: ", "method: "]),
        (f"{SEARCH}search: {{metric: loss, space: {{}}, m|", ["mode: ", "method: ", "max: "]),
        (f"{SEARCH}search:\n  method: |", ["asha", "tpe", "random", "grid"]),
        (f"{SEARCH}search:\n  pruner: |", ["asha", "none"]),
        (f"{SEARCH}search:\n  mode: m|", ["min", "max"]),
        (f"{SEARCH}search:\n  metric: |", ["loss", "accuracy"]),
        (f"{SEARCH}search:\n  sharing: p|", ["promising"]),
        (f"{SEARCH}search:\n  max: 20 |", ["steps", "epochs"]),
        (f"{SEARCH}search:\n  budget: {{|", ["{samples: ", "{time: ", "{usd: "]),
        (f"{SEARCH}search:\n  budget: {{time: 2 |", ["s", "min", "h"]),
        (f"{SEARCH}search:\n  space:\n    lr: |", ["{choice: [", "{int: [", "{low: "]),
        (f"{SEARCH}search:\n  space:\n    lr: {{|", ["{choice: ", "{int: ", "{low: ", "{high: "]),
        (f"{SEARCH}search:\n  space:\n    lr: {{low: 1e-4, |", ["high: ", "log: "]),
        (f"{SEARCH}search:\n  space:\n    lr: {{int: [1, 8], |", ["log: "]),
        (f"{SEARCH}search:\n  space:\n    lr: {{choice: [1, 8], |", []),
        (f"{SEARCH}search:\n  space:\n    lr:\n      l|", ["low: ", "log: "]),
        (f"{SEARCH}search:\n  space:\n    lr: {{low: 1e-4, log: t|", ["true"]),
    ],
)
def test_keys_and_values_of_a_search(marked: str, expected: list[str]) -> None:
    found = offered(marked)

    assert found is not None
    assert found[: len(expected)] == expected
    assert expected or not found


def test_group_of_a_search_belongs_to_the_cell_of_a_search() -> None:
    body = "model: Net\nse|"
    assert offered(f"%%etrain distributed\n{body}") == ["seed: "]
    assert offered("%%etrain distributed\nsearch: {me|") == []
    assert offered(f"{SEARCH}{SPACE}se|") == ["seed: "]


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        (f"%%etrain search\nmodel: Wide(w|\n{SPACE}", ["Wide(width"]),
        (f"%%etrain search\noptimizer: {{lr: !py l|}}\n{SPACE}", ["lr"]),
        (f"%%etrain search\noptimizer: {{lr: !py 2 * l|}}\n{SPACE}", ["lr"]),
        (f"%%etrain search\noptimizer: {{lr: !py operator.l|}}\n{SPACE}", ["operator.le"]),
    ],
)
def test_names_of_the_space_are_names_in_expressions(marked: str, expected: list[str]) -> None:
    found = offered(marked)

    assert found is not None
    assert found[:1] == expected


@pytest.mark.parametrize(
    ("marked", "begins"),
    [
        ("sea|rch: {}", "search: group of keys; required\n\nSpace, metric and limits"),
        ("search: {|", "Keys of search: Space, metric and limits"),
        ("search: {divi|sor: 4}", "search.divisor: whole number, 2 or more; default 4"),
        ("search: {max: 20 ep|ochs}", "search.max: steps or epochs"),
        ("search: {n_tr|ials: 20}", "There is no key 'search.n_trials': use 'trials'"),
        ("search: {trails|: 20}", "There is no key 'search.trails': did you mean 'trials'?"),
        ("search: {sp|ace: {}}", "search.space: group of names; required"),
        ("search: {space: {l|r: {}}}", "search.space.lr: choice, range of integers"),
        ("search: {space: {lr: {cho|ice: [1]}}}", "search.space.lr.choice: list"),
        ("search: {budget: {ti|me: 2 h}}", "search.budget.time: "),
    ],
)
def test_keys_of_a_search_have_hints(marked: str, begins: str) -> None:
    found = hint(HEAD + marked)

    assert found is not None
    assert found.plain.startswith(begins)
