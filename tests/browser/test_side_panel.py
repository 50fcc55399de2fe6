"""The side panel, the command palette and the status bar of a real JupyterLab."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import Lab, Notebook
from tests.browser.test_dashboard import shoot
from tests.capabilities import long

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

OpenNotebook = Callable[..., Notebook]

SET_UP = """
import os, threading, time
os.environ.update(ETRAIN_STATE=os.path.abspath("state"), ETRAIN_RUNS=os.path.abspath("runs"))
%load_ext etrain_jupyter
from etrain_jupyter.notebook.dashboard.link import link
from etrain_jupyter.notebook.dashboard.side_panel import OtherJobs
from etrain_jupyter.notebook.dashboard.widget import Dashboard
from etrain_jupyter.log import events as t
from tests.unit.notebook.dashboard.scripted_job import Script, play

asked = []
def start(name, *, called="", is_shown=False, num_steps=40_000, steps_per_s=100):
    script = Script(num_steps, time.time(), f"{name}-7f3a", name=called)
    is_over = threading.Event()
    def bring(events):
        if not is_over.is_set():
            board.add_events(events)
    def on_request(request, args):
        asked.append((name, request, args))
        if request == "stop":
            is_over.set()
            board.add_events([script.make(t.JobStatusChanged, status="stopped")])
        return f"{name} was asked to {request}"
    board = Dashboard(job_id=script.job_id, on_request=on_request)
    board.show() if is_shown else board.follow()
    threading.Thread(
        target=play, args=(script, bring), kwargs={"steps_per_s": steps_per_s}, daemon=True
    ).start()
    return board
"""
SHORT = "start('mnist', num_steps=300, steps_per_s=600)"
THREE = "start('digits', is_shown=True); start('squad'); start('albert-large');"
LOGGED = """
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.notebook.job.run_store import RunStore
for name in ("digits", "squad"):
    record = RunStore().create({"name": name, "created": time.time()}, job_id=f"{name}-7f3a")
    log = EventLog(record.log_path, fsync_every_s=None)
    log.append(list(Script(60, job_id=record.job_id).events()))
    log.close()
"""
SURROUNDED = """
evil = "<img src=x onerror='window.hacked = 1'>"
def attach(job_id):
    if job_id == "lost-7f3a":
        raise RuntimeError("its cluster has ended")
    start(job_id.rpartition("-")[0])
    return ""
link().panel.serve(
    look=lambda job_ids, is_asked: OtherJobs(
        others=tuple(
            {"job_id": f"{name}-7f3a", "name": called, "status": "running", "step": 40,
             "total_steps": 900, "world_size": 2}
            # Regression: an invalid job id must not be offered, whatever the job's name is.
            for name, called in {"elsewhere": "elsewhere", "lost": "lost", "evil": evil,
                                 evil: "x", "y\\nimport os": "y"}.items()
            if f"{name}-7f3a" not in job_ids
        ),
        pools=({"pool": "local", "cluster_id": "c", "workers": 2, "idle_s": 400.0,
                "ends_in_s": 500.0, "time": time.time()},),
    ),
    attach=attach,
    compare="".join,
    template=lambda: "%%etrain distributed\\nmodel: Net()",
)
"""

STUDY = """
def attach(job_id):
    board = Dashboard(job_id=job_id, on_request=lambda request, args: "")
    board.follow()
    board.add_events(Script(60, time.time(), job_id, name=job_id).events())
    return ""
link().panel.serve(
    look=lambda job_ids, is_asked: OtherJobs(), attach=attach, compare="".join, template=str
)
def report(status, *values):
    trials = [
        {"job_id": f"net-7f3a-{number:03d}", "number": number, "state": "running", "value": value}
        for number, value in enumerate(values)
    ]
    link().panel.put_study("net-7f3a", {
        "study_id": "net-7f3a", "name": "net", "status": status, "reason": "",
        "metric": "accuracy", "best": max(values), "num_trials": 4, "num_begun": len(values),
        "created": time.time(), "trials": trials,
    })
"""


def show_panel(page: Page) -> Locator:
    """Open the side panel with its command."""
    page.evaluate("() => window.jupyterapp.commands.execute('etrain:show-jobs')")
    panel = page.locator("#etrain-jobs")
    expect(panel).to_be_visible()
    return panel


def row(panel: Locator, job_id: str) -> Locator:
    return panel.locator(f".etrain-row[data-key='{job_id}']")


def wait_for_rows_to_move(page: Page, job_ids: list[str]) -> None:
    """Wait until the step of each of these rows has changed."""
    page.evaluate("() => { window.etrainSteps = {}; }")
    page.wait_for_function(
        """ids => ids.every(id => {
            const row = document.querySelector(`.etrain-row[data-key='${id}']`);
            const text = row?.querySelector('.etrain-where').textContent ?? '';
            window.etrainSteps[id] ??= text;
            return text && text !== window.etrainSteps[id];
        })""",
        arg=job_ids,
        timeout=60_000,
    )


def is_enabled(page: Page, command: str) -> bool:
    return bool(page.evaluate("command => window.jupyterapp.commands.isEnabled(command)", command))


def source_of_active_cell(page: Page) -> str:
    return str(
        page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.activeCell
                .model.sharedModel.getSource()"""
        )
    )


PATIENCE_MS = 30_000
JOBS = ["digits-7f3a", "squad-7f3a", "albert-large-7f3a"]


def test_panel_lists_live_jobs_after_a_reload_and_last_seen_jobs_after_a_restart(
    open_notebook: OpenNotebook, page: Page
) -> None:
    notebook = open_notebook("panel.ipynb", SET_UP, f"{SHORT}; {THREE}")
    panel = show_panel(page)
    expect(panel.locator(".etrain-empty")).to_contain_text("%load_ext etrain_jupyter")
    shoot(page, "panel-not-loaded")
    notebook.run(0)
    expect(panel.locator(".etrain-empty")).to_contain_text("%%etrain distributed")
    shoot(page, "panel-empty")

    notebook.run(1)
    expect(panel.locator(".etrain-row")).to_have_count(4)
    boxes = [panel.locator(".etrain-row").nth(i).bounding_box() for i in range(4)]
    wait_for_rows_to_move(page, JOBS)
    expect(panel.locator(".etrain-tally")).to_contain_text("4 jobs, 3 active, 6 workers")
    expect(row(panel, "mnist-7f3a").locator(".etrain-status")).to_have_text("finished")
    assert [panel.locator(".etrain-row").nth(i).bounding_box() for i in range(4)] == boxes
    shoot(page, "panel-light")
    if folder := os.environ.get("ETRAIN_SHOTS"):
        # The picture of docs/how-to/use-the-side-panel.md, for `make screenshots`.
        box, last = panel.bounding_box(), boxes[-1]
        assert box is not None
        assert last is not None
        clip = box | {"height": last["y"] + last["height"] - box["y"] + 10}
        page.screenshot(path=Path(folder) / "side-panel.png", clip=clip)
    notebook.set_theme("JupyterLab Dark")
    shoot(page, "panel-dark")
    notebook.set_theme("JupyterLab Light")
    notebook.save()

    notebook.open(new_kernel=False)
    panel = show_panel(page)
    wait_for_rows_to_move(page, JOBS)

    notebook.restart_kernel()
    for job_id in JOBS:
        expect(row(panel, job_id).locator(".etrain-status")).to_have_text("last seen running")
    expect(row(panel, "mnist-7f3a").locator(".etrain-status")).to_have_text("finished")
    expect(panel.locator(".etrain-tally")).to_contain_text("4 jobs, none active")
    assert not is_enabled(page, "etrain:stop-job")
    shoot(page, "panel-kernel-gone")
    panel.get_by_role("button", name="Clear").click()
    expect(panel.locator(".etrain-row")).to_have_count(0)
    notebook.run(0)
    notebook.run(1)
    wait_for_rows_to_move(page, JOBS)
    expect(panel.locator(".etrain-row")).to_have_count(4)


def test_panel_opens_stops_and_compares_jobs_and_shows_a_cell(
    open_notebook: OpenNotebook, page: Page
) -> None:
    cells = [SET_UP, "1 + 1", THREE, "2 + 2", "print(asked)", LOGGED]
    notebook = open_notebook("opened.ipynb", *cells)
    for cell in (0, 2):
        notebook.run(cell)
    panel = show_panel(page)
    expect(panel.locator(".etrain-row")).to_have_count(3)

    # By keyboard only: the newest job is on top; open the one below it; Escape returns.
    panel.locator(".etrain-open").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    job = panel.locator(".etrain-job")
    expect(job).to_have_attribute("data-phase", "live")
    expect(job).to_have_attribute("data-job-id", "squad-7f3a")
    expect(job.locator("canvas")).to_have_count(3)
    shoot(page, "panel-opened")
    page.keyboard.press("Escape")
    expect(row(panel, "squad-7f3a").locator(".etrain-open")).to_be_focused()

    row(panel, "digits-7f3a").click(position={"x": 60, "y": 60})  # anywhere in the row
    expect(job).to_have_attribute("data-job-id", "digits-7f3a")
    job.locator(".etrain-stop").click()
    shoot(page, "panel-asks")
    job.get_by_role("button", name="Stop with a checkpoint").click()
    expect(job.locator(".etrain-answer")).to_have_text("digits was asked to stop")
    expect(job).to_have_attribute("data-status", "stopped")
    panel.get_by_role("button", name="All jobs").click()
    expect(row(panel, "digits-7f3a").locator(".etrain-status")).to_have_text("stopped")
    expect(row(panel, "squad-7f3a").locator(".etrain-status")).to_have_text("running")

    row(panel, "digits-7f3a").get_by_role("button", name="Show digits in opened.ipynb").click()
    page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.content.activeCellIndex === 2"
    )
    notebook.run(4)
    assert notebook.output(4).inner_text().strip() == "[('digits', 'stop', {})]"

    # Two selected jobs open as a page in a tab, from their logs.
    notebook.run(5)
    compare = panel.locator(".etrain-side-head .etrain-tool", has_text="Compare")
    expect(compare).to_have_count(1)
    expect(compare).not_to_be_visible()
    row(panel, "squad-7f3a").get_by_role("checkbox", name="Compare squad").check()
    expect(compare).to_be_disabled()
    row(panel, "digits-7f3a").get_by_role("checkbox", name="Compare digits").check()
    shoot(page, "panel-selected")
    compare.click()
    opened = page.frame_locator("iframe.etrain-page-frame")
    expect(opened.locator("h1")).to_have_text("Comparison of 2 jobs", timeout=PATIENCE_MS)
    expect(opened.locator("tbody").first.locator("tr")).to_have_count(2)
    expect(opened.locator("svg[aria-label='loss over step']")).to_be_visible()
    opened.locator("label", has_text="time").click()
    expect(opened.locator("svg[aria-label='loss over step']")).not_to_be_visible()
    expect(opened.locator("svg[aria-label='loss over seconds']")).to_be_visible()
    shoot(page, "panel-comparison")


@long
def test_palette_commands_apply_to_the_selected_job(
    open_notebook: OpenNotebook, page: Page
) -> None:
    one = "start('digits', is_shown=True);"
    notebook = open_notebook("palette.ipynb", SET_UP, one, "start('squad');", "print(asked)")
    page.evaluate("() => window.jupyterapp.commands.execute('etrain:insert-training-cell')")
    page.wait_for_function(
        """() => window.jupyterapp.shell.currentWidget.content.activeCell
            .model.sharedModel.getSource().startsWith('%%etrain distributed')"""
    )
    assert "\nmodel: " in source_of_active_cell(page), (
        "the template must work in a kernel without our magics"
    )
    assert not is_enabled(page, "etrain:pause-job")
    expect(page.locator(".jp-Notebook .jp-CodeCell")).to_have_count(6)

    notebook.run(0)
    notebook.run(3)
    page.wait_for_function("() => window.jupyterapp.commands.isEnabled('etrain:pause-job')")
    label = page.evaluate("() => window.jupyterapp.commands.label('etrain:pause-job')")
    assert label == "Pause digits"
    assert not is_enabled(page, "etrain:resume-job")
    page.evaluate("() => window.jupyterapp.commands.execute('etrain:pause-job')")
    expect(page.get_by_text("digits was asked to pause")).to_be_visible()

    notebook.run(4)
    page.wait_for_function("() => !window.jupyterapp.commands.isEnabled('etrain:stop-job')")
    panel = show_panel(page)
    row(panel, "squad-7f3a").locator(".etrain-open").focus()
    meant = panel.locator(".etrain-open[aria-current='true']")
    expect(meant).to_have_text("squad")
    page.evaluate("() => { window.jupyterapp.commands.execute('etrain:stop-job'); }")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Stop squad?")
    shoot(page, "palette-stop")
    dialog.get_by_role("button", name="Cancel").click()
    page.evaluate("() => { window.jupyterapp.commands.execute('etrain:stop-job'); }")
    page.get_by_role("dialog").get_by_role("button", name="Stop Now").click()
    expect(row(panel, "squad-7f3a").locator(".etrain-status")).to_have_text("stopped")

    notebook.run(5)
    shown = notebook.output(5).inner_text().strip()
    assert shown == "[('digits', 'pause', {}), ('squad', 'stop', {'now': True})]"
    page.evaluate("() => window.jupyterapp.commands.execute('etrain:run-doctor')")
    expect(page.locator(".jp-Notebook")).to_contain_text("etrain-jupyter 0.2.0, Python")


@long
def test_study_expands_to_its_trials_and_a_trial_opens_its_job(
    open_notebook: OpenNotebook, page: Page
) -> None:
    cells = ["report('running', 0.5, 0.25)", "report('finished', 0.75, 0.25, 0.5)"]
    notebook = open_notebook("study.ipynb", SET_UP + STUDY, *cells)
    notebook.run(0)
    notebook.run(1)
    panel = show_panel(page)
    study = panel.locator(".etrain-study")
    toggle = study.locator(".etrain-expand")
    expect(toggle).to_have_attribute(
        "aria-label", "study net, running, 2 of 4 trials, best accuracy 0.5"
    )
    expect(study.locator(".etrain-trial")).to_have_count(0)
    toggle.focus()
    page.keyboard.press("Enter")
    expect(toggle).to_have_attribute("aria-expanded", "true")
    expect(study.locator(".etrain-trial .etrain-open")).to_have_text(["trial 0", "trial 1"])

    # It stays expanded when it changes.
    notebook.run(2)
    expect(study.locator(".etrain-trial")).to_have_count(3)
    expect(study.locator(".etrain-status").first).to_have_text("finished")
    shoot(page, "panel-study")

    # A trial that this kernel is not attached to: its job opens, and has a row below the study.
    study.get_by_role("button", name="trial 1, running, 0.25. Open").click()
    job = panel.locator(".etrain-job")
    expect(job).to_have_attribute("data-job-id", "net-7f3a-001", timeout=PATIENCE_MS)
    panel.get_by_role("button", name="All jobs").click()
    attached = study.locator(".etrain-row[data-key='net-7f3a-001']")
    expect(attached.locator(".etrain-row-facts")).to_be_visible()
    expect(study.locator(".etrain-trial")).to_have_count(2)
    expect(panel.locator(".etrain-list > .etrain-rows > .etrain-row")).to_have_count(0)

    notebook.restart_kernel()
    expect(study.locator(".etrain-status").first).to_have_text("finished")
    panel.get_by_role("button", name="Clear").click()
    expect(study).to_have_count(0)


@pytest.fixture
def set_setting(lab: Lab, page: Page) -> Iterator[Callable[[str, Any], None]]:
    """Provide a function that changes a setting; restore the defaults at the end."""

    def set_it(key: str, value: Any) -> None:
        page.evaluate(
            """([key, value]) => window.jupyterapp.pluginRegistry._plugins
                .get('@jupyterlab/apputils-extension:settings').service
                .set('etrain-jupyter:settings', key, value)""",
            [key, value],
        )

    yield set_it
    settings = lab.root.parent / "lab_settings" / "etrain-jupyter"
    (settings / "settings.jupyterlab-settings").unlink(missing_ok=True)


def test_panel_offers_other_jobs_warns_of_idle_pools_and_escapes_names(
    lab: Lab,
    open_notebook: OpenNotebook,
    page: Page,
    set_setting: Callable[[str, Any], None],
) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    lab.write_notebook("other.ipynb", SET_UP, "start('elsewhere');")
    yaml = "%%etrain distributed\nmodel: Net()  # comment"
    notebook = open_notebook(
        "around.ipynb", SET_UP + SURROUNDED, "start('evil', called=evil);", yaml
    )
    notebook.run(0)
    panel = show_panel(page)
    panel.get_by_role("button", name="Refresh the jobs").click()
    expect(panel.locator(".etrain-offer")).to_have_count(3, timeout=PATIENCE_MS)
    expect(panel.locator(".etrain-pools")).to_contain_text(
        "idle for 6 min: 2 workers, shuts down in 8"
    )
    bar = page.locator(".etrain-statusbar")
    expect(bar).to_have_text("etrain: no running jobs · ⚠ pool local idle")
    shoot(page, "panel-around")

    row(panel, "lost-7f3a").get_by_role("button", name="Attach").click()
    expect(page.locator(".jp-toast-message", has_text="its cluster has ended")).to_be_visible()
    row(panel, "elsewhere-7f3a").get_by_role("button", name="Attach").click()
    expect(row(panel, "elsewhere-7f3a").locator(".etrain-open")).to_be_visible()
    expect(bar).to_contain_text("etrain: 1 job, ")

    # Another kernel follows the same job: the panel has one row that names both notebooks.
    page.evaluate(
        "() => window.jupyterapp.commands.execute('docmanager:open', {path: 'other.ipynb'})"
    )
    second = Notebook(lab, page, "other.ipynb")
    page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget?.title.label === 'other.ipynb'"
    )
    second.wait_until_idle()
    second.run(0)
    second.run(1)
    shared = row(panel, "elsewhere-7f3a")
    expect(shared.locator(".etrain-link").first).to_contain_text("and 1 more")
    expect(shared).to_have_count(1)

    page.evaluate(
        "() => window.jupyterapp.commands.execute('docmanager:open', {path: 'around.ipynb'})"
    )
    notebook.run(1)
    hostile = panel.locator(".etrain-row").filter(has_text="<img src=x").first
    expect(hostile.locator(".etrain-open")).to_be_visible()
    hostile.click(position={"x": 60, "y": 60})
    expect(panel.locator(".etrain-job")).to_have_attribute("data-phase", "live")
    shoot(page, "panel-hostile")
    assert page.evaluate("() => window.hacked === undefined")
    assert panel.locator("img, script").count() == 0

    # Changed settings apply immediately.
    comment = notebook.page.locator(".jp-Notebook:visible .jp-CodeCell").nth(2)
    expect(comment.locator(".cm-line span", has_text="# comment")).to_have_count(1)
    set_setting("highlight", False)
    expect(comment.locator(".cm-line span", has_text="model")).to_have_count(0)
    slider = panel.locator(".etrain-smoothing input")
    set_setting("smoothing", 0.5)
    expect(slider).to_have_value("0.5")
    set_setting("statusBar", False)
    expect(bar).not_to_be_visible()
    assert errors == []
