from __future__ import annotations

import pytest
from hypothesis import given, settings

from etrain_jupyter.notebook.editor.hints import Expression, Hint, inspect
from tests.unit.notebook.editor.notebook_facts import NAMES
from tests.unit.notebook.editor.test_completion import torn_cells

HEAD = "%%etrain distributed\n"


def hint(marked: str) -> Hint | None:
    """Return the hint at the ``|`` of a text."""
    cursor = marked.index("|")
    return inspect(marked[:cursor] + marked[cursor + 1 :], cursor, NAMES)


@pytest.mark.parametrize("marked", ["|", "prin|t(x)", "x = 1\ny|", "%%time\nx|", "%etrainer|"])
def test_other_text_has_no_hint(marked: str) -> None:
    assert hint(marked) is None


@pytest.mark.parametrize(
    ("marked", "begins"),
    [
        ("%%etr|ain", "%etrain SUB-COMMAND"),
        ("%%etrain| distributed", "%etrain SUB-COMMAND"),
        ("%etrain |", "%etrain SUB-COMMAND"),
        ("%etrain sho|w digits", "usage: %etrain show"),
        ("%etrain show dig|its", "usage: %etrain show"),
        ("%etrain show |", "usage: %etrain show"),
        ("x = 1\n%etrain lo|gs", "usage: %etrain logs"),
        ("%etrain logs -n| 5", "%etrain logs -n N, --number N\n\nat most N"),
        ("%etrain logs --number |", "%etrain logs -n N, --number N\n\nat most N"),
        ("%etrain logs -n 5|", "%etrain logs -n N, --number N\n\nat most N"),
        ("%etrain logs --follow di|gits", "usage: %etrain logs"),
        ("%etrain logs --fol|low digits", "%etrain logs -f, --follow\n\nprint new lines"),
        ("%%etrain distr|ibuted", "usage: %%etrain distributed"),
        (
            "%%etrain distributed --out=j|",
            "%%etrain distributed -o VAR, --out VAR\n\nassign the job",
        ),
        ("%%etrain distributed --dry-r|un\nmodel: x", "%%etrain distributed --dry-run\n\ncheck"),
    ],
)
def test_words_of_a_line_have_hints(marked: str, begins: str) -> None:
    found = hint(marked)

    assert found is not None
    assert found.plain.startswith(begins)
    assert found.plain.strip().splitlines()[-1].strip() in found.markdown


@pytest.mark.parametrize("marked", ["%etrain nonsense|", "%%etrain show|", "%etrain ls # sh|ow"])
def test_unknown_word_of_a_line_has_no_hint(marked: str) -> None:
    assert hint(marked) is None


@pytest.mark.parametrize(
    ("marked", "begins"),
    [
        ("mod|el: Net", "model: Python expression; required"),
        ("|model: Net", "model: Python expression; required"),
        ("prec|ision: bf16", "precision: fp32, bf16 or fp16; default fp32"),
        ("precision: b|f16", "precision: fp32, bf16 or fp16; default fp32"),
        ("precision: |", "precision: fp32, bf16 or fp16; default fp32"),
        ("precision:|", "precision: fp32, bf16 or fp16; default fp32"),
        ("batch: {glo|bal: 8}", "batch.global: whole number, 1 or more"),
        ("batch: {global|", "batch.global: whole number, 1 or more"),
        ("batch:\n  global: 8|", "batch.global: whole number, 1 or more"),
        ("eval: {every: 5 m|in}", "eval.every: steps, epochs or time"),
        ("checkpoint: {best: {mo|de: max}}", "checkpoint.best.mode: min or max; required"),
        ("optimizer: {na|me: SGD}", "optimizer.name: text; default AdamW"),
        ("optimizer: {name: SG|D}", "optimizer.name: torch.optim.SGD"),
        ("optimizer: ada|mw", "optimizer.name: torch.optim.AdamW"),
        ("optimizer: {name: SGD, moment|um: 0.9}", "optimizer.momentum: number"),
        ("lr|: 3e-4", "There is no key 'lr': use 'optimizer:"),
        ("batch: {batch-|size: 8}", "There is no key 'batch.batch-size': use 'global'"),
        ("optimiser|: x", "There is no key 'optimiser': did you mean 'optimizer'?"),
        ("data:\n  |", "Keys of data: Training and evaluation data.\n\ntrain: Python expression"),
        ("|", "Keys of the body\n\nmodel: Python expression; required"),
        ("optimizer: {|", "Keys of optimizer: "),
        ("metrics: {|", "metrics: group of names"),
    ],
)
def test_words_of_the_body_have_hints(marked: str, begins: str) -> None:
    found = hint(HEAD + marked)

    assert found is not None
    assert found.plain.startswith(begins)


@pytest.mark.parametrize(
    "marked", ["nonsense|: 3", "# mod|el", "epochs: 3 # mod|el", "nonsense:\n  |", "[a|"]
)
def test_unknown_text_has_no_hint(marked: str) -> None:
    assert hint(HEAD + marked) is None


def test_markdown_has_the_same_content_and_an_example() -> None:
    found = hint(HEAD + "precis|ion: bf16")

    assert found is not None
    assert found.markdown == (
        "**precision** — fp32, bf16 or fp16; default fp32\n\n"
        "Precision of the forward pass: fp32, bf16 or fp16; the weights keep their own type.\n\n"
        "Values: `fp32`, `bf16`, `fp16`\n\n"
        "```yaml\nprecision: fp32\n```"
    )


@pytest.mark.parametrize(
    ("marked", "code", "cursor"),
    [
        ("model: N|et(hidden=8)  # small", "Net(hidden=8)", 1),
        ("model: Net|", "Net", 3),
        ("data: {train: train_|set, eval: x}", "train_set", 6),
        ('data: {train: "make_data(8|)"}', "make_data(8)", 11),
        ("loss: operator.a|dd", "operator.add", 10),
        ("metrics: {a: accu|racy}", "accuracy", 4),
        ("seed: !py base_s|eed + 1", "base_seed + 1", 6),
        ("optimizer: make_o|ptimizer", "make_optimizer", 6),
    ],
)
def test_names_of_the_notebook_are_explained_by_ipython(
    marked: str, code: str, cursor: int
) -> None:
    found = hint(HEAD + marked)

    assert found is not None
    assert found.expression == Expression(code=code, cursor=cursor)


def test_unknown_name_gets_the_hint_of_its_key() -> None:
    found = hint(HEAD + "model: Unkn|own")

    assert found is not None
    assert found.plain.startswith("model: Python expression")


def test_cursor_after_the_end_of_the_text_counts_as_the_end() -> None:
    text = HEAD + "precision: "

    found = inspect(text, len(text) + 20, NAMES)

    assert found is not None
    assert found.plain.startswith("precision: ")


@settings(max_examples=300)
@given(torn_cells())
def test_no_text_raises(cell: tuple[str, int]) -> None:
    text, cursor = cell

    found = inspect(text, cursor, NAMES)

    assert found is None or found.plain or found.expression is not None
