from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from etrain_jupyter.notebook.editor.facts import FRESH_S, CachedList, ShellFacts, list_known_jobs
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.storage.bucket_log.locations import spool_of_root

NOTEBOOK = """\
import operator
touched = []
class Net:
    def __init__(self, hidden=8, *, depth=1): ...
class Careful:
    @property
    def weight(self):
        touched.append("weight")
        return self
    def __getattr__(self, name):
        touched.append(name)
        raise AttributeError(name)
careful = Careful()
base_seed = 3
cfg = {"seed": 3}
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    shell.run_cell(NOTEBOOK)
    yield shell
    shell.restore_sys_module_state()


def python(shell: InteractiveShell, code: str) -> list[str]:
    """Return the completions of ``code`` as whole expressions."""
    found = ShellFacts(shell).complete_python(code)
    return [code[: found.start] + offer.text for offer in found.items]


# --- Python ---


def test_names_exclude_those_of_ipython_itself(shell: InteractiveShell) -> None:
    names = ShellFacts(shell).names

    assert {"Net", "careful", "base_seed"} <= set(names)
    assert "open" not in names
    shell.run_cell("open = Net")
    assert "open" in ShellFacts(shell).names


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("base", "base_seed"),
        ("1 + base", "1 + base_seed"),
        ("operator.ad", "operator.add"),
        ("f(operator.ad", "f(operator.add"),
        ("Net(", "Net(hidden="),
        ("Net(h", "Net(hidden="),
        ("Net(hidden=1, ", "Net(hidden=1, depth="),
        ("Net(hidden=base", "Net(hidden=base_seed"),
        ('cfg["', 'cfg["seed'),
        ("max(base", "max(base_seed"),
        ("sor", "sorted"),
    ],
)
def test_expressions_are_completed(shell: InteractiveShell, code: str, expected: str) -> None:
    assert expected in python(shell, code)


def test_keyword_is_offered_once(shell: InteractiveShell) -> None:
    assert "Net(hidden=1, hidden=" not in python(shell, "Net(hidden=1, ")
    assert python(shell, "Net(hidden=1, d")[0] == "Net(hidden=1, depth="


def test_statements_magics_and_files_are_not_offered(shell: InteractiveShell) -> None:
    assert "import" not in python(shell, "imp")
    assert python(shell, "%ti") == []
    assert python(shell, "'/us") == []


def test_empty_expression_does_not_offer_builtins(
    shell: InteractiveShell,
) -> None:
    found = python(shell, "Net(")

    assert "Net(base_seed" in found
    assert "Net(ArithmeticError" not in found


@pytest.mark.parametrize("code", ["careful.", "careful.weight.", "careful.weight(", "careful.x("])
def test_properties_and_getattr_of_the_user_are_not_run(shell: InteractiveShell, code: str) -> None:
    python(shell, code)

    assert shell.user_ns["touched"] == []


@pytest.mark.parametrize("code", ["", "(", "f(((", "a.b.c.", "'", "x[", "lambda: ", "é.", "0."])
def test_incomplete_expressions_do_not_raise(shell: InteractiveShell, code: str) -> None:
    assert isinstance(python(shell, code), list)


# --- what is looked up in the background ---


class Clock:
    """A clock that the test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_slow_list_is_not_awaited_but_available_the_next_time() -> None:
    may_answer, clock = threading.Event(), Clock()

    def look_up() -> list[str]:
        may_answer.wait()
        return ["digits"]

    recalled = CachedList(look_up, "test-recall", clock)
    assert recalled.get(max_wait_s=0.01) == ()
    may_answer.set()

    assert recalled.get(max_wait_s=60) == ["digits"]


def test_concurrent_requests_share_one_look_up() -> None:
    may_answer, begun = threading.Event(), []

    def look_up() -> list[str]:
        begun.append(1)
        may_answer.wait()
        return []

    recalled = CachedList(look_up, "test-recall", Clock())
    for _ in range(5):
        recalled.get(max_wait_s=0)
    may_answer.set()
    recalled.get(max_wait_s=60)

    assert begun == [1]


def test_list_is_reused_for_a_moment_and_then_loaded_again() -> None:
    answers, clock = iter([["a"], ["a", "b"]]), Clock()
    recalled = CachedList(lambda: next(answers), "test-recall", clock)

    assert recalled.get(max_wait_s=60) == ["a"]
    assert recalled.get(max_wait_s=60) == ["a"]
    clock.now += FRESH_S + 1
    assert recalled.get(max_wait_s=60) == ["a", "b"]


def test_failed_look_up_returns_an_empty_list() -> None:
    def look_up() -> list[str]:
        raise OSError("no such disk")

    assert CachedList(look_up, "test-recall").get(max_wait_s=60) == ()


# --- jobs ---


def make_job(root: Path, name: str, at: float) -> str:
    record = RunStore(root).create({"name": name, "created": at})
    os.utime(record.folder / "job.json", (at, at))
    return record.job_id


def test_jobs_are_names_then_ids_newest_first(tmp_path: Path) -> None:
    old = make_job(tmp_path, "digits", 1)
    faces = make_job(tmp_path, "faces", 2)
    new = make_job(tmp_path, "digits", 3)
    (tmp_path / "no-job").mkdir()
    (tmp_path / ".hidden-0a1b2c3d").mkdir()
    (tmp_path / "notes.txt").write_text("")

    assert list_known_jobs({"ETRAIN_RUNS": str(tmp_path)}) == ["digits", "faces", new, faces, old]


def test_without_a_run_store_there_are_no_jobs(tmp_path: Path) -> None:
    assert list_known_jobs({"ETRAIN_RUNS": str(tmp_path / "none")}) == []


def test_jobs_of_a_bucket_come_from_local_copies_without_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the bucket was asked")

    monkeypatch.setattr("socket.socket.connect", refuse)
    url = "s3://bucket/prefix"
    job_id = make_job(spool_of_root(url), "digits", 1)

    assert list_known_jobs({"ETRAIN_RUNS": url}) == ["digits", job_id]
