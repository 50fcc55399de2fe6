from __future__ import annotations

from typing import Any

import numpy as np

from etrain_jupyter.dashboard.feed import Feed
from etrain_jupyter.dashboard.snapshot import JobView
from etrain_jupyter.events import types as t
from tests.unit.dashboard.scripted_job import JOB_ID, Script


class Wire:
    """What went through a channel, and the loss as a view would have it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.loss: list[float] = []

    def send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self.messages.append(content)
        if content.get("reset"):
            self.loss = []
        self.curves: dict[str, list[float]] = {}
        for block, buffer in zip(content.get("blocks", []), buffers, strict=True):
            steps = np.frombuffer(buffer, np.float64, block["rows"]).tolist()
            self.curves[block["name"]] = steps
            if block["name"] == "loss" and content["kind"] == "update":
                self.loss += steps


def some_steps(script: Script, first: int, last: int) -> list[t.Event]:
    return [event for step in range(first, last + 1) for event in script.complete(step)]


def test_a_channel_that_nobody_listens_to_brings_no_news() -> None:
    wire, view, script = Wire(), JobView(JOB_ID), Script()
    feed = Feed(wire.send)

    view.add(some_steps(script, 1, 3))
    feed.flush(view)

    assert wire.messages == []


def test_who_asks_without_a_view_is_answered_all_the_same() -> None:
    wire = Wire()

    Feed(wire.send).say({"kind": "notice", "to": "the palette"})

    assert wire.messages == [{"kind": "notice", "to": "the palette", "seq": 1}]


def test_after_a_hello_only_news_is_sent() -> None:
    wire, view, script = Wire(), JobView(JOB_ID), Script()
    feed = Feed(wire.send)
    view.add(some_steps(script, 1, 3))

    feed.greet(view, "me")
    view.add(some_steps(script, 4, 5))
    feed.flush(view)

    assert [message["seq"] for message in wire.messages] == [1, 2]
    assert wire.messages[0]["reset"]
    assert wire.messages[1]["blocks"][0] == {"name": "loss", "rows": 2}
    assert "events" not in wire.messages[1]["snapshot"]
    assert wire.loss == [1, 2, 3, 4, 5]


def test_a_second_hello_first_brings_the_others_up_to_date() -> None:
    wire, view, script = Wire(), JobView(JOB_ID), Script()
    feed = Feed(wire.send)
    feed.greet(view, "first")
    view.add(some_steps(script, 1, 2))

    feed.greet(view, "second")
    feed.flush(view)

    assert [message["to"] for message in wire.messages] == ["first", "", "second", ""]
    assert wire.messages[3]["blocks"] == []


def test_a_rewind_starts_every_view_anew() -> None:
    wire, view, script = Wire(), JobView(JOB_ID), Script()
    feed = Feed(wire.send)
    view.add(some_steps(script, 1, 9))
    feed.greet(view, "me")

    view.add(some_steps(script, 5, 6))
    feed.flush(view)

    assert wire.messages[-1]["reset"]
    assert wire.messages[-1]["to"] == ""
    assert wire.loss == [1, 2, 3, 4, 5, 6]


def test_a_million_points_are_thinned_for_a_newcomer() -> None:
    wire, view = Wire(), JobView(JOB_ID)
    view.add(some_steps(Script(num_steps=10_000), 1, 10_000))

    Feed(wire.send).greet(view, "me")

    rows = {block["name"]: block["rows"] for block in wire.messages[0]["blocks"]}
    assert 3000 < rows["loss"] <= 4002
    assert rows["mean.loss"] <= 2000
    assert rows["mean.metrics.accuracy"] <= 2000
    assert "mean.eval.loss" not in rows


def test_a_view_that_zooms_gets_the_points_between_two_steps_and_one_beyond_each() -> None:
    wire, view = Wire(), JobView(JOB_ID)
    view.add(some_steps(Script(num_steps=10_000), 1, 10_000))
    feed = Feed(wire.send)
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

    Feed(wire.send).detail(view, "me", 1000, 9000)

    assert 3000 < len(wire.curves["loss"]) <= 4002
    assert 1000 < len(wire.curves["mean.loss"]) <= 2000
