from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

from etrain_jupyter.log import events as t
from etrain_jupyter.notebook.dashboard.html import render_html, render_text
from etrain_jupyter.notebook.dashboard.job_view import JobView
from tests.unit.log.spent import NOTHING_ELSE
from tests.unit.notebook.dashboard.scripted_job import JOB_ID, Script


def view_of(events: list[t.Event]) -> JobView:
    view = JobView(JOB_ID)
    view.add(events)
    return view


def html_of(view: JobView) -> str:
    return render_html(view.snapshot(), view.curves.to_dict())


def chart_of(html: str) -> ElementTree.Element:
    data = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert data is not None
    return ElementTree.fromstring(base64.b64decode(data[1]))


def test_the_page_has_a_table_a_chart_and_the_latest_events() -> None:
    html = html_of(view_of(list(Script(num_steps=60).events())))

    assert "step 60 of 60" in html
    assert "<td>w3</td><td>done</td>" in html
    assert "Finished" in html
    titles = [title.text for title in chart_of(html).iter("{http://www.w3.org/2000/svg}title")]
    assert "w1 lost (trainer killed)" in titles


def test_the_page_of_a_job_without_steps_has_no_chart() -> None:
    html = html_of(view_of(list(Script().begin())))

    assert "<img" not in html
    assert "submitted" in html


def test_a_page_stays_small_however_long_the_job() -> None:
    html = html_of(view_of(list(Script(num_steps=5000).events())))

    assert len(html) < 40_000


def test_names_and_messages_are_text_never_markup() -> None:
    script = Script(job_id="<script>alert(1)</script>-1")
    hostile = "<img src=x onerror=alert(1)>"
    events = list(script.begin())
    events.append(script.make(t.WorkerJoined, worker=hostile))
    events.append(script.make(t.LogLine, level="error", worker="", text=hostile))
    events.append(script.make(t.UserErrorRaised, error=hostile, traceback=hostile, workers=["w0"]))

    html = html_of(view_of(events))

    assert "<script" not in html
    assert "<img" not in html


def test_terminal_control_sequences_are_escaped() -> None:
    """Review S4: what a notebook in a terminal prints of a job."""
    script = Script(name="\x1b[2Jx")
    events = list(script.begin())
    events.append(script.make(t.JobStatusChanged, status="\x1b]0;x\x07failed", reason="a\nb"))
    view = view_of(events)

    shown = render_text(view.snapshot())

    assert "\\x1b]0;x" in shown
    assert shown.isprintable()
    assert "\\x1b]0;x" in html_of(view)
    assert not set(html_of(view)) & {"\x1b", "\x07"}


def test_worker_is_shown_with_its_machine_if_the_pool_reports_it() -> None:
    script = Script()
    machine = {"machine": "g5.xlarge", "zone": "us-east-1a", "lifecycle": "spot"}
    events = list(script.begin())
    events.append(script.make(t.WorkerJoined, worker="i-1", usd_per_h=0.25, **machine))
    events.append(script.make(t.WorkerJoined, worker="w9", device="cuda:1"))

    html = html_of(view_of(events))

    assert "<td>g5.xlarge $0.25/h us-east-1a</td>" in html
    assert "<td>cuda:1</td>" in html


def test_number_of_workers_that_are_left_out_is_shown() -> None:
    script = Script()
    names = [f"w{number}" for number in range(150)]

    html = html_of(view_of([*script.begin(), *script.form(names, "start")]))

    assert "<p>and 50 more</p>" in html


def test_text_line_contains_the_status_step_loss_and_workers() -> None:
    text = render_text(view_of(list(Script(num_steps=60).events())).snapshot())

    assert text.startswith("<etrain job 'digits': finished, step 60 of 60, loss ")
    assert text.endswith("workers 4 of 4>")


def test_text_line_contains_the_reason_of_the_status() -> None:
    script = Script(num_steps=60)
    events = [*script.begin()]
    why = "1 of min 2 workers available"
    events.append(script.make(t.JobStatusChanged, status="waiting", reason=why))

    assert f"waiting ({why})," in render_text(view_of(events).snapshot())


def test_the_page_shows_time_split_pace_and_cost() -> None:
    script = Script(num_steps=60)
    events = [*script.begin(), *script.form(["w0"], "start"), *script.complete(1)]
    spent = {"elapsed_s": 2.0, "data_s": 1.0, "compute_s": 0.9, "optimizer_s": 0.1}
    events.append(
        script.make(
            t.RankTimed,
            **{"worker": "w0", "rank": 0, "world_size": 1, "step": 1, "num_steps": 1},
            **{"samples": 256, "communication_s": 0.0},
            **{**NOTHING_ELSE, **spent},
        )
    )
    events.append(script.make(t.CostUpdated, spent_usd=1.5, on_demand_usd=4.0))
    events.append(script.make(t.WorkerLost, worker="w0", cause="killed"))

    html = html_of(view_of(events))

    assert "<td>128</td><td>data 50%, compute 45%, optimizer 5%</td>" in html
    assert "batch 256 · 128,394 parameters · lr 0.0003 · " in html
    assert "$1.50 spent, $2.50 saved" in html
    assert "<b>error</b> w0 lost (killed)" in html
