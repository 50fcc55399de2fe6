"""Job outputs of a notebook after a reload, in an untrusted notebook, and in exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter, MarkdownExporter
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.browser.lab import Lab, Notebook
from tests.browser.test_dashboard import (
    SET_UP,
    START,
    shoot,
    step_of,
    wait_for_step,
)
from tests.capabilities import long

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

START_SHORT = "short = start(300, 600, job_id='short-7f3a')"
RUNNING, FINISHED = 1, 2
DARK, LIGHT = "JupyterLab Dark", "JupyterLab Light"


@pytest.fixture(scope="module")
def notebook(lab: Lab, browser: BrowserContext) -> Iterator[Notebook]:
    """Provide a notebook with a running and a finished job, saved while both are live."""
    page = browser.new_page()
    lab.write_notebook("jobs.ipynb", SET_UP, START, START_SHORT)
    notebook = Notebook(lab, page, "jobs.ipynb").open()
    for cell in (0, RUNNING, FINISHED):
        notebook.run(cell)
    expect(notebook.job(FINISHED)).to_have_attribute("data-status", "finished", timeout=60_000)
    wait_for_step(notebook, RUNNING, 560)  # after the first refresh of the saved output
    notebook.save()
    yield notebook
    page.close()


@pytest.fixture
def saved(notebook: Notebook) -> dict[str, Any]:
    """Provide the contents of the notebook's file."""
    kept: dict[str, Any] = json.loads((notebook.lab.root / notebook.name).read_text())
    return kept


def assert_drawn(notebook: Notebook, cell: int) -> None:
    expect(notebook.job(cell).locator("canvas")).to_have_count(4)
    expect(notebook.job(cell).locator(".etrain-workers tbody tr").first).to_be_visible()


def shoot_both_themes(notebook: Notebook, cell: int, name: str) -> None:
    notebook.job(cell).scroll_into_view_if_needed()
    for theme in (DARK, LIGHT):
        notebook.set_theme(theme)
        notebook.page.wait_for_timeout(300)
        shoot(notebook.page, f"{name}-{theme.split()[1].lower()}")


def log_button(job: Locator) -> Locator:
    return job.get_by_role("button", name="logarithmic scale of loss")


@long
def test_reload_keeps_jobs_live_and_chart_settings(
    notebook: Notebook,
) -> None:
    job = notebook.job(RUNNING)
    job.get_by_label("samples", exact=True).check(force=True)
    job.get_by_label("smoothing").fill("0")
    log_button(job).click()

    notebook.open(new_kernel=False)

    for cell in (RUNNING, FINISHED):
        job = notebook.job(cell)
        expect(job).to_have_attribute("data-phase", "live")
        assert_drawn(notebook, cell)
        expect(log_button(job)).to_have_attribute("aria-pressed", "true")
        expect(job.get_by_label("samples", exact=True)).to_be_checked()
        expect(job.get_by_label("smoothing")).to_have_value("0")
    wait_for_step(notebook, RUNNING, step_of(notebook, RUNNING) + 20)
    shoot_both_themes(notebook, RUNNING, "representation-reloaded-log-samples")
    shoot_both_themes(notebook, FINISHED, "representation-finished")
    log_button(notebook.job(RUNNING)).click()


def test_untrusted_notebook_draws_jobs_from_the_saved_output(
    notebook: Notebook, saved: dict[str, Any], browser: BrowserContext
) -> None:
    for cell in saved["cells"]:
        cell["source"] = [
            "# changed by another user\n",
            *cell["source"],
        ]  # invalidates the signature
    (notebook.lab.root / "strange.ipynb").write_text(json.dumps(saved))
    page = browser.new_page()
    strange = Notebook(notebook.lab, page, "strange.ipynb").open(new_kernel=False)

    trusted = page.evaluate(
        "() => [...window.jupyterapp.shell.currentWidget.content.model.cells].map(c => c.trusted)"
    )
    assert trusted == [False, False, False]
    for cell, status in ((RUNNING, "last seen running"), (FINISHED, "finished")):
        expect(strange.job(cell)).to_have_attribute("data-phase", "gone", timeout=20_000)
        expect(strange.job(cell).locator(".etrain-status")).to_have_text(status)
        assert_drawn(strange, cell)
    shoot_both_themes(strange, RUNNING, "representation-untrusted")
    page.close()


def test_exports_show_jobs_as_pictures_and_tables(
    saved: dict[str, Any], browser: BrowserContext, tmp_path: Path
) -> None:
    kept = nbformat.reads(json.dumps(saved), as_version=4)
    html, _ = HTMLExporter(embed_images=False).from_notebook_node(kept)
    markdown, _ = MarkdownExporter().from_notebook_node(kept)
    exported = tmp_path / "jobs.html"
    exported.write_text(html)
    page: Page = browser.new_page()
    page.goto(exported.as_uri(), wait_until="domcontentloaded")

    pictures = page.locator("img[alt^='loss over']")
    expect(pictures).to_have_count(2)
    for picture in pictures.all():
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 720
    expect(page.locator("table")).to_have_count(2)
    expect(page.get_by_text("finished · step 300 of 300")).to_be_visible()
    shoot(page, "representation-nbconvert")
    page.close()
    assert markdown.count('<img alt="loss over') == 2
    assert "model_id" not in markdown
