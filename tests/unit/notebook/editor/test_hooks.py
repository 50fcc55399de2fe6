from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import etrain_jupyter

HEAD = "%%etrain distributed\n"


class Kernel:
    """A kernel that records its inspect requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> dict[str, Any]:
        self.asked.append((code, cursor_pos, detail_level))
        found = "train_set" in code
        return {"status": "ok", "found": found, "data": {"text/plain": "its own"}, "metadata": {}}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("ETRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    shell.kernel = Kernel()
    etrain_jupyter.load_ipython_extension(shell)
    yield shell
    etrain_jupyter.unload_ipython_extension(shell)
    shell.restore_sys_module_state()


def completions(shell: InteractiveShell, marked: str) -> list[tuple[str, str]]:
    """Return IPython's completions at the ``|``, each with its type."""
    cursor = marked.index("|")
    text = marked[:cursor] + marked[cursor + 1 :]
    with provisionalcompleter():
        found = list(shell.Completer.completions(text, cursor))
    return [(c.text, c.type) for c in found]


def test_ipython_shows_our_completions_in_order_with_their_kind(shell: InteractiveShell) -> None:
    assert completions(shell, "%etrain sto|") == [("stop", "command")]
    assert completions(shell, HEAD + "precision: |") == [
        ("fp32", "value"),
        ("bf16", "value"),
        ("fp16", "value"),
    ]


def test_other_matchers_are_suppressed_even_without_completions(shell: InteractiveShell) -> None:
    assert completions(shell, HEAD + "name: im|") == []
    assert completions(shell, HEAD + "# im|") == []


def test_other_cells_are_completed_by_ipython(shell: InteractiveShell) -> None:
    assert "import" in [text for text, _ in completions(shell, "impor|")]
    assert "%%etrain" in [text for text, _ in completions(shell, "%%etr|")]


def test_error_in_completion_offers_nothing_and_does_not_raise(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("etrain_jupyter.notebook.editor.completion.complete", fail)
    monkeypatch.setattr("etrain_jupyter.notebook.editor.hints.inspect", fail)

    assert completions(shell, HEAD + "precision: |") == []
    reply = shell.kernel.do_inspect(HEAD + "precision: bf16", len(HEAD) + 3)
    assert reply["data"]["text/plain"] == "its own"
    assert "a bug" not in "".join(capsys.readouterr())


def test_hint_is_plain_text_and_markdown(shell: InteractiveShell) -> None:
    reply = shell.kernel.do_inspect(HEAD + "precision: bf16", len(HEAD) + 3, 0, set())

    assert (reply["status"], reply["found"], reply["metadata"]) == ("ok", True, {})
    assert reply["data"]["text/plain"].startswith("precision: fp32, bf16 or fp16")
    assert reply["data"]["text/markdown"].startswith("**precision**")
    assert shell.kernel.asked == []


def test_names_of_the_notebook_are_forwarded_to_the_kernel(
    shell: InteractiveShell,
) -> None:
    reply = shell.kernel.do_inspect(HEAD + "data: {train: train_set}", len(HEAD) + 17, 1)

    assert reply["data"]["text/plain"] == "its own"
    assert shell.kernel.asked == [("train_set", 3, 1)]


def test_name_unknown_to_the_kernel_gets_the_hint_of_its_key(shell: InteractiveShell) -> None:
    reply = shell.kernel.do_inspect(HEAD + "model: unknown", len(HEAD) + 9)

    assert reply["data"]["text/plain"].startswith("model: Python expression")


def test_other_cells_are_inspected_by_the_kernel(shell: InteractiveShell) -> None:
    reply = shell.kernel.do_inspect("precision: bf16", 3, detail_level=1)

    assert reply["found"] is False
    assert shell.kernel.asked == [("precision: bf16", 3, 1)]


def test_unload_restores_shell_and_kernel(shell: InteractiveShell) -> None:
    etrain_jupyter.unload_ipython_extension(shell)

    assert shell.Completer.custom_matchers == []
    assert "do_inspect" not in vars(shell.kernel)
    etrain_jupyter.unload_ipython_extension(shell)


def test_loading_is_idempotent(shell: InteractiveShell) -> None:
    etrain_jupyter.load_ipython_extension(shell)

    assert len(shell.Completer.custom_matchers) == 1
    etrain_jupyter.unload_ipython_extension(shell)
    assert "do_inspect" not in vars(shell.kernel)


def test_later_wrapper_stays_and_ours_forwards(
    shell: InteractiveShell,
) -> None:
    ours = shell.kernel.do_inspect
    shell.kernel.do_inspect = theirs = lambda *args: ours(*args)

    etrain_jupyter.unload_ipython_extension(shell)

    assert shell.kernel.do_inspect is theirs
    assert theirs(HEAD + "precision: x", len(HEAD) + 3)["data"]["text/plain"] == "its own"


@pytest.mark.parametrize("kernel", [None, SimpleNamespace()])
def test_shell_without_kernel_has_completion(shell: InteractiveShell, kernel: Any) -> None:
    etrain_jupyter.unload_ipython_extension(shell)
    shell.kernel = kernel

    etrain_jupyter.load_ipython_extension(shell)

    assert completions(shell, "%etrain sto|") == [("stop", "command")]
