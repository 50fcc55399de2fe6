"""Counts of members equal what the members themselves show, after any changes."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules import membership as package
from etrain_jupyter.rules.membership.members import Member, MemberPhase, Members, replace
from etrain_jupyter.rules.membership.membership import JobState

PHASES: tuple[MemberPhase, ...] = ("starting", "warm", "ranked", "reported")

CHANGES = st.fixed_dictionaries(
    {
        "order": st.integers(1, 5),
        "phase": st.sampled_from(PHASES),
        "leaving": st.sampled_from(["", "preempted"]),
        "killed_at": st.sampled_from([0.0, 7.0]),
        "formed": st.booleans(),
        "is_removed": st.booleans(),
    }
)


@given(st.lists(CHANGES, max_size=20))
def test_counts_and_order_match_the_members(changes):
    members, expected = Members(), {}
    for change in changes:
        order = change.pop("order")
        name, worker = f"j/w/{order}", f"w{order % 3}"  # two trainers of a worker, for a moment
        if change.pop("is_removed"):
            members = members.without(name)
            expected.pop(name, None)
            continue
        old = expected.get(name, Member(trainer=name, worker=worker, order=order))
        expected[name] = replace(old, **change)
        members = members.with_member(expected[name])
    ordered = sorted(expected.values(), key=lambda m: m.order)
    assert list(members.values()) == ordered
    for phase in PHASES:
        assert members.in_phase(phase) == [m for m in ordered if m.phase == phase]
        assert members.num_in(phase) == len(members.in_phase(phase))
    assert members.num_leaving == sum(bool(m.leaving) for m in ordered)
    assert members.num_killed == sum(bool(m.killed_at) for m in ordered)
    ranks = members.in_phase("ranked", "reported")
    assert members.num_formed == sum(m.formed for m in ranks)
    for worker in ("w0", "w1", "w2", "unknown"):
        oldest = next((m for m in ordered if m.worker == worker), None)
        assert members.of_worker(worker) == oldest


def test_change_leaves_the_previous_members_as_they_were():
    before = Members().with_member(Member(trainer="a", worker="w1", order=1))
    after = before.with_member(replace(before["a"], phase="ranked")).without("a")
    assert (before.num_in("starting"), before.of_worker("w1")) == (1, before["a"])
    assert (len(after), after.of_worker("w1")) == (0, None)


def classes() -> list[type]:
    found = set()
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value):
                found.add(value)
    return sorted(found, key=lambda one: one.__qualname__)


@pytest.mark.parametrize("one", classes(), ids=lambda one: one.__qualname__)
def test_classes_can_be_copied_without_their_initializers(one: type) -> None:
    assert not hasattr(one, "__slots__")
    assert not hasattr(one, "__post_init__")


def test_copy_equals_that_of_dataclasses_and_leaves_the_original() -> None:
    member = Member(trainer="j/w1/1", worker="w1", order=3)
    changed = replace(member, phase="warm", since=4.0)
    assert changed == dataclasses.replace(member, phase="warm", since=4.0)
    assert (member.phase, member.since) == ("starting", 0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.since = 5.0

    state = JobState(job_id="j", min_workers=1, max_workers=4)
    assert replace(state, step=3) == dataclasses.replace(state, step=3)
    assert replace(state) == state


def test_unknown_field_is_an_error() -> None:
    member = Member(trainer="j/w1/1", worker="w1", order=3)
    with pytest.raises(TypeError, match="Member has no field rnak"):
        replace(member, rnak=3)
