from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from etrain_jupyter.errors import RunStoreError
from etrain_jupyter.log import events as t
from etrain_jupyter.log.exhibits import Content, Table
from etrain_jupyter.notebook.dashboard import widget
from etrain_jupyter.notebook.dashboard.link import PanelComm
from etrain_jupyter.notebook.dashboard.widget import MIME, Dashboard
from tests.unit.notebook.dashboard.scripted_job import JOB_ID, Script

REPOSITORY = Path(__file__).parents[4]
NOTEBOOK = """
import sys, threading, time
sys.path.insert(0, {repository!r})
from etrain_jupyter.notebook.dashboard.widget import Dashboard
from tests.unit.notebook.dashboard.scripted_job import Script, play
script = Script(40)
board = Dashboard(job_id=script.job_id, on_request=print)
board.show()
player = threading.Thread(
    target=play, args=(script, board.add_events), kwargs={{"steps_per_s": 80}}
)
player.start()
"""


class FakeBrowser:
    """Stands for a Jupyter front end; what is published lands in a list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: list[tuple[dict[str, Any], bool]] = []
        self.is_free = threading.Event()
        self.is_free.set()
        self.is_held = threading.Event()
        monkeypatch.setattr(widget.browser, "has_front_end", lambda: True)
        monkeypatch.setattr(widget.browser, "publish", self.publish)
        monkeypatch.setattr(Dashboard, "_open_widget", lambda self: None)

    def publish(self, bundle: dict[str, Any], display_id: str, *, update: bool) -> None:
        if not self.is_free.is_set():
            self.is_held.set()
            self.is_free.wait(60)
        self.published.append((bundle, update))


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> FakeBrowser:
    return FakeBrowser(monkeypatch)


def new_dashboard() -> Dashboard:
    return Dashboard(job_id=JOB_ID, on_request=lambda request, args: None)


def dashboard_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("etrain-dashboard")]


def test_without_a_front_end_showing_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    dashboard = new_dashboard()

    dashboard.show()

    assert capsys.readouterr().out.startswith("<etrain job 'digits-7f3a': submitted")
    assert dashboard_threads() == []


def test_the_thread_ends_with_the_job_after_a_last_update(browser: FakeBrowser) -> None:
    dashboard = new_dashboard()
    dashboard.show()
    dashboard.add_events(list(Script(20).events()))

    [thread] = dashboard_threads()
    thread.join(timeout=10)

    assert not thread.is_alive()
    bundle, is_update = browser.published[-1]
    assert is_update
    assert bundle[MIME]["snapshot"]["status"] == "finished"
    assert dashboard.num_errors == 0


def test_events_that_come_after_the_end_are_still_shown(
    browser: FakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widget, "LINGER_S", 0.0)
    events = list(Script(20).events())
    dashboard = new_dashboard()
    dashboard.show()
    dashboard.add_events(events[:-1])
    dashboard.add_events(events[-1:])
    for thread in dashboard_threads():
        thread.join(timeout=10)

    script = Script(20)
    script.seq = events[-1].seq
    dashboard.add_events(script.end_epoch(20, 0))
    for thread in dashboard_threads():
        thread.join(timeout=10)

    assert browser.published[-1][0][MIME]["snapshot"]["checkpoint"]["count"] == 2


def test_slow_front_end_does_not_block_events(browser: FakeBrowser) -> None:
    dashboard = new_dashboard()
    dashboard.show()
    browser.is_free.clear()
    events = list(Script(20).events())
    dashboard.add_events(events)
    assert browser.is_held.wait(60)
    shown = len(browser.published)

    for _ in range(20):
        dashboard.add_events(events)

    assert len(browser.published) == shown, "the events were taken while the front end was busy"
    browser.is_free.set()
    dashboard.close()
    assert dashboard_threads() == []


def test_blocked_channel_does_not_block_events(
    browser: FakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_held, is_free, sent = threading.Event(), threading.Event(), []

    class StuckLink(PanelComm):
        def send(self, _job_id: str, _receive: object, content: dict[str, Any], _: object) -> None:
            if sent:
                is_held.set()
                is_free.wait(60)
            sent.append(content["seq"])

    stuck = StuckLink()
    monkeypatch.setattr(widget, "link", lambda: stuck)
    dashboard = new_dashboard()
    dashboard._receive_from_link({"kind": "hello", "view": "me"})
    script = Script(2000)
    dashboard.add_events(list(script.begin()))
    assert is_held.wait(60)

    for _ in range(100):
        dashboard.add_events([event for step in range(10) for event in script.complete(step + 1)])
        assert len(dashboard._outbox) <= 1, "what waits is no more than one message"

    assert sent == [1]
    is_free.set()
    dashboard.close()
    assert sent == list(range(1, len(sent) + 1))
    assert dashboard_threads() == []


def test_slow_save_does_not_block_messages(
    browser: FakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widget, "SAVE_EVERY_S", 0.0)
    is_saving, may_go, sent = threading.Event(), threading.Event(), []

    class Heard(PanelComm):
        def send(self, _job_id: str, _receive: object, content: dict[str, Any], _: object) -> None:
            sent.append(content["seq"])

    def render(*_: object) -> str:
        is_saving.set()
        assert may_go.wait(60)
        return ""

    heard = Heard()
    monkeypatch.setattr(widget, "link", lambda: heard)
    dashboard = new_dashboard()
    dashboard.show()
    monkeypatch.setattr(widget, "render_html", render)
    dashboard._receive_from_link({"kind": "hello", "view": "me"})
    script = Script(2000)
    dashboard.add_events(list(script.begin()))
    assert is_saving.wait(60)

    before = len(sent)
    dashboard.add_events([event for step in range(10) for event in script.complete(step + 1)])
    deadline = time.monotonic() + 60
    while len(sent) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(sent) > before

    may_go.set()
    dashboard.close()
    assert dashboard_threads() == []


def test_failures_of_a_front_end_are_counted_and_harmless(
    browser: FakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard = new_dashboard()
    dashboard.show()

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise OSError("the socket is closed")

    monkeypatch.setattr(widget.browser, "publish", refuse)
    dashboard.add_events(list(Script(20).events()))
    for thread in dashboard_threads():
        thread.join(timeout=10)

    assert dashboard.num_errors >= 1
    assert dashboard.snapshot().status == "finished"


def test_executed_notebook_saves_the_end_of_the_job() -> None:
    cells = [NOTEBOOK.format(repository=str(REPOSITORY)), "player.join(); board.settle()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])

    NotebookClient(notebook, timeout=60, kernel_name="python3", store_widget_state=False).execute()

    [output] = notebook.cells[0].outputs
    assert output.data[MIME]["snapshot"]["status"] == "finished"
    assert "finished, step 40 of 40" in output.data["text/plain"]
    assert "<img" in output.data["text/html"]
    assert len(str(output.data)) < 100_000
    assert notebook.cells[1].outputs == []


def test_a_view_gets_its_zoom_and_the_answer_to_its_request(
    browser: FakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(
        Dashboard, "_send_to_link", lambda self, content, buffers: sent.append(content)
    )

    def on_request(request: str, args: dict[str, Any]) -> str:
        if request == "pause":
            raise RuntimeError("no answer")
        return f"{request} {args['min']} to {args['max']}"

    dashboard = Dashboard(job_id=JOB_ID, on_request=on_request)
    dashboard.add_events(list(Script(num_steps=60).events()))
    receive = dashboard._receive_from_link
    receive({"kind": "hello", "view": "me"})
    receive({"kind": "detail", "view": "me", "first": 10, "last": 20})
    receive({"kind": "request", "view": "me", "request": "scale", "args": {"min": 1, "max": 3}})
    receive({"kind": "request", "view": "me", "request": "pause"})
    dashboard.close()

    answers = [message for message in sent if message["kind"] != "update"]
    assert [message["to"] for message in answers] == ["me", "me", "me"]
    assert {"name": "loss", "rows": 13} in answers[0]["blocks"]
    assert [(m["request"], m["level"], m["text"]) for m in answers[1:]] == [
        ("scale", "info", "scale 1 to 3"),
        ("pause", "error", "no answer"),
    ]
    assert [message["seq"] for message in sent] == list(range(1, len(sent) + 1))


def test_a_view_gets_the_exhibits_that_it_requests(
    browser: FakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[dict[str, Any], list[bytes]]] = []
    monkeypatch.setattr(
        Dashboard, "_send_to_link", lambda self, content, buffers: sent.append((content, buffers))
    )
    contents = {
        "picture": b"png",
        "report": "fine\x1b[2J\n",
        "worst": Table(("a\u202e", "b"), ((float("nan"), "x"), (None, True))),
    }

    def read(name: str, step: int) -> Content:
        if name not in contents:
            raise RunStoreError(f"{name} of step {step} does not exist")
        return contents[name]

    dashboard = Dashboard(job_id=JOB_ID, on_request=print, read_exhibit=read)
    for name in [*contents, "other", 7]:
        request = {"kind": "exhibit", "view": "me", "name": name, "step": 20}
        dashboard._receive_from_link(request)
    dashboard.close()

    common = {"kind": "exhibit", "to": "me", "step": 20}
    assert [{key: content[key] for key in common} for content, _ in sent] == [common] * 5
    assert [buffers for _, buffers in sent] == [[b"png"], [], [], [], []]
    picture, report, worst, other, invalid = (content for content, _ in sent)
    assert (picture["format"], picture["error"]) == ("png", "")
    assert report["text"] == "fine\\x1b[2J\n"
    assert worst["table"] == {"columns": ["a\\u202e", "b"], "rows": [["NaN", "x"], [None, True]]}
    assert other["error"] == "other of step 20 does not exist"
    assert invalid["error"] == "This exhibit is not available."


def evaluated(script: Script, *names: str) -> list[Any]:
    """Return the events of a job that has ended, with exhibits of step 20."""
    *running, ended = script.events()
    common: dict[str, Any] = {"format": "text", "size_bytes": 4, "digest": "0" * 64}
    stored = [script.make(t.ExhibitStored, step=20, name=name, **common) for name in names]
    return [*running, *stored, replace(ended, seq=stored[-1].seq + 1)]


def test_ended_job_is_displayed_with_its_exhibits(browser: FakeBrowser) -> None:
    def read(name: str, step: int) -> Content:
        if name == "gone":
            raise RunStoreError("it does not exist")
        return f"{name} of {step}"

    dashboard = Dashboard(job_id=JOB_ID, on_request=print, read_exhibit=read)
    dashboard.add_events(evaluated(Script(20), "gone", "report"))

    dashboard.show()

    (bundle, is_update), *_ = browser.published
    assert not is_update
    assert bundle[MIME]["exhibits"] == [
        {"name": "report", "step": 20, "format": "text", "text": "report of 20"}
    ]
    assert "<pre><code>report of 20</code></pre>" in bundle["text/html"]
    assert "does not contain 1 of the 2 exhibits" in bundle["text/html"]
    dashboard.close()


def test_slow_exhibits_are_added_after_the_job_is_displayed(
    browser: FakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widget, "EXHIBITS_S", 0.0)
    may_go = threading.Event()

    def read(name: str, step: int) -> Content:
        assert may_go.wait(60)
        return "read"

    dashboard = Dashboard(job_id=JOB_ID, on_request=print, read_exhibit=read)
    dashboard.add_events(evaluated(Script(20), "report"))
    dashboard.show()
    # Depending on the threads, an update without the exhibits has been published, too.
    assert browser.published
    assert not any(bundle[MIME]["exhibits"] for bundle, _ in browser.published)

    may_go.set()
    for thread in dashboard_threads():
        thread.join(60)

    bundle, is_update = browser.published[-1]
    assert is_update
    assert [one["text"] for one in bundle[MIME]["exhibits"]] == ["read"]
    dashboard.close()


def test_exhibits_of_a_running_job_are_saved_with_its_end(browser: FakeBrowser) -> None:
    dashboard = Dashboard(
        job_id=JOB_ID, on_request=print, read_exhibit=lambda name, step: f"{name} of {step}"
    )
    dashboard.show()
    dashboard.add_events(evaluated(Script(20), "report"))
    for thread in dashboard_threads():
        thread.join(60)

    bundle, _ = browser.published[-1]
    assert [one["name"] for one in bundle[MIME]["exhibits"]] == ["report"]
    assert bundle[MIME]["snapshot"]["status"] == "finished"


def test_importing_the_dashboard_loads_no_widget_library() -> None:
    code = (
        "import sys, etrain_jupyter.notebook.dashboard.widget; "
        "print([m for m in ('anywidget', 'ipywidgets', 'IPython', 'torch') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"
