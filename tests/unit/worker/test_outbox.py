"""The reports that a supervisor keeps for a new coordinator."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.wire.codec import Encoded
from etrain_jupyter.worker.outbox import Outbox


def numbers(outbox: Outbox) -> list[int]:
    return [report["number"] for report in outbox.unacknowledged()]


def steps(count: int) -> Encoded:
    return {"kind": "StepsTrained", "records": [{}] * count}


@given(count=st.integers(1, 9), acknowledged=st.lists(st.integers(0, 12), max_size=4))
def test_exactly_the_acknowledged_reports_are_dropped(count: int, acknowledged: list[int]) -> None:
    outbox = Outbox()
    for _ in range(count):
        outbox.put(steps(1), trainer="t-1")
    for number in acknowledged:  # acknowledgements may be repeated or arrive out of order
        outbox.acknowledge(number)

    assert numbers(outbox) == list(range(max(acknowledged, default=0) + 1, count + 1))
    assert outbox.newest == count


def test_many_records_fill_the_outbox_and_their_acknowledgement_empties_it() -> None:
    outbox = Outbox(most=10, most_records=100)
    outbox.put(steps(99), trainer="t-1")
    assert not outbox.is_full
    outbox.put(steps(1), trainer="t-1")
    assert outbox.is_full

    outbox.acknowledge(1)
    assert not outbox.is_full
    assert numbers(outbox) == [2]


def test_many_reports_fill_the_outbox() -> None:
    outbox = Outbox(most=2, most_records=100)
    outbox.put(steps(0), trainer="t-1")
    assert not outbox.is_full
    outbox.put(steps(0), trainer="t-2")
    assert outbox.is_full


def test_large_exhibits_fill_the_outbox_and_their_acknowledgement_empties_it() -> None:
    outbox = Outbox(most_bytes=100)
    outbox.put({"kind": "ExhibitFound", "data": bytes(99)}, trainer="t-1")
    outbox.put({"kind": "ExhibitFound", "data": "invalid"}, trainer="t-1")
    assert not outbox.is_full
    outbox.put({"kind": "ExhibitFound", "data": bytes(1)}, trainer="t-1")
    assert outbox.is_full

    outbox.acknowledge(1)
    assert not outbox.is_full
