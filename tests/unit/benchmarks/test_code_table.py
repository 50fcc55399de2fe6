"""Test the table of a package's code and the samples of its sentences and error texts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import code_samples, code_table

FILES = {
    "shop/__init__.py": "from shop.front.till import pay\n",
    "shop/front/__init__.py": "",
    "shop/front/till.py": '''\
"""Take payments at the till.

It prints a receipt like this one::

    no sentence, but an example of one
"""
from shop.stock import shelves

# Rounding comes last, because taxes apply
# to the sum.
def pay(amount):
    """Charge a customer for the goods.

    Args:
        amount: The price in cents. It must be positive.
    """
    if amount < 0:
        raise ValueError(f"amount={amount} is below zero. Pass a positive amount.")
    raise NotImplementedError
''',
    "shop/stock/__init__.py": "",
    "shop/stock/shelves.py": "def refill():\n    from shop.front import till\n",
    "shop/stock/plan.py": "import shop.stock.shelves\n",
}
README = """\
# A heading that has five words

The shop opens at nine o'clock. It closes
at five in the evening.

```
a block of code has no sentences
```

| key | a cell of a table counts |
|---|---|
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "README.md").write_text(README)
    return tmp_path / "shop"


def test_sentences_come_from_docstrings_comments_errors_and_docs(shop: Path) -> None:
    found = [(one["kind"], one["where"], one["text"]) for one in code_samples.sentences(shop)]

    assert found == [
        ("docstring", "shop/front/till.py:1", "Take payments at the till."),
        ("docstring", "shop/front/till.py:3", "It prints a receipt like this one::"),
        ("docstring", "shop/front/till.py:12", "Charge a customer for the goods."),
        ("docstring", "shop/front/till.py:15", "The price in cents."),
        ("docstring", "shop/front/till.py:15", "It must be positive."),
        ("comment", "shop/front/till.py:9", "Rounding comes last, because taxes apply to the sum."),
        ("error", "shop/front/till.py:18", "amount={amount} is below zero."),
        ("docs", "README.md:3", "The shop opens at nine o'clock."),
        ("docs", "README.md:3", "It closes at five in the evening."),
        ("docs", "README.md:10", "a cell of a table counts"),
    ]


def test_error_text_includes_its_values_and_a_remedy(shop: Path) -> None:
    [error] = code_samples.error_texts(shop / "front" / "till.py", shop.parent)

    assert error["text"] == "amount={amount} is below zero. Pass a positive amount."
    assert error["kind"] == "ValueError"
    assert code_samples.has_value(error)
    assert code_samples.has_remedy(error)


def test_circle_through_an_import_inside_a_function_is_found(shop: Path) -> None:
    graph = code_table.imports_of(code_table.read_package(shop))

    assert code_table.circles(graph) == [["shop.front.till", "shop.stock.shelves"]]
    assert code_table.two_way(graph) == [("front", "stock")]


def test_table_counts_lines_comments_and_docstrings(shop: Path) -> None:
    figures = code_table.figures(code_table.read_package(shop))

    assert figures["packages"] == "3"
    assert figures["modules"] == "6"
    assert figures["functions"] == "2"
    assert figures["module lines: median/p90/max"] == "1/19/19"
    assert figures["function lines: median/p95/max"] == "6/9/9"
    assert figures["comment %"] == f"{2 / 19:.1%}"
    assert figures["docstring %"] == f"{8 / 19:.1%}"
    assert figures["errors: value/remedy %"] == "100/100"


def test_same_seed_draws_the_same_sample(shop: Path) -> None:
    options = argparse.Namespace(package=shop, sentences=3, errors=1, seed=15)

    first, second = code_table.measure(options), code_table.measure(options)

    assert first == second
    assert len(first["sentences"]) == 3
    assert "3 sentences drawn at random:" in code_table.table_of(first)
