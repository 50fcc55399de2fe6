"""The quickstart runs in Notebook 7, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import REPOSITORY, Lab, Notebook
from tests.browser.test_dashboard import shoot
from tests.browser.test_training import cluster
from tests.capabilities import long

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

__all__ = ["cluster"]

QUICKSTART = REPOSITORY / "notebooks" / "01_quickstart.ipynb"


@pytest.fixture
def notebook7(
    ready: None, tmp_path: Path, cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    """Provide a Notebook 7 server whose kernels use the test's cluster."""
    monkeypatch.setenv("ETRAIN_RUNS", cluster["runs"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    server = Lab(tmp_path / "server", app="notebook")
    yield server
    server.close()


@long
def test_quickstart_runs_in_notebook_7(notebook7: Lab, page: Page) -> None:
    quickstart = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    (notebook7.root / "quickstart.ipynb").write_text(json.dumps(quickstart), encoding="utf-8")
    last = sum(cell["cell_type"] == "code" for cell in quickstart["cells"]) - 1
    notebook = Notebook(notebook7, page, "quickstart.ipynb").open()

    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
    dashboard = notebook.job(1)
    expect(dashboard).to_be_visible(timeout=60_000)
    expect(dashboard.locator(".etrain-tiles")).to_contain_text("4 of 4", timeout=120_000)
    # The last cell runs only if no other cell has failed, the audit included.
    expect(notebook.output(last).locator("img")).to_be_visible(timeout=240_000)
    expect(dashboard).to_have_attribute("data-status", "finished")
    dashboard.scroll_into_view_if_needed()
    shoot(page, "notebook7")
