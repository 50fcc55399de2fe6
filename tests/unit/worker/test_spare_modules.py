"""Modules that the next spare of a worker imports."""

from __future__ import annotations

from etrain_jupyter.wire.fork_records import MAX_MODULES_BYTES
from etrain_jupyter.worker.spare_modules import SpareModules


def test_modules_of_several_jobs_add_up_in_order_and_each_is_imported_once() -> None:
    modules = SpareModules()

    assert modules.learn(["b", "a"])
    assert modules.learn(["a", "c"])
    assert not modules.learn(["c", "b"])

    assert modules.current == ("b", "a", "c")


def test_refused_modules_are_not_learned_again_and_the_others_remain() -> None:
    modules = SpareModules()
    modules.learn(["a"])
    modules.learn(["threads", "a"])

    modules.refuse_newest()

    assert modules.current == ("a",)
    assert not modules.learn(["threads"])
    assert modules.learn(["threads", "b"])
    assert modules.current == ("a", "b")


def test_more_modules_than_fit_into_a_variable_are_not_learned() -> None:
    modules = SpareModules()
    modules.learn(["a"])

    assert not modules.learn(["x" * MAX_MODULES_BYTES])

    assert modules.current == ("a",)
