"""Printed lines in memory: a bounded number of texts (review R9)."""

from __future__ import annotations

from pathlib import Path

from etrain_jupyter.log.blocks import FORGOTTEN, Events, runs_of
from etrain_jupyter.log.events import Event, LogLine, StepCompleted
from etrain_jupyter.notebook.job import feed as feed_module
from etrain_jupyter.notebook.job.feed import EventFeed
from tests.unit.log.spent import PLAIN_STEP


def printed(seq: int) -> Event:
    values = {"level": "info", "worker": "w1", "text": f"line {seq}"}
    return LogLine(job_id="j", time=float(seq), seq=seq, **values)


def step(seq: int) -> Event:
    return StepCompleted(
        **{"job_id": "j", "time": float(seq), "seq": seq, "step": seq, "epoch": 0, "first": 0},
        **{"samples": 1, "sample_checksum": 1, "loss": 1.0, "lr": 0.1, "world_size": 1},
        samples_per_s=1.0,
        **PLAIN_STEP,
    )


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


def test_feed_drops_the_text_of_old_log_lines(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Events, "PACK_AT", 40)
    monkeypatch.setattr(feed_module, "KEEP_LINES", 50)
    feed = EventFeed("j", tmp_path / "none", None, fold=lambda events: None)
    for first in range(1, 2000, 10):
        feed._take([printed(seq) for seq in range(first, first + 10)])
    kept = [event for event in feed.events() if event.text != FORGOTTEN]
    assert len(feed.events()) == 2000
    assert len(kept) <= 50 + 3 * 40
