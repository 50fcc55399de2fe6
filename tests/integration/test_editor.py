"""Completion and inspection requests of a front end (Tab, Shift-Tab) to a real kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from etrain_jupyter.notebook.job.run_store import RunStore
from tests.integration.notebook import Notebook

HEAD = "%%etrain distributed\n"
SETUP = """\
%load_ext etrain_jupyter
class Net:
    "A small net."
    def __init__(self, hidden=8): ...
def accuracy(output, target):
    "Tell how many are right."
samples = [1, 2]
"""
TYPES = "_jupyter_types_experimental"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Provide a kernel with some names and one job in its run store, without a cluster."""
    folder = tmp_path_factory.mktemp("editor")
    runs = folder / "runs"
    RunStore(runs).create({"name": "digits", "created": 1.0}, job_id="digits-0a1b2c3d")
    notebook = Notebook(folder, {"ETRAIN_RUNS": str(runs), "ETRAIN_STATE": str(folder)})
    assert notebook.run(SETUP).status == "ok"
    yield notebook
    notebook.close()


def cut(marked: str) -> tuple[str, int]:
    """Return a text without its ``|``, and the position of the ``|``."""
    cursor = marked.index("|")
    return marked[:cursor] + marked[cursor + 1 :], cursor


def completed(kernel: Notebook, marked: str) -> list[tuple[str, str]]:
    """Return the line up to the cursor with each completion applied, and its type."""
    text, cursor = cut(marked)
    reply = kernel.complete(text, cursor)
    assert reply["status"] == "ok"
    assert reply["cursor_end"] == cursor
    begun = text[text.rfind("\n", 0, cursor) + 1 : reply["cursor_start"]]
    return [(begun + entry["text"], entry["type"]) for entry in reply["metadata"][TYPES]]


def explained(kernel: Notebook, marked: str) -> dict[str, Any]:
    reply = kernel.inspect(*cut(marked))
    assert reply["status"] == "ok"
    data: dict[str, Any] = reply["data"]
    return data if reply["found"] else {}


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("%etrain sc|", [("%etrain scale", "command")]),
        ("%etrain show d|", [
            ("%etrain show digits", "job"), ("%etrain show digits-0a1b2c3d", "job"),
        ]),
        ("x = 1\n%etrain stop --n|", [("%etrain stop --now", "flag")]),
        ("%%etrain distributed --pool |\nmodel: x", [
            ("%%etrain distributed --pool local", "pool"),
        ]),
        (HEAD + "model: Net\nprec|\nepochs: 3", [("precision: ", "key")]),
        (HEAD + "precision: b|", [("precision: bf16", "value")]),
        (HEAD + "batch: {glo|", [("batch: {global: ", "key")]),
        (HEAD + "schedule: {warmup: 5 |}", [
            ("schedule: {warmup: 5 steps", "unit"), ("schedule: {warmup: 5 epochs", "unit"),
        ]),
        (HEAD + "model: N|", [("model: Net", "class")]),
        (HEAD + "model: Net(hi|", [("model: Net(hidden=", "param")]),
        (HEAD + "metrics: {é: acc|}", [("metrics: {é: accuracy", "function")]),
        (HEAD + "name: im|", []),
        (HEAD + "# im|", []),
    ],
)  # fmt: skip
def test_tab_offers_exactly_the_valid_completions(
    kernel: Notebook, marked: str, expected: list[tuple[str, str]]
) -> None:
    assert completed(kernel, marked) == expected


def test_tab_in_other_cells_uses_ipython(kernel: Notebook) -> None:
    assert ("samples", "instance") in completed(kernel, "sampl|")


@pytest.mark.parametrize(
    ("marked", "begins"),
    [
        (HEAD + "prec|ision: bf16", "**precision** — fp32, bf16 or fp16; default fp32"),
        (HEAD + "optimizer: {name: SG|D}", "**optimizer.name** — torch.optim.SGD"),
        ("%%etrain distributed --na|me x", "`%%etrain distributed --name NAME`"),
        ("%etrain sho|w", "```text\nusage: %etrain show"),
        (HEAD + "model: unknown|", "**model** — Python expression"),
    ],
)
def test_shift_tab_explains_etrain_keys_and_commands(
    kernel: Notebook, marked: str, begins: str
) -> None:
    assert explained(kernel, marked)["text/markdown"].startswith(begins)


def test_shift_tab_on_a_name_shows_its_python_help(kernel: Notebook) -> None:
    assert "A small net." in explained(kernel, HEAD + "model: N|et(hidden=3)")["text/plain"]
    assert "how many" in explained(kernel, HEAD + "metrics: {a: accu|racy}")["text/plain"]


def test_shift_tab_in_other_cells_uses_ipython(kernel: Notebook) -> None:
    assert "A small net." in explained(kernel, "Ne|t()")["text/plain"]
    assert explained(kernel, "compres|sion: bf16") == {}


def test_help_starts_nothing(kernel: Notebook) -> None:
    shown = kernel.run("%%etrain distributed --help\nmodel: Net\ndata: {train: samples}")

    assert (shown.status, shown.text.split("\n")[0][:28]) == ("ok", "usage: %%etrain distributed ")
    assert kernel.run("%etrain ls").text.count("digits") == 1


def test_unloading_the_extension_restores_ipythons_completion(kernel: Notebook) -> None:
    assert kernel.run("%unload_ext etrain_jupyter").status == "ok"
    try:
        assert explained(kernel, HEAD + "compres|sion: bf16") == {}
        assert ("precision: bf16", "value") not in completed(kernel, HEAD + "precision: b|")
    finally:
        kernel.run("%load_ext etrain_jupyter")
    assert ("precision: bf16", "value") in completed(kernel, HEAD + "precision: b|")
