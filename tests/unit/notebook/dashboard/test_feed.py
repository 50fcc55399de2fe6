from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from etrain_jupyter.log import events as t
from etrain_jupyter.notebook.dashboard.feed import LISTS, ViewFeed
from etrain_jupyter.notebook.dashboard.job_view import JobView
from tests.unit.notebook.dashboard.scripted_job import JOB_ID, Script


class Wire:
    """What went through a channel, and the loss as a view would have it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.loss: list[float] = []
        self.picture: dict[str, Any] = {}

    def send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self.messages.append(json.loads(json.dumps(content)))
        if content.get("reset"):
            self.loss, self.picture = [], content["snapshot"]
        elif content["kind"] == "update":
            self.picture = put_together(self.picture, content)
        self.curves: dict[str, list[float]] = {}
        for block, buffer in zip(content.get("blocks", []), buffers, strict=True):
            steps = np.frombuffer(buffer, np.float64, block["rows"]).tolist()
            self.curves[block["name"]] = steps
            if block["name"] == "loss" and content["kind"] == "update":
                self.loss += steps


def put_together(picture: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """What the front end does, see ``patched`` in protocol.ts."""
    picture = picture | content["snapshot"]
    for name, patch in content["lists"].items():
        rows = {row[LISTS[name]]: row for row in picture[name]}
        for row in patch.get("rows", []):
            rows[row[LISTS[name]]] = rows.get(row[LISTS[name]], {}) | row
        rows = {key: row for key, row in rows.items() if key not in patch.get("gone", [])}
        picture[name] = [rows[key] for key in patch.get("order", rows)]
    return picture


def some_steps(script: Script, first: int, last: int) -> list[t.Event]:
    return [event for step in range(first, last + 1) for event in script.complete(step)]


def test_channel_without_a_view_sends_nothing() -> None:
    wire, view, script = Wire(), JobView(JOB_ID), Script()
    feed = ViewFeed(wire.send)

    view.add(some_steps(script, 1, 3))
    feed.flush(view)

    assert wire.messages == []


def test_request_without_a_view_is_answered() -> None:
    wire = Wire()

    ViewFeed(wire.send).post({"kind": "notice", "to": "the palette"})

    assert wire.messages == [{"kind": "notice", "to": "the palette", "seq": 1}]


def test_after_a_hello_only_changes_are_sent() -> None:
    wire, view, script = Wire(), JobView(JOB_ID), Script()
    feed = ViewFeed(wire.send)
    view.add(some_steps(script, 1, 3))

    feed.greet(view, "me")
    view.add(some_steps(script, 4, 5))
    feed.flush(view)

    assert [message["seq"] for message in wire.messages] == [1, 2]
    assert wire.messages[0]["reset"]
    assert wire.messages[1]["blocks"][0] == {"name": "loss", "rows": 2}
    assert wire.messages[1]["lists"] == {}
    assert "name" not in wire.messages[1]["snapshot"]
    assert wire.loss == [1, 2, 3, 4, 5]


def test_second_hello_first_updates_the_other_views() -> None:
    wire, view, script = Wire(), JobView(JOB_ID), Script()
    feed = ViewFeed(wire.send)
    feed.greet(view, "first")
    view.add(some_steps(script, 1, 2))

    feed.greet(view, "second")
    feed.flush(view)

    assert [message["to"] for message in wire.messages] == ["first", "", "second", ""]
    assert wire.messages[3]["blocks"] == []


def test_rewind_resets_every_view() -> None:
    wire, view, script = Wire(), JobView(JOB_ID), Script()
    feed = ViewFeed(wire.send)
    view.add(some_steps(script, 1, 9))
    feed.greet(view, "me")

    view.add(some_steps(script, 5, 6))
    feed.flush(view)

    assert wire.messages[-1]["reset"]
    assert wire.messages[-1]["to"] == ""
    assert wire.loss == [1, 2, 3, 4, 5, 6]


def test_reset_thins_a_million_points() -> None:
    wire, view = Wire(), JobView(JOB_ID)
    view.add(some_steps(Script(num_steps=10_000), 1, 10_000))

    ViewFeed(wire.send).greet(view, "me")

    rows = {block["name"]: block["rows"] for block in wire.messages[0]["blocks"]}
    assert 3000 < rows["loss"] <= 4002
    assert rows["mean.loss"] <= 2000
    assert rows["mean.metrics.accuracy"] <= 2000
    assert "mean.eval.loss" not in rows


def test_zoom_receives_the_points_between_two_steps_and_one_beyond_each() -> None:
    wire, view = Wire(), JobView(JOB_ID)
    view.add(some_steps(Script(num_steps=10_000), 1, 10_000))
    feed = ViewFeed(wire.send)
    feed.greet(view, "me")

    feed.detail(view, "me", 5001, 5003)

    message = wire.messages[-1]
    assert (message["kind"], message["seq"], message["to"]) == ("detail", 2, "me")
    assert (message["first"], message["last"]) == (5001, 5003)
    assert wire.curves["loss"] == [5000, 5001, 5002, 5003, 5004]
    assert wire.curves["elapsed_s"] == [5000, 5001, 5002, 5003, 5004]
    assert wire.curves["eval.loss"] == [5000, 5200]
    assert not [name for name in wire.curves if name.startswith("time.")]


def test_a_zoom_to_very_many_points_is_thinned_too() -> None:
    wire, view = Wire(), JobView(JOB_ID)
    view.add(some_steps(Script(num_steps=10_000), 1, 10_000))

    ViewFeed(wire.send).detail(view, "me", 1000, 9000)

    assert 3000 < len(wire.curves["loss"]) <= 4002
    assert 1000 < len(wire.curves["mean.loss"]) <= 2000


@pytest.mark.parametrize("batch", [1, 7])
def test_changes_add_up_to_the_whole_snapshot(batch: int) -> None:
    wire, view = Wire(), JobView(JOB_ID)
    feed = ViewFeed(wire.send)
    feed.greet(view, "me")
    script = Script(num_steps=300)
    events = list(script.events())
    for number in range(200):  # more than the list holds
        events += script.lose(script.ranks[-1]) if number % 40 == 0 else []
        events += script.grow([f"w{number}"]) if number % 40 == 20 else []
        events.append(script.make(t.LogLine, level="info", worker="w0", text=f"line {number}"))

    for start in range(0, len(events), batch):
        view.add(events[start : start + batch])
        feed.flush(view)
        assert wire.picture == view.snapshot().to_json()

    assert len(wire.picture["events"]) == len(view.snapshot().events) > 100


def test_changes_of_many_workers_and_events_are_small() -> None:
    wire, view, script = Wire(), JobView(JOB_ID), Script()
    names = [f"w{number}" for number in range(200)]
    view.add([script.make(t.WorkerJoined, worker=name) for name in names])
    view.add(list(script.form(names, "start")))
    for number in range(20_000):
        line = {"level": "info", "worker": names[number % 200], "text": f"line {number}"}
        view.add([script.make(t.LogLine, **line)])
    feed = ViewFeed(wire.send)
    feed.greet(view, "me")

    view.add([*some_steps(script, 1, 1), script.make(t.LogLine, **line)])
    feed.flush(view)

    whole, news = (len(json.dumps(message)) for message in wire.messages)
    assert whole < 150_000
    assert news < 10_000
    assert wire.picture == view.snapshot().to_json()


def test_lost_message_leaves_a_gap_that_a_hello_closes() -> None:
    wire, view, script = Wire(), JobView(JOB_ID), Script()
    is_broken = False

    def send(content: dict[str, Any], buffers: list[bytes]) -> None:
        if is_broken:
            raise OSError("the socket is closed")
        wire.send(content, buffers)

    feed = ViewFeed(send)
    feed.greet(view, "me")
    view.add(some_steps(script, 1, 2))
    is_broken = True
    with pytest.raises(OSError, match="closed"):
        feed.flush(view)
    is_broken = False
    view.add(some_steps(script, 3, 4))
    feed.flush(view)
    assert [message["seq"] for message in wire.messages] == [1, 3], "the view sees the gap"

    feed.greet(view, "me")

    assert wire.loss == [1, 2, 3, 4]
    assert wire.picture == view.snapshot().to_json()
