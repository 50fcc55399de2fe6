"""Exhibits in the saved output of a job, and their HTML."""

from __future__ import annotations

import base64
import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.errors import RunStoreError
from etrain_jupyter.log.events import ExhibitStored
from etrain_jupyter.log.exhibits import Content, Table
from etrain_jupyter.notebook.dashboard import saved_exhibits
from etrain_jupyter.notebook.dashboard.html import render_exhibits
from etrain_jupyter.notebook.dashboard.saved_exhibits import (
    ExhibitCache,
    SavedExhibit,
    SavedExhibits,
    choose_saved,
)
from tests.unit.log.pictures import png

Stored = dict[int, dict[str, ExhibitStored]]


def event(step: int, name: str, size_bytes: int = 10, digest: str = "0") -> ExhibitStored:
    return ExhibitStored(
        **{"job_id": "job-1", "time": 1.0, "step": step, "name": name, "format": "text"},
        size_bytes=size_bytes,
        digest=digest,
    )


def stored(*events: ExhibitStored) -> Stored:
    found: Stored = {}
    for one in events:
        found.setdefault(one.step, {})[one.name] = one
    return found


def chosen(given: Stored, **limits: int) -> list[tuple[int, str]]:
    return [(one.step, one.name) for one in choose_saved(given, **limits)]


def saved(step: int, name: str, content: Content) -> SavedExhibit:
    return SavedExhibit(name=name, step=step, content=content)


def test_newest_of_each_name_comes_before_older_ones() -> None:
    given = stored(event(10, "a"), event(10, "b"), event(20, "a"), event(30, "c"), event(20, "c"))

    assert chosen(given) == [(30, "c"), (20, "a"), (10, "b"), (20, "c"), (10, "a")]
    assert chosen(given, max_bytes=30) == [(30, "c"), (20, "a"), (10, "b")]


def test_large_exhibit_does_not_displace_the_others() -> None:
    given = stored(event(20, "a", 31), event(20, "b"), event(10, "a"), event(10, "b"))

    assert chosen(given, max_bytes=30) == [(20, "b"), (10, "a"), (10, "b")]


def test_names_of_a_log_of_another_user_are_checked() -> None:
    assert chosen(stored(event(10, "../a"), event(10, "<b>"), event(10, "c", -5))) == []


@given(
    st.dictionaries(
        st.integers(0, 80),
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 100), max_size=3),
    ),
    st.integers(0, 300),
)
def test_chosen_exhibits_keep_both_limits(sizes: dict[int, dict[str, int]], limit: int) -> None:
    given = stored(*(event(step, n, size) for step, of in sizes.items() for n, size in of.items()))

    found = choose_saved(given, max_bytes=limit)

    assert sum(one.size_bytes for one in found) <= limit
    assert len(found) <= saved_exhibits.MAX_EXHIBITS
    assert len({(one.step, one.name) for one in found}) == len(found)
    newest = {
        name: max(s for s in sizes if name in sizes[s]) for of in sizes.values() for name in of
    }
    if sum(sizes[step][name] for name, step in newest.items()) <= limit:
        assert {(one.step, one.name) for one in found} >= {(s, n) for n, s in newest.items()}


def test_each_exhibit_is_read_once_and_again_after_it_was_replaced() -> None:
    read: list[tuple[str, int]] = []

    def load(name: str, step: int) -> Content:
        read.append((name, step))
        return f"{name} {len(read)}"

    cache, first = ExhibitCache(load), [event(10, "a"), event(20, "a")]
    assert cache.select(first) == ()
    assert cache.load(first)
    assert not cache.load(first)
    assert cache.is_complete(first)
    assert cache.select(first) == (saved(10, "a", "a 1"), saved(20, "a", "a 2"))

    again = [event(10, "a"), event(20, "a", digest="1")]
    assert cache.load(again)

    assert cache.select(again) == (saved(10, "a", "a 1"), saved(20, "a", "a 3"))
    assert cache.select(first) == (saved(10, "a", "a 1"),), "the replaced one is not kept"


@pytest.mark.parametrize("error", [RunStoreError("gone"), OSError("gone")])
def test_unreadable_exhibit_is_left_out_and_retried(error: Exception) -> None:
    failing = True

    def load(name: str, step: int) -> Content:
        if failing and name == "a":
            raise error
        return name

    cache, wanted = ExhibitCache(load), [event(10, "a"), event(10, "b")]
    assert cache.load(wanted)
    assert not cache.is_complete(wanted)
    assert cache.select(wanted) == (saved(10, "b", "b"),)

    failing = False
    assert cache.load(wanted)
    assert cache.is_complete(wanted)


def test_reading_ends_after_a_while_and_continues_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def load(name: str, step: int) -> Content:
        nonlocal now
        now += 4.0
        return name

    monkeypatch.setattr(saved_exhibits.time, "monotonic", lambda: now)
    cache, wanted = ExhibitCache(load), [event(10, name) for name in "abcde"]
    counts = []
    while not cache.is_complete(wanted):
        assert cache.load(wanted)
        counts.append(len(cache.select(wanted)))

    assert counts == [2, 4, 5]


def test_selecting_does_not_wait_for_a_read() -> None:
    is_reading, may_go = threading.Event(), threading.Event()

    def load(name: str, step: int) -> Content:
        is_reading.set()
        assert may_go.wait(60)
        return name

    cache, wanted = ExhibitCache(load), [event(10, "a")]
    thread = threading.Thread(target=cache.load, args=(wanted,))
    thread.start()
    assert is_reading.wait(60)

    assert cache.select(wanted) == ()

    may_go.set()
    thread.join(60)
    assert cache.select(wanted) == (saved(10, "a", "a"),)


def test_saved_exhibits_are_json() -> None:
    table = Table(("a", "b"), ((float("nan"), None),))

    def without_place(one: SavedExhibit) -> dict[str, Any]:
        values = one.to_json()
        assert (values.pop("name"), values.pop("step")) == ("x", 10)
        return values

    encoded = base64.b64encode(png()).decode()
    assert without_place(saved(10, "x", png())) == {"format": "png", "data": encoded}
    assert without_place(saved(10, "x", "a\x1b")) == {"format": "text", "text": "a\\x1b"}
    assert without_place(saved(10, "x", table)) == {
        "format": "table",
        "table": {"columns": ["a", "b"], "rows": [["NaN", None]]},
    }


def test_html_has_the_newest_exhibits_and_older_ones_folded() -> None:
    table = Table(("name", "loss"), (("a", 0.123456), (None, 3), (True, float("nan"))))
    exhibits = (
        saved(1200, "curve", png()),
        saved(1200, "report", "f1  0.5\n"),
        saved(600, "worst", table),
        saved(600, "curve", png(shade=9)),
        saved(600, "report", "older"),
    )

    html = render_exhibits(SavedExhibits(exhibits=exhibits, total=5), "job-1")

    titles = re.findall(r"<details( open)?><summary>([^<]*)</summary>", html)
    assert titles == [
        (" open", "curve, step 1,200"),
        (" open", "report, step 1,200"),
        (" open", "worst, step 600"),
        ("", "step 600: curve, report"),
    ]
    pictures = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]*)">', html)
    assert [alt for alt, _ in pictures] == ["curve at step 1,200", "curve at step 600"]
    assert base64.b64decode(pictures[1][1]) == png(shade=9)
    assert "<pre><code>f1  0.5\n</code></pre>" in html
    assert "<th>name</th><th>loss</th>" in html
    cells = re.findall(r"<td>([^<]*)</td>", html)
    assert cells == ["a", "0.1235", "", "3", "True", "nan"]
    assert "does not contain" not in html


def test_html_says_how_many_exhibits_are_left_out() -> None:
    exhibits = SavedExhibits(exhibits=(saved(10, "a", "x"),), total=1201)

    html = render_exhibits(exhibits, "job-1")

    assert "This output does not contain 1,200 of the 1,201 exhibits." in html
    assert "%etrain attach job-1<" in html
    assert render_exhibits(SavedExhibits(), "job-1") == ""


def test_long_exhibits_are_folded_at_first() -> None:
    long_table = Table(("n",), tuple((n,) for n in range(31)))
    exhibits = (saved(10, "a", "x\n" * 31), saved(10, "b", long_table))

    html = render_exhibits(SavedExhibits(exhibits=exhibits, total=2), "job-1")

    assert "<details open>" not in html


def test_exhibits_are_text_never_markup() -> None:
    hostile = "<img src=x onerror=alert(1)>\u202e"
    table = Table((hostile,), ((hostile,),))
    exhibits = (saved(10, "a", hostile), saved(10, "b", table))

    html = render_exhibits(SavedExhibits(exhibits=exhibits, total=9), "x\n!rm<b>")

    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;\\u202e") == 3
    assert "%etrain attach JOB<" in html
