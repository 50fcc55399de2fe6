"""Several live jobs on one page with a job of 200,000 steps, whose log is synthetic."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from benchmarks.storage import log
from etrain_jupyter.notebook.job.run_store import RunStore
from tests.browser.lab import Lab, Notebook
from tests.browser.test_dashboard import SET_UP, shoot, step_of, wait_for_step
from tests.capabilities import long

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

STEPS = 200_000
NAMED = "board = start(4000, 100, job_id='{}-1234')"


@long
def test_three_live_jobs_update_next_to_one_of_200000_steps(
    lab: Lab, open_notebook: Callable[..., Notebook], page: Page
) -> None:
    runs = RunStore(lab.root / "etrain-runs")  # where `%etrain show` finds it: next to the notebook
    record = runs.create({"name": "long", "created": 1.7e9, "config": {}})
    log.write(record.log_path, STEPS, job_id=record.job_id)
    jobs = [NAMED.format(name) for name in ("one", "two", "three")]
    cells = [SET_UP, "%load_ext etrain_jupyter\n%etrain show long", *jobs]
    notebook = open_notebook("many.ipynb", *cells)
    for cell in range(5):
        notebook.run(cell)

    expect(notebook.job(1)).to_have_attribute("data-step", str(STEPS), timeout=90_000)
    expect(notebook.job(1)).to_have_attribute("data-status", "finished")
    expect(notebook.job(1)).to_have_attribute("data-phase", "live")
    expect(notebook.job(1).locator("canvas")).to_have_count(4)
    for cell in (2, 3, 4):
        expect(notebook.job(cell)).to_have_attribute("data-phase", "live")
        wait_for_step(notebook, cell, step_of(notebook, cell) + 100)
    shoot(page, "three-jobs")

    # A zoom into the long job loads its points from the kernel while the others update.
    plot = notebook.job(1).locator(".u-over").first
    width = plot.evaluate("element => element.clientWidth")
    # `hover` waits until the element is stable: JupyterLab may still scroll.
    plot.hover(position={"x": width * 0.5, "y": 40})
    page.mouse.down()
    plot.hover(position={"x": width * 0.55, "y": 50})
    page.mouse.up()
    expect(notebook.job(1).locator(".etrain-reset")).to_be_enabled()
    plot.hover(position={"x": width * 0.4, "y": 50})
    place = notebook.job(1).locator(".etrain-place")
    expect(place).to_contain_text(re.compile(r"^step 10\d,\d{3}"))
    before = [step_of(notebook, cell) for cell in (2, 3, 4)]
    for cell, step in zip((2, 3, 4), before, strict=True):
        wait_for_step(notebook, cell, step + 50)
    shoot(page, "long-zoomed")
