from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from etrain_jupyter.log import events as t
from etrain_jupyter.notebook.dashboard import link as link_module
from etrain_jupyter.notebook.dashboard import side_panel, widget
from etrain_jupyter.notebook.dashboard.job_view import JobView
from etrain_jupyter.notebook.dashboard.link import PanelComm
from etrain_jupyter.notebook.dashboard.side_panel import (
    MAX_CURVE_POINTS,
    OtherJobs,
    SidePanel,
    row_of,
)
from etrain_jupyter.notebook.dashboard.widget import Dashboard
from tests.unit.notebook.dashboard.scripted_job import Script

PATIENCE_S = 30.0


class Wire:
    """Stands for the browsers."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._came = threading.Condition()

    def post(self, content: dict[str, Any]) -> None:
        with self._came:
            self.messages.append(json.loads(json.dumps(content)))
            self._came.notify_all()

    def wait_for(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the newest message that is it."""
        with self._came:
            came = self._came.wait_for(lambda: any(map(is_it, self.messages)), PATIENCE_S)
            assert came, self.messages
            return next(message for message in reversed(self.messages) if is_it(message))


class Job:
    """A job with a row of one fact."""

    def __init__(self, name: str) -> None:
        self.name, self.step = name, 0

    def version(self) -> int:
        return self.step

    def row(self) -> dict[str, Any]:
        return {"snapshot": {"job_id": self.name, "step": self.step}}


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def panel(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Iterator[SidePanel]:
    monkeypatch.setattr(side_panel, "ROWS_EVERY_S", 0.01)
    panel = SidePanel(wire.post)
    yield panel
    end(panel)


def end(panel: SidePanel) -> None:
    """Let the watch run out, and wait for the threads."""
    panel._watched_until = float("-inf")
    panel.wake()
    for thread in list(panel._threads.values()):
        thread.join(PATIENCE_S)
    assert panel._threads == {}


def ids_of(message: dict[str, Any]) -> list[str]:
    return [row["snapshot"]["job_id"] for row in message.get("rows", [])]


def test_without_a_watch_nothing_is_sent_and_no_thread_runs(panel: SidePanel, wire: Wire) -> None:
    panel.add("a", Job("a"))
    panel.wake()

    assert wire.messages == []
    assert panel._threads == {}


def test_watch_receives_all_jobs_and_then_those_that_changed(panel: SidePanel, wire: Wire) -> None:
    jobs = {name: Job(name) for name in "ab"}
    for name, job in jobs.items():
        panel.add(name, job)
    panel.receive({"ask": "watch"})
    first = wire.wait_for(lambda m: m["tell"] == "jobs")

    jobs["b"].step = 7
    panel.wake()
    second = wire.wait_for(lambda m: not m["whole"])
    panel.remove("a", jobs["a"])
    third = wire.wait_for(lambda m: m["gone"] == ["a"])

    assert (first["whole"], ids_of(first)) == (True, ["a", "b"])
    assert second["rows"] == [{"snapshot": {"job_id": "b", "step": 7}}]
    assert "pools" not in second
    assert third["rows"] == []


def test_changed_studies_are_sent_and_a_watch_receives_all(panel: SidePanel, wire: Wire) -> None:
    panel.receive({"ask": "watch"})
    first = wire.wait_for(lambda m: m["whole"])
    panel.put_study("s", {"study_id": "s", "num_begun": 1})
    panel.put_study("t", {"study_id": "t"})
    panel.put_study("s", {"study_id": "s", "num_begun": 2})

    def has_both(message: dict[str, Any]) -> bool:
        return [study["study_id"] for study in message.get("studies", ())] == ["t", "s"]

    second = wire.wait_for(has_both)
    wire.messages.clear()
    panel.receive({"ask": "watch"})

    assert first["studies"] == []
    assert second["studies"][1]["num_begun"] == 2
    assert not second["whole"]
    assert has_both(wire.wait_for(lambda m: m["whole"]))


def test_panel_lists_a_limited_number_of_studies(panel: SidePanel, wire: Wire) -> None:
    for number in range(side_panel.MAX_STUDIES + 3):
        panel.put_study(f"s{number}", {"study_id": f"s{number}"})

    panel.receive({"ask": "watch"})

    studies = wire.wait_for(lambda m: m["whole"])["studies"]
    assert [study["study_id"] for study in studies] == [
        f"s{number}" for number in range(3, side_panel.MAX_STUDIES + 3)
    ]


def test_second_watch_receives_everything_again(panel: SidePanel, wire: Wire) -> None:
    panel.add("a", Job("a"))
    panel.receive({"ask": "watch"})
    wire.wait_for(lambda m: ids_of(m) == ["a"])
    wire.messages.clear()

    panel.receive({"ask": "watch"})

    assert ids_of(wire.wait_for(lambda m: m["whole"])) == ["a"]


def test_job_shown_by_another_dashboard_is_sent_again(panel: SidePanel, wire: Wire) -> None:
    panel.add("a", Job("a"))
    panel.receive({"ask": "watch"})
    wire.wait_for(lambda m: ids_of(m) == ["a"])

    panel.add("a", Job("a"))

    wire.wait_for(lambda m: ids_of(m) == ["a"] and not m["whole"])


def test_scan_runs_once_and_on_request(panel: SidePanel, wire: Wire) -> None:
    asked: list[tuple[tuple[str, ...], bool]] = []
    looked = threading.Event()

    def look(job_ids: Collection[str], is_asked: bool) -> OtherJobs:
        asked.append((tuple(job_ids), is_asked))
        looked.set()
        if is_asked:
            return OtherJobs(others=None, pools=({"cluster_id": "c", "workers": 2},))
        return OtherJobs(others=({"job_id": "x"},))

    panel.add("a", Job("a"))
    panel.serve(look=look, attach=lambda job_id: "", template=lambda: "", compare="".join)
    panel.receive({"ask": "watch"})
    wire.wait_for(lambda m: m.get("others") == [{"job_id": "x"}])
    panel.receive({"ask": "watch"})
    panel.receive({"ask": "look"})
    told = wire.wait_for(lambda m: bool(m.get("pools")))

    assert asked == [(("a",), False), (("a",), True)]
    assert told["others"] == [{"job_id": "x"}], "what was not looked for holds"


def test_failed_scan_is_counted_and_does_not_stop_the_rows(panel: SidePanel, wire: Wire) -> None:
    def look(job_ids: Collection[str], is_asked: bool) -> OtherJobs:
        raise OSError("the disk is gone")

    job = Job("a")
    panel.add("a", job)
    panel.serve(look=look, attach=lambda job_id: "", template=lambda: "", compare="".join)
    panel.receive({"ask": "watch"})
    wire.wait_for(lambda m: ids_of(m) == ["a"])
    job.step = 1
    panel.wake()
    wire.wait_for(lambda m: bool(m["rows"]) and m["rows"][0]["snapshot"]["step"] == 1)
    end(panel)

    assert panel.num_errors == 1


def test_answer_is_addressed_to_the_view_that_asked(panel: SidePanel, wire: Wire) -> None:
    def attach(job_id: str) -> str:
        raise ValueError(f"there is no job {job_id}")

    panel.receive({"ask": "template", "view": "v0"})
    panel.serve(
        look=lambda ids, is_asked: OtherJobs(),
        attach=attach,
        template=lambda: "body",
        compare=lambda job_ids: f"page of {job_ids}",
    )
    panel.receive({"ask": "template", "view": "v1"})
    panel.receive({"ask": "attach", "job_id": "x", "view": "v2"})
    panel.receive({"ask": "compare", "job_ids": ["a", 3], "view": "v3"})
    panel.receive({"ask": "compare", "job_ids": "a", "view": "v4"})

    unserved, template, attached, compared, invalid = wire.messages
    assert unserved["level"] == "error"
    assert "%load_ext etrain_jupyter" in unserved["text"]
    assert template == {"tell": "answer", "to": "v1", "level": "info", "text": "body"}
    assert (attached["to"], attached["level"]) == ("v2", "error")
    assert attached["text"] == "there is no job x"
    assert (compared["to"], compared["text"]) == ("v3", "page of ['a', '3']")
    assert invalid["text"] == "page of []"


def test_row_has_no_lists_and_a_short_curve_of_valid_json_values() -> None:
    view = JobView("digits-7f3a")
    script = Script(400)
    view.add(script.events())
    view.add([script.make(t.UserErrorRaised, error="boom", traceback="x" * 9000, workers=["w0"])])
    [last] = [event for event in script.complete(401) if isinstance(event, t.StepCompleted)]
    view.add([dataclasses.replace(last, loss=float("nan"))])

    row = row_of(view)

    assert len(json.dumps(row, allow_nan=False)) < 6000
    assert {"workers", "events", "markers"} & row["snapshot"].keys() == set()
    assert 20 < len(row["loss"]["x"]) == len(row["loss"]["y"]) <= MAX_CURVE_POINTS
    assert row["snapshot"]["step"] == 401


def test_job_without_events_has_a_row() -> None:
    row = row_of(JobView("digits-7f3a"))

    assert row["snapshot"]["status"] == "submitted"
    assert row["loss"] == {"x": [], "y": []}


class FakeComm:
    """A comm whose other end is this test."""

    def __init__(self, target_name: str) -> None:
        self.target_name = target_name
        self.wire = Wire()

    def send(self, content: dict[str, Any], buffers: Any = None) -> None:
        self.wire.post(content)

    def on_msg(self, hear: Callable[[dict[str, Any]], None]) -> None:
        self.hear = hear

    def on_close(self, hear: Callable[[dict[str, Any]], None]) -> None:
        self.close = hear

    def bring(self, content: dict[str, Any]) -> None:
        self.hear({"content": {"data": content}})


@pytest.fixture
def comms(monkeypatch: pytest.MonkeyPatch) -> list[FakeComm]:
    """What was opened; a front end is there."""
    import comm

    opened: list[FakeComm] = []

    def create(target_name: str) -> FakeComm:
        opened.append(FakeComm(target_name))
        return opened[-1]

    monkeypatch.setattr(comm, "create_comm", create)
    monkeypatch.setattr(widget.browser, "has_front_end", lambda: True)
    return opened


def test_one_comm_serves_jobs_and_panel_and_is_opened_once(
    comms: list[FakeComm], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PanelComm()
    monkeypatch.setattr(widget, "link", lambda: made)
    monkeypatch.setattr(side_panel, "ROWS_EVERY_S", 0.01)
    asked: list[tuple[str, dict[str, Any]]] = []
    board = Dashboard(
        job_id="digits-7f3a", on_request=lambda name, args: asked.append((name, args))
    )
    made.open()
    board.follow()
    board.add_events(list(Script(20).events()))
    [comm] = comms

    comm.bring({"kind": "session", "ask": "watch"})
    comm.bring(
        {"kind": "request", "job_id": "digits-7f3a", "request": "stop", "args": {}, "view": "me"}
    )
    comm.bring({"kind": "hello", "job_id": "nobody", "view": "me"})
    rows = comm.wire.wait_for(lambda m: m["kind"] == "session")
    end(made.panel)
    board.close()

    assert comm.target_name == link_module.LINK_TARGET
    assert rows["rows"][0]["snapshot"]["step"] == 20
    assert asked == [("stop", {})]
    [notice] = [m for m in comm.wire.messages if m["kind"] == "notice"]
    assert (notice["to"], notice["level"]) == ("me", "info")
    assert {"kind": "unknown", "job_id": "nobody", "to": "me"} in comm.wire.messages
    assert made.panel._jobs == {}


def test_comm_that_a_front_end_closed_is_opened_again_by_the_next_job(
    comms: list[FakeComm], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PanelComm()
    monkeypatch.setattr(widget, "link", lambda: made)
    made.open()
    comms[0].close({})

    Dashboard(job_id="digits-7f3a", on_request=print).follow()

    assert len(comms) == 2


def test_the_oldest_of_too_many_jobs_is_removed(
    comms: list[FakeComm], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PanelComm()
    monkeypatch.setattr(widget, "link", lambda: made)
    monkeypatch.setattr(link_module, "MAX_LINKED_JOBS", 2)

    for name in ("a-1", "b-1", "c-1"):
        Dashboard(job_id=name, on_request=print).follow()

    assert list(made.panel._jobs) == ["b-1", "c-1"]
