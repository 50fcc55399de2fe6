"""The view of a job: zoom, charts, controls, accessibility and hostile input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from etrain_jupyter.log import events as t
from etrain_jupyter.notebook.dashboard.job_view import JobView
from tests.browser.view import View
from tests.unit.log.spent import NOTHING_ELSE
from tests.unit.notebook.dashboard.scripted_job import Script

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

EVIL = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"


def until(script: Script, step: int) -> list[t.Event]:
    """Return the scripted events up to a step, including the other events of that step."""
    found: list[t.Event] = []
    for event in script.events():
        if isinstance(event, t.StepCompleted) and event.step > step:
            break
        found.append(event)
    return found


def in_batches(events: list[t.Event], size: int) -> Iterator[list[t.Event]]:
    for start in range(0, len(events), size):
        yield events[start : start + size]


@pytest.fixture
def script() -> Script:
    return Script(num_steps=600)


@pytest.fixture
def view(page: Page) -> View:
    return View(page)


def drag(view: View, plot: int, start: float, end: float) -> None:
    """Drag over a range of a chart, given as fractions of its width."""
    box = view.plot(plot).bounding_box()
    assert box is not None
    mouse = view.page.mouse
    mouse.move(box["x"] + start * box["width"], box["y"] + 60)
    mouse.down()
    mouse.move(box["x"] + end * box["width"], box["y"] + 65, steps=4)
    mouse.up()
    view.settle()


def step_under_cursor(view: View) -> int:
    text = view.root.locator(".etrain-place").inner_text()
    return int(text.split(" · ")[0].removeprefix("step ").replace(",", ""))


def test_layout_does_not_shift_while_workers_change_and_numbers_grow(
    view: View, script: Script
) -> None:
    events = until(script, 599)
    view.add(events[:40])  # with the first steps, the charts have replaced the start-up
    view.page.evaluate("() => { window.shifts = []; }")

    for batch in in_batches(events[40:], 40):
        view.add(batch)
    view.add([script.make(t.JobStatusChanged, status="paused")])

    assert view.page.evaluate("() => window.shifts") == []
    expect(view.root).to_have_attribute("data-status", "paused")


def test_startup_is_listed_with_seconds_and_charts_appear_with_the_first_step(
    view: View, script: Script
) -> None:
    events = until(script, 3)
    first = next(i for i, event in enumerate(events) if isinstance(event, t.StepCompleted))
    reached = script.make(t.WarmUpReached, worker="w0", phase="build")
    view.add([*events[:2], replace(reached, time=events[1].time + 2.0, seq=0)])
    waiting = script.make(t.JobStatusChanged, status="waiting", reason="0 of min 1 workers")
    view.add([replace(waiting, seq=0)])

    stages = view.root.locator(".etrain-startup > li")
    assert stages.locator("strong").all_inner_texts() == [
        *("workers", "torch", "code and data", "trial pass", "first step")
    ]
    assert stages.locator(".etrain-figure").all_inner_texts()[:2] == ["0.1 s", "2.0 s"]
    states = stages.evaluate_all("all => all.map(stage => stage.dataset.state)")
    assert states == ["done", "done", "now", "next", "next"]
    assert not view.root.locator(".etrain-curves").is_visible()
    assert not view.root.locator(".etrain-tiles").is_visible()
    # Waiting for the first workers is no warning: the pill has the neutral colour.
    expect(view.root.locator(".etrain-status")).to_have_attribute("data-status", "submitted")

    view.add(events[2 : first + 1])
    expect(view.root.locator(".etrain-curves")).to_be_visible()
    expect(view.root.locator(".etrain-tiles")).to_be_visible()
    assert not view.root.locator(".etrain-startup").is_visible()
    expect(view.root.locator(".etrain-events")).to_contain_text("First step after ")


TRACEBACK = """Traceback (most recent call last):
  Cell In[3], line 11, in forward
    x = helper(x)
  Cell In[3], line 4, in helper
    return y @ torch.ones(3, 3)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (50x20 and 3x3)"""


def test_failure_shows_its_traceback_once_in_colour_and_no_empty_charts(
    view: View, script: Script
) -> None:
    error = TRACEBACK.splitlines()[-1]
    failed = {"error": error, "traceback": TRACEBACK, "workers": ["w0"], "step": 0}
    view.add(until(script, 0)[:3])
    view.add([script.make(t.UserErrorRaised, **failed)])
    view.add([script.make(t.JobStatusChanged, status="failed", reason=error)])

    box = view.root.locator(".etrain-error")
    assert box.locator("pre").inner_text().strip() == TRACEBACK
    assert box.locator(".etrain-frame").all_inner_texts() == [
        *("Cell In[3], line 11", "Cell In[3], line 4")
    ]
    exception = box.locator(".etrain-exception")
    assert exception.inner_text() == "RuntimeError"
    plain = box.locator("pre").evaluate("pre => getComputedStyle(pre).color")
    assert exception.evaluate("name => getComputedStyle(name).color") != plain
    for hidden in (".etrain-curves", ".etrain-tiles", ".etrain-startup"):
        assert not view.root.locator(hidden).is_visible(), hidden
    assert view.root.locator(".etrain-facts").inner_text().strip() == "step 0"
    lines = view.root.locator(".etrain-events > li").all_inner_texts()
    assert [error in line for line in lines[:2]] == [False, True]
    box.get_by_role("button", name="Copy").click()
    expect(
        box.get_by_role("button", name="Copied").or_(box.get_by_text("Selected"))
    ).to_be_visible()


def test_narrow_view_wraps_and_cuts_nothing_off(page: Page, script: Script) -> None:
    events = until(script, 300)
    job = JobView("digits-7f3a")
    job.add(events)
    view = View(page, {"version": 1, "snapshot": job.snapshot().to_json()})
    page.set_viewport_size({"width": 360, "height": 900})
    page.wait_for_timeout(3500)  # no kernel answers
    expect(view.root).to_have_attribute("data-phase", "gone", timeout=10_000)

    note = view.root.locator(".etrain-note")
    expect(note).to_contain_text("%etrain attach digits-7f3a -o job")
    for part in (".etrain-name", ".etrain-stop", ".etrain-note", ".etrain-tiles strong"):
        for element in view.root.locator(part).all():
            box = element.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= 360, part
            assert element.evaluate("e => e.scrollWidth <= e.clientWidth || !e.clientWidth"), part


def test_zoom_applies_to_all_charts_requests_points_and_can_be_reset(
    view: View, script: Script
) -> None:
    view.add(until(script, 500))
    reset = view.root.locator(".etrain-reset")
    expect(reset).to_be_disabled()

    drag(view, 1, 0.25, 0.5)
    asked = view.answer_detail()

    assert 100 < asked["first"] < asked["last"] < 350
    ticks = view.page.evaluate("() => window.sent.filter(m => m.kind === 'detail').length")
    assert ticks == 1, "the view ignored the reply and repeated its request"
    view.plot(0).hover(position={"x": 2, "y": 50})
    assert abs(step_under_cursor(view) - asked["first"]) <= 5

    reset.click()
    expect(reset).to_be_disabled()
    drag(view, 0, 0.1, 0.2)
    view.plot(2).dblclick()
    expect(reset).to_be_disabled()


def test_one_cursor_shows_the_values_of_all_charts(view: View, script: Script) -> None:
    view.add(until(script, 300))
    legends = view.root.locator(".etrain-legend")
    newest = legends.all_inner_texts()

    view.plot(0).hover(position={"x": 60, "y": 50})
    view.settle()

    under = legends.all_inner_texts()
    assert all(before != after for before, after in zip(newest[:3], under[:3], strict=True))
    expect(view.root.locator(".etrain-place")).to_contain_text("samples")
    view.page.mouse.move(2, 2)
    view.settle()
    assert legends.all_inner_texts() == newest


def test_axis_unit_changes_keep_the_zoom(view: View, script: Script) -> None:
    view.add(until(script, 400))
    drag(view, 0, 0.3, 0.6)
    steps = view.answer_detail()

    for unit in ("samples", "time", "step"):
        view.root.get_by_role("radio", name=unit).check()
        view.settle()
        view.plot(0).hover(position={"x": 1, "y": 50})
        assert abs(step_under_cursor(view) - steps["first"]) <= 4
        view.page.mouse.move(2, 2)


def test_smoothing_and_log_scale_change_the_drawing(view: View, script: Script) -> None:
    view.add(until(script, 400))
    canvas = view.root.locator(".etrain-chart canvas").first
    read = "canvas => canvas.toDataURL()"
    smooth = canvas.evaluate(read)

    view.root.get_by_label("smoothing").fill("0")
    view.settle()
    raw = canvas.evaluate(read)
    expect(view.root.locator(".etrain-legend").first).not_to_contain_text("raw")
    log = view.root.get_by_role("button", name="logarithmic scale of loss")
    log.click()
    view.settle()

    expect(log).to_have_attribute("aria-pressed", "true")
    assert len({smooth, raw, canvas.evaluate(read)}) == 3


def test_charts_use_the_colors_of_a_theme_that_loads_late(view: View, script: Script) -> None:
    view.add(until(script, 300))
    canvas = view.root.locator(".etrain-chart canvas").first
    before = canvas.evaluate("canvas => canvas.toDataURL()")

    # JupyterLab sets its attributes before the style sheet of the theme is loaded.
    view.page.evaluate("() => document.body.style.setProperty('--jp-ui-font-color2', '#ff0000')")

    canvas.evaluate(
        """(canvas, before) => new Promise(done => {
            const look = () => canvas.toDataURL() === before ? setTimeout(look, 50) : done();
            look();
        })""",
        before,
    )


def test_chart_markers_are_explained_on_hover_and_by_keyboard(view: View, script: Script) -> None:
    view.add(until(script, 300))
    marks = view.root.locator(".etrain-marks button")
    tip = view.root.locator(".etrain-tip:not([hidden])")

    lost = marks.filter(has_text="w1 lost (trainer killed)")
    lost.hover()
    expect(tip).to_contain_text("w1 lost (trainer killed)")
    view.page.mouse.move(2, 2)
    expect(tip).to_have_count(0)

    view.root.locator(".etrain-marks [tabindex='0']").focus()
    for _ in range(marks.count()):
        if "w1 lost" in tip.inner_text():
            break
        view.page.keyboard.press("ArrowLeft")
    expect(tip).to_contain_text("w1 lost (trainer killed)")
    assert marks.nth(0).locator("xpath=ancestor::*[@role='group']").count() >= 1


def test_restored_checkpoint_rewinds_the_curve_and_adds_a_marker(
    view: View, script: Script
) -> None:
    view.add(until(script, 300))
    before = view.root.locator(".etrain-legend").first.inner_text()

    script.step = 120
    view.add([script.make(t.JobRestored, step=120, num_undone=180)])

    expect(view.root).to_have_attribute("data-step", "120")
    assert view.root.locator(".etrain-legend").first.inner_text() != before
    expect(view.root.locator(".etrain-legend").first).to_contain_text("undone")
    rewound = view.root.locator(".etrain-marks button").filter(has_text="step 120")
    expect(rewound.filter(has_text="180 steps will be trained again")).to_have_count(1)


def test_stop_asks_for_confirmation(view: View, script: Script) -> None:
    view.add(until(script, 300))
    stop = view.root.locator(".etrain-stop")

    stop.click()
    assert view.sent("request") == []
    expect(view.root.get_by_role("button", name="Stop now")).to_contain_text(
        "all training after step 200 will be lost"
    )
    view.page.keyboard.press("Escape")
    expect(stop).to_be_focused()
    assert view.sent("request") == []

    stop.click()
    view.root.get_by_role("button", name="Stop with a checkpoint").click()
    [request] = view.sent("request")
    assert (request["request"], request["args"]) == ("stop", {})
    view.answer("stop", "stops at the next step boundary, with a checkpoint")
    expect(view.root.locator(".etrain-answer")).to_contain_text("stops at the next step boundary")
    expect(stop).to_have_text("Stopping …")


def test_preempt_asks_for_confirmation(view: View, script: Script) -> None:
    view.add(until(script, 300))

    view.root.get_by_role("button", name="Preempt w3").first.click()
    view.root.locator(".etrain-box").get_by_role("button", name="Preempt w3").click()

    [request] = view.sent("request")
    assert (request["request"], request["args"]) == ("preempt", {"worker": "w3"})


def test_scale_rejects_a_minimum_above_the_maximum(view: View, script: Script) -> None:
    view.add(until(script, 300))
    view.root.locator(".etrain-scale").click()
    least, most = view.root.locator(".etrain-box input").all()
    apply = view.root.locator(".etrain-box").get_by_role("button", name="Scale")

    least.fill("9")
    apply.click()
    expect(view.root.locator(".etrain-hint")).to_contain_text("9 to 4")
    assert view.sent("request") == []

    most.fill("12")
    apply.click()
    [request] = view.sent("request")
    assert request["args"] == {"min": 9, "max": 12}


def test_buttons_follow_the_status_and_explain_why_they_are_disabled(
    view: View, script: Script
) -> None:
    view.add(until(script, 300))
    view.add([script.make(t.JobStatusChanged, status="paused")])
    save = view.root.locator(".etrain-checkpoint")
    expect(save).to_be_disabled()

    save.click(force=True)
    expect(view.root.locator(".etrain-answer")).to_contain_text("nothing new to save")
    view.root.get_by_role("button", name="Resume").click()
    assert [request["request"] for request in view.sent("request")] == ["resume"]

    view.add([script.make(t.JobStatusChanged, status="finished")])
    for button in view.root.locator(".etrain-buttons button").all():
        expect(button).to_be_disabled()
        expect(button).to_have_attribute("title", "The job has finished.")


def test_resume_of_a_stopped_job_asks_for_confirmation(view: View, script: Script) -> None:
    view.add(until(script, 300))
    view.add([script.make(t.JobStatusChanged, status="stopped")])
    resume = view.root.locator(".etrain-buttons").get_by_role("button", name="Resume")

    resume.click()
    box = view.root.locator(".etrain-box")
    expect(box).to_contain_text("Resume digits? It continues from the checkpoint at step 200;")
    box.get_by_role("button", name="Cancel").click()
    assert view.sent("request") == []
    expect(resume).to_be_focused()
    resume.click()
    box.get_by_role("button", name="Resume").click()

    assert [request["request"] for request in view.sent("request")] == ["resume"]
    again = {"from_status": "stopped", "step": 300, "min_workers": 1, "max_workers": 4}
    view.add([script.make(t.JobResumed, **again)])
    view.add([script.make(t.JobStatusChanged, status="running")])
    expect(view.root.get_by_role("button", name="Pause")).to_be_enabled()


def test_events_are_filtered_and_keep_their_scroll_position(view: View, script: Script) -> None:
    view.add(until(script, 300))
    items = view.root.locator(".etrain-events li")
    assert "Generation" in items.first.inner_text() or "Checkpoint" in items.first.inner_text()

    view.root.get_by_label("show events of level").select_option("error")
    assert [text.split("error")[1].strip() for text in items.all_inner_texts()] == [
        "w1 lost (trainer killed), detected after 4 ms"
    ]
    view.root.get_by_label("show events of level").select_option("all")
    view.root.get_by_label("show events that contain").fill("warm w3")
    expect(items).to_have_count(1)
    view.root.get_by_label("show events that contain").fill("")

    log = view.root.locator(".etrain-log")
    log.evaluate("box => { box.scrollTop = 100; }")
    read = items.filter(has_text="Checkpoint of step 200")
    place = read.bounding_box()
    line = {"level": "info", "worker": "w0", "text": "hello"}
    view.add([script.make(t.LogLine, **line) for _ in range(5)])
    assert read.bounding_box() == place


def test_worker_row_shows_the_split_of_its_time(view: View, script: Script) -> None:
    view.add(until(script, 300))
    spent = {"elapsed_s": 2.0, "data_s": 0.9, "compute_s": 0.8, "optimizer_s": 0.1}
    view.add(
        [
            script.make(
                t.RankTimed,
                **{"worker": "w0", "rank": 0, "world_size": 4, "step": 300, "num_steps": 100},
                **{"samples": 6400, "communication_s": 0.2},
                **{**NOTHING_ELSE, **spent},
            )
        ]
    )

    row = view.root.locator(".etrain-workers tr[data-worker='w0']")
    expect(row.get_by_role("img")).to_have_attribute(
        "aria-label",
        "data 45 %, forward and backward 40 %, other ranks 10 %, optimizer 5 %, other 0 % "
        "(100 steps up to step 300)",
    )
    expect(row).to_contain_text("3,200")
    expect(row).to_contain_text("data, 45 %")


def test_cost_is_shown_if_it_is_known(view: View, script: Script) -> None:
    view.add(until(script, 20))
    expect(view.tile("cost")).to_have_count(0)

    view.add([script.make(t.CostUpdated, spent_usd=1.5, on_demand_usd=4.0)])
    assert view.tile("cost").inner_text().split("\n") == ["cost", "$1.50", "$2.50 saved"]

    cost = {"spent_usd": 1.5, "on_demand_usd": 4.0, "wasted_usd": 0.0512}
    view.add([script.make(t.CostUpdated, **cost)])
    expected = ["cost", "$1.50", "$2.50 saved · $0.0512 wasted"]
    assert view.tile("cost").inner_text().split("\n") == expected


def test_screen_reader_announces_status_changes_only(page: Page, script: Script) -> None:
    page.clock.install()
    view = View(page)
    view.add(until(script, 100))
    spoken = view.root.locator("[role=status]")
    assert spoken.count() == 1
    first = spoken.inner_text()
    assert "digits running" in first

    view.add(list(script.complete(101)))
    page.clock.run_for(3100)  # longer than the minimum pause between two announcements
    assert spoken.inner_text() == first
    view.add([script.make(t.JobStatusChanged, status="paused")])
    expect(spoken).to_contain_text("digits paused")


def test_keyboard_reaches_charts_and_controls_with_a_visible_focus(
    view: View, script: Script
) -> None:
    view.add(until(script, 300))
    reached = set()
    for _ in range(40):
        view.page.keyboard.press("Tab")
        name, outline = view.page.evaluate(
            """() => {
                const at = document.activeElement;
                const shown = at.type === 'radio' ? at.nextElementSibling : at;
                return [at.className || at.type, getComputedStyle(shown).outlineStyle];
            }"""
        )
        if name and view.root.locator(":focus").count():
            reached.add(name)
            assert outline != "none", name

    for wanted in ("etrain-button etrain-stop", "radio", "range", "etrain-plot", "etrain-filter"):
        assert wanted in reached
    plot = view.root.locator(".etrain-plot").first
    plot.focus()
    view.page.keyboard.press("Home")
    view.page.keyboard.press("ArrowRight")
    expect(view.root.locator(".etrain-place")).to_contain_text("step ")
    view.page.keyboard.press("+")
    expect(view.root.locator(".etrain-reset")).to_be_enabled()
    view.page.keyboard.press("Escape")
    expect(view.root.locator(".etrain-reset")).to_be_disabled()


HOSTILE: list[Any] = [
    {
        "name": EVIL,
        "status": EVIL,
        "reason": EVIL,
        "controls": {"stop": EVIL, "__proto__": EVIL},
        "cost": {"spent_usd": "NaN", "saved_usd": 1e308},
        "workers": [{"worker": EVIL, "state": EVIL, "waits_for": EVIL, "split": {"shares": EVIL}}],
        "events": [{"seq": 1, "time": 1e308, "text": EVIL, "level": EVIL, "kind": EVIL}],
        "markers": [{"step": 3, "time": 1e308, "text": EVIL, "kind": EVIL}],
        "charts": {"metrics": [EVIL, EVIL, None, 7], "has_eval": True},
        "error": {"error": EVIL, "traceback": EVIL},
    },
    {
        "step": 1e308,
        "total_steps": -1e308,
        "progress": "Infinity",
        "loss": 1e308,
        "lr": "-Infinity",
        "elapsed_s": 1e308,
        "eta_s": "NaN",
        "updated_at": -1e308,
        "world_size": 1e308,
        "max_workers": 1e308,
        "eval": {"step": "x", "loss": {}, "metrics": [1]},
        "checkpoint": {"step": 1e308, "time": -1e308, "size_bytes": 1e308},
    },
    {
        "workers": [
            {"worker": f"w{i % 50}", "state": "training", "rank": i} for i in range(10_000)
        ],
        "events": [{"seq": i, "time": i, "text": f"event {i}"} for i in range(10_000)],
        "markers": [{"seq": i, "step": i, "time": i, "kind": "lost"} for i in range(10_000)],
        "status": "running",
        "step": 10_000,
    },
    {"workers": "no", "events": 3, "markers": {}, "charts": [], "metrics": "x", "eval": 1},
    {},
    None,
    [1, 2],
]


def test_hostile_payloads_execute_no_script_and_raise_no_error(page: Page) -> None:
    series = {
        "loss": {"x": "3 1 1e308 x", "y": "1e308 nan y {}"},
        "elapsed_s": {"x": "1 2", "y": "9 1"},
        "eval.loss": {"x": "1", "y": "1 2"},
        "samples": {"x": [1, None], "y": {}},
        EVIL: 7,
        "world_size": {"x": "0 0 0 0 0", "y": "1e308 1e308 1e308 1e308 1e308"},
    }
    view = View(page, {"snapshot": HOSTILE[0], "series": series})
    view.settle()
    for number, snapshot in enumerate(HOSTILE, start=1):
        message = {"kind": "update", "seq": number, "reset": True, "snapshot": snapshot}
        view.bring(message | {"blocks": [{"name": EVIL, "rows": 1e308}, None, 3]}, [])
        view.settle()
        for unit in ("samples", "time", "step"):
            radio = view.root.get_by_role("radio", name=unit)
            if radio.is_visible() and radio.is_enabled():  # no charts before the first step
                radio.check()
        assert page.locator("*").count() < 8_000
    for content in (None, 7, [], {"kind": "detail", "seq": 8, "first": EVIL}, {"kind": "notice"}):
        view.bring(content, [])  # type: ignore[arg-type]
    view.settle()

    assert page.evaluate("() => window.hacked === undefined")
    assert view.root.locator("img, script, iframe").count() == 0
    assert view.errors == []


def test_html_in_a_name_is_shown_as_text(view: View, script: Script) -> None:
    view.add(until(script, 10))
    view.add([script.make(t.LogLine, level="error", worker=EVIL, text=EVIL)])

    expect(view.root.locator(".etrain-events li").first).to_contain_text(EVIL)
    assert view.page.evaluate("() => window.hacked === undefined")
