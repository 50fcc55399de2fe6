"""Tab, Shift-Tab and contextual help in JupyterLab; other tests check the completions in full."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import Notebook
from tests.browser.test_dashboard import shoot

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

SET_UP = """\
%load_ext etrain_jupyter
class Net:
    "A small net."
    def __init__(self, hidden=8): ...
"""
PATIENCE_MS = 60_000  # a kernel on a busy machine
CELL = "%%etrain distributed --name digits -o job\nmodel: N"


def press_tab(page: Page) -> None:
    """Press Tab after the completer is enabled; before that, Tab indents."""
    page.wait_for_selector(".jp-mod-completer-enabled", state="attached")
    page.keyboard.press("Tab")


def test_tab_lists_completions_and_shift_tab_explains_a_key(
    open_notebook: Callable[..., Notebook], page: Page
) -> None:
    notebook = open_notebook("editor.ipynb", SET_UP, "")
    notebook.run(0)
    notebook.hide_side_bars()
    editor = page.locator(".jp-Notebook .jp-CodeCell .cm-content").nth(1)
    entries = page.locator(".jp-Completer .jp-Completer-item .jp-Completer-match")
    hint = page.locator(".jp-Tooltip")
    editor.click()

    page.keyboard.type(CELL)
    press_tab(page)
    # The only entry: no completions from Jedi, and no other words of the cell.
    expect(entries).to_have_text(["Net"], timeout=PATIENCE_MS)
    page.keyboard.press("Enter")
    page.keyboard.type("(hidden=8)\noptimizer: {name: SGD, m")
    press_tab(page)
    expect(entries).to_have_text(["maximize: ", "momentum: "], timeout=PATIENCE_MS)
    if folder := os.environ.get("ETRAIN_SHOTS"):
        # The picture of the README: the cells and the list, without the empty page below.
        clip = {"x": 60, "y": 96, "width": 760, "height": 244}
        page.screenshot(path=Path(folder) / "completion.png", clip=clip)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(editor.locator(".cm-line").last).to_have_text(
        "optimizer: {name: SGD, momentum: ", timeout=PATIENCE_MS
    )

    page.keyboard.type("0.9}\ndata: {train: x, ")
    press_tab(page)
    expect(entries).to_have_text(["eval: ", "collate: ", "num_workers: "], timeout=PATIENCE_MS)
    page.keyboard.press("Escape")
    page.keyboard.type("eval: x}\nprecision: ")
    press_tab(page)
    expect(entries).to_have_text(["fp32", "bf16", "fp16"], timeout=PATIENCE_MS)
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+Tab")
    expect(hint).to_contain_text(
        "precision — fp32, bf16 or fp16; default fp32", timeout=PATIENCE_MS
    )
    expect(hint.locator("strong")).to_have_text("precision", timeout=PATIENCE_MS)
    shoot(page, "hint")

    # Only highlighted text has its own element: all keys are highlighted, including nested ones.
    coloured = editor.locator(".cm-line").nth(2).locator("span").all_inner_texts()
    assert {"optimizer", "name", "momentum"} <= set(coloured)

    # The contextual help sends the same request when the cursor moves.
    page.evaluate("() => window.jupyterapp.commands.execute('inspector:open')")
    editor.locator(".cm-line").nth(1).click()
    page.keyboard.press("Home")
    help_panel = page.locator(".jp-Inspector")
    expect(help_panel).to_contain_text("model — Python expression; required", timeout=PATIENCE_MS)
    shoot(page, "contextual_help")
