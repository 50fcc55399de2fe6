"""The faster ``replace`` equals that of ``dataclasses`` for every class of the membership rules."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest

from etrain_jupyter.rules import membership as package
from etrain_jupyter.rules.membership.members import Member
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.rules.membership.replacing import replace


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
