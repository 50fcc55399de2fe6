"""The dashboard in a real JupyterLab, driven by a scripted job without a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import Lab, Notebook
from tests.capabilities import long

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

SET_UP = """
import threading, time
from etrain_jupyter.notebook.dashboard.widget import Dashboard
from tests.unit.notebook.dashboard.scripted_job import Script, play

asked, is_refusing = [], False
def on_request(request, args):
    if is_refusing:
        raise RuntimeError("the cluster does not answer")
    asked.append(request)

def start(num_steps, steps_per_s, **names):
    script = Script(num_steps, time.time(), **names)
    board = Dashboard(job_id=script.job_id, on_request=on_request)
    board.show()
    threading.Thread(
        target=play, args=(script, board.add_events),
        kwargs={"steps_per_s": steps_per_s}, daemon=True,
    ).start()
    return board
"""
START = "board = start(4000, 100)"
START_SHORT = "board = start(300, 600)"
BUSY = """
end = time.time() + 60
while not asked and time.time() < end: sum(range(1000))
asked.append("the end of the busy cell")
"""

OpenNotebook = Callable[..., Notebook]


def shoot(page: Page, name: str) -> None:
    """Save a screenshot for review if the variable ETRAIN_SHOTS names a folder."""
    folder = os.environ.get("ETRAIN_SHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def step_of(notebook: Notebook, cell: int) -> int:
    return int(notebook.job(cell).get_attribute("data-step") or 0)


def wait_for_step(notebook: Notebook, cell: int, step: int) -> None:
    notebook.page.wait_for_function(
        """([cell, step]) => {
            const job = document.querySelectorAll('.jp-Notebook .jp-CodeCell')[cell]
                .querySelector('.etrain-job');
            return job && Number(job.dataset.step) >= step;
        }""",
        arg=[cell, step],
        timeout=90_000,  # on a busy machine a worker starts slowly
    )


def stop(notebook: Notebook, cell: int) -> None:
    """Click Stop and confirm the question."""
    notebook.job(cell).locator(".etrain-stop").click()
    notebook.job(cell).get_by_role("button", name="Stop with a checkpoint").click()


def test_dashboard_updates_and_stops_the_job_while_another_cell_runs(
    open_notebook: OpenNotebook, page: Page
) -> None:
    notebook = open_notebook("busy.ipynb", SET_UP, START, BUSY, "print(asked, board.num_errors)")
    notebook.run(0)
    notebook.run(1)
    expect(notebook.job(1)).to_have_attribute("data-phase", "live")
    wait_for_step(notebook, 1, 50)

    notebook.run(2, wait=False)
    before = step_of(notebook, 1)
    wait_for_step(notebook, 1, before + 100)
    stop(notebook, 1)
    expect(notebook.job(1).get_by_role("button", name="Stopping …")).to_be_disabled()
    shoot(page, "busy")
    page.evaluate("() => window.etrainRun")
    notebook.run(3)

    assert notebook.output(3).inner_text().strip() == "['stop', 'the end of the busy cell'] 0"
    assert notebook.output(2).locator(".etrain-job").count() == 0


@long
def test_failed_request_shows_its_error_and_can_be_repeated(
    open_notebook: OpenNotebook,
) -> None:
    notebook = open_notebook("refused.ipynb", SET_UP, f"is_refusing = True; {START}")
    notebook.run(0)
    notebook.run(1)

    stop(notebook, 1)

    expect(notebook.job(1).locator(".etrain-answer")).to_have_text(
        "Error: the cluster does not answer"
    )
    expect(notebook.job(1).locator(".etrain-stop")).to_be_enabled()


def test_dashboard_survives_a_reload_and_a_kernel_restart(
    lab: Lab, open_notebook: OpenNotebook, page: Page
) -> None:
    notebook = open_notebook("reload.ipynb", SET_UP, START)
    notebook.run(0)
    notebook.run(1)
    wait_for_step(notebook, 1, 560)  # after the first refresh of the saved output
    notebook.save()

    notebook.open(new_kernel=False)
    expect(notebook.job(1)).to_have_attribute("data-phase", "live")
    step = step_of(notebook, 1)
    wait_for_step(notebook, 1, step + 50)
    shoot(page, "reloaded")

    notebook.restart_kernel()
    expect(notebook.job(1)).to_have_attribute("data-phase", "gone")
    expect(notebook.job(1).locator(".etrain-status")).to_have_text("last seen running")
    assert step_of(notebook, 1) >= step
    shoot(page, "restarted")
    notebook.job(1).get_by_role("button", name="Attach").click()
    sources = "() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells[2].source"
    expect(notebook.page.locator(".jp-Notebook .jp-CodeCell")).to_have_count(3)
    job_id = notebook.job(1).get_attribute("data-job-id")
    assert "".join(page.evaluate(sources)) == (
        f"%load_ext etrain_jupyter\n%etrain attach {job_id} -o job"
    )

    reopened = Notebook(lab, page, "reload.ipynb").open()
    expect(reopened.job(1)).to_have_attribute("data-phase", "gone", timeout=10_000)
    assert step_of(reopened, 1) > 100
    assert reopened.job(1).locator("canvas").count() == 4
    shoot(page, "reopened")

    reopened.run(0)
    reopened.run(1)
    expect(reopened.job(1)).to_have_attribute("data-phase", "live")


@long
def test_saved_output_of_a_finished_job_is_small_and_complete(
    open_notebook: OpenNotebook, page: Page
) -> None:
    notebook = open_notebook("finished.ipynb", SET_UP, START_SHORT)
    notebook.run(0)
    notebook.run(1)
    expect(notebook.job(1)).to_have_attribute("data-status", "finished", timeout=20_000)
    page.wait_for_timeout(500)

    saved = notebook.save()
    [output] = saved["cells"][1]["outputs"]
    data = output["data"]

    shoot(page, "finished")
    assert set(data) == {"application/vnd.etrain.job+json", "text/html", "text/plain"}
    assert data["application/vnd.etrain.job+json"]["snapshot"]["step"] == 300
    assert "finished, step 300 of 300" in "".join(data["text/plain"])
    assert len(str(data)) < 100_000
    assert "widgets" not in saved["metadata"]


def test_without_the_extension_anywidget_renders_and_html_is_saved(
    lab_without_extension: Lab, page: Page
) -> None:
    stopped = "print(asked[0], board.num_errors)"
    lab_without_extension.write_notebook("plain.ipynb", SET_UP, START, START_SHORT, BUSY, stopped)
    notebook = Notebook(lab_without_extension, page, "plain.ipynb").open()
    notebook.run(0)
    notebook.run(2)
    chart = notebook.output(2).locator("progress + img, p > img").first
    expect(chart).to_be_visible(timeout=20_000)
    expect(notebook.job(2)).to_have_count(0)
    expect(notebook.output(2)).to_contain_text("finished · step 300 of 300")
    shoot(page, "plain-finished")

    notebook.run(1)
    wait_for_step(notebook, 1, 50)
    notebook.run(3, wait=False)
    stop(notebook, 1)
    wait_for_step(notebook, 1, 150)
    shoot(page, "plain-running")
    page.evaluate("() => window.etrainRun")
    notebook.run(4)

    assert notebook.output(4).inner_text().strip() == "stop 0"

    notebook.save()
    reopened = Notebook(lab_without_extension, page, "plain.ipynb").open()
    finished = reopened.output(2)
    expect(finished.locator("p > img")).to_have_count(2)  # loss, and number of workers
    expect(finished).to_contain_text("finished · step 300 of 300")
    reopened.set_theme("JupyterLab Dark")
    finished.scroll_into_view_if_needed()
    shoot(page, "plain-reopened")


@long
def test_two_views_of_one_job_both_update(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook("two.ipynb", SET_UP, START, "board.show()")
    notebook.run(0)
    notebook.run(1)
    notebook.run(2)

    for cell in (1, 2):
        expect(notebook.job(cell)).to_have_attribute("data-phase", "live")
        wait_for_step(notebook, cell, step_of(notebook, cell) + 50)


SPY = """
from etrain_jupyter.notebook.dashboard.feed import ViewFeed
zooms, detail = [], ViewFeed.detail
def spy(feed, view, to, first, last):
    zooms.append((first, last))
    detail(feed, view, to, first, last)
ViewFeed.detail = spy
"""


def test_etrain_cells_are_highlighted_as_yaml(open_notebook: OpenNotebook, page: Page) -> None:
    cell = "%%etrain distributed --name digits\n# no Python here: don't\nmodel: Net(hidden=128)"
    notebook = open_notebook("yaml.ipynb", cell)

    editor = page.locator(".jp-Notebook .jp-CodeCell .cm-content").first
    expect(editor.locator(".ͼv, .cm-line span").first).to_be_visible()
    comment = editor.locator(".cm-line").nth(1).locator("span")
    shoot(page, "yaml")

    assert comment.all_inner_texts() == ["# no Python here: don't"]
    assert notebook.page.locator(".jp-Notebook .jp-CodeCell").count() == 1


HOSTILE = """
from IPython.display import publish_display_data
evil = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
row = {"worker": evil, "state": evil, "rank": "x", "steps": float("1e300"), "note": evil}
event = {"seq": 1, "time": 1e300, "text": evil, "level": evil}
mime = "application/vnd.etrain.job+json"
for payload in [
    {"snapshot": {"job_id": evil, "name": evil, "status": evil, "reason": evil,
                  "workers": [row, None, 3],
                  "events": [event, "x"], "markers": [{"step": 3, "text": evil, "kind": evil}],
                  "loss": "NaN", "metrics": {evil: "Infinity", "__proto__": 3}, "step": -5,
                  "charts": {"metrics": [evil]}, "error": {"traceback": evil}},
     "series": {"loss": {"x": "1 a 3", "y": "<b> 1e308 -"}, "eval.loss": 3}},
    {}, {"snapshot": 7, "series": []}, [], "text", None, {"snapshot": {"job_id": {"toString": 1}}},
]:
    publish_display_data({mime: payload, "text/plain": "plain"})
"""


@long
def test_hostile_payloads_execute_no_script_and_raise_no_error(
    open_notebook: OpenNotebook, page: Page
) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    notebook = open_notebook("hostile.ipynb", HOSTILE)
    notebook.run(0)
    page.wait_for_timeout(1000)
    shoot(page, "hostile")

    assert notebook.job(0).count() >= 3
    assert page.evaluate("() => window.hacked === undefined")
    assert notebook.job(0).first.locator("img, script").count() == 0
    assert errors == []
