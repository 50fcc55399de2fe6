"""Printed lines in memory: a bounded number of texts (review R9)."""

from __future__ import annotations

from etrain_jupyter.log.blocks import FORGOTTEN, Events, runs_of
from etrain_jupyter.log.events import Event, LogLine, StepCompleted
from etrain_jupyter.notebook.job import known_events
from tests.unit.log.spent import made


def printed(seq: int) -> Event:
    values = {"level": "info", "worker": "w1", "text": f"line {seq}"}
    return LogLine(job_id="j", time=float(seq), seq=seq, **values)


def step(seq: int) -> Event:
    return made(StepCompleted, job_id="j", time=float(seq), seq=seq, step=seq)


def test_old_log_lines_lose_only_their_text(monkeypatch) -> None:
    monkeypatch.setattr(Events, "PACK_AT", 40)
    known = [step(n) if n % 10 == 0 else printed(n) for n in range(1, 401)]
    events = Events(known)
    events.forget_lines(keep=100)

    found = list(events)
    assert [event.seq for event in found] == list(range(1, 401))
    assert [event.kind for event in found] == [event.kind for event in known]
    texts = [event.text for event in found if isinstance(event, LogLine)]
    num_kept = sum(text != FORGOTTEN for text in texts)
    assert texts[-num_kept:] == [e.text for e in known if isinstance(e, LogLine)][-num_kept:]
    assert 100 <= num_kept <= 100 + 2 * 40 + 36
    assert [event for event in found if isinstance(event, StepCompleted)] == [
        event for event in known if isinstance(event, StepCompleted)
    ]
    assert events.is_dense_from(1)
    assert [getattr(item, "seq", None) for item in runs_of(events)] == list(range(1, 401))
    assert events[4].text == FORGOTTEN
    again = events.copy()
    again.forget_lines(keep=100)
    assert list(again) == found


def test_feed_drops_the_text_of_old_log_lines(monkeypatch) -> None:
    monkeypatch.setattr(Events, "PACK_AT", 40)
    monkeypatch.setattr(known_events, "KEEP_LINES", 50)
    feed = known_events.KnownEvents("j", fold=lambda events: None)
    for first in range(1, 2000, 10):
        feed.take([printed(seq) for seq in range(first, first + 10)])
    kept = [event for event in feed.events if event.text != FORGOTTEN]
    assert len(feed.events) == 2000
    assert len(kept) <= 50 + 3 * 40
