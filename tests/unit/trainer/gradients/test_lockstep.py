"""Tasks that run one at a time and meet in rounds."""

from __future__ import annotations

import functools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.trainer.gradients.lockstep import Lockstep


def nothing() -> None:
    pass


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_tasks_take_turns_in_their_order_and_share_each_round(num_meetings: list[int]) -> None:
    lockstep = Lockstep(len(num_meetings), save=lambda: nothing, set_up=nothing)
    seen: list[tuple[int, int]] = []
    firsts: list[tuple[int, int]] = []

    def task(number: int) -> None:
        for meeting in range(num_meetings[number]):
            seen.append((meeting, number))
            total = lockstep.meet((number, meeting), list)
            expected = [(n, meeting) for n, count in enumerate(num_meetings) if count > meeting]
            assert total == expected
            if lockstep.is_first:
                firsts.append((meeting, number))

    try:
        lockstep.run([functools.partial(task, number) for number in range(len(num_meetings))])
    finally:
        lockstep.close()

    assert seen == sorted(seen)
    assert len(seen) == sum(num_meetings)
    expected = [
        (m, min(n for n, count in enumerate(num_meetings) if count > m))
        for m in range(max(num_meetings))
    ]
    assert firsts == expected


def test_state_is_that_of_the_running_task() -> None:
    current = ["calm"]

    def save() -> object:
        kept = current[0]
        return lambda: current.__setitem__(0, kept)

    lockstep = Lockstep(3, save=save, set_up=nothing)  # type: ignore[arg-type]

    def task(name: str) -> None:
        current[0] = name
        for _ in range(4):
            lockstep.meet(None, len)
            assert current[0] == name

    try:
        lockstep.run([functools.partial(task, name) for name in "abc"])
    finally:
        lockstep.close()


@pytest.mark.parametrize("place", ["a task", "a round"])
@pytest.mark.parametrize("num_tasks", [1, 3])
def test_first_error_is_raised_and_the_threads_can_be_used_again(
    place: str, num_tasks: int
) -> None:
    lockstep = Lockstep(num_tasks, save=lambda: nothing, set_up=nothing)
    caught: list[int] = []

    def fail(values: list[int]) -> None:
        raise ValueError("the sum failed")

    def task(number: int) -> None:
        try:
            lockstep.meet(number, fail if place == "a round" else len)
            if number == num_tasks - 1:
                raise ValueError("the sum failed")
            lockstep.meet(number, len)
        except Exception:
            caught.append(number)
            raise

    try:
        for _ in range(2):
            caught.clear()
            with pytest.raises(ValueError, match="the sum failed"):
                lockstep.run([functools.partial(task, number) for number in range(num_tasks)])
            assert caught == [num_tasks - 1], "an abandoned task looks like an exception"
        lockstep.run([nothing] * num_tasks)
    finally:
        lockstep.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("shard")]
