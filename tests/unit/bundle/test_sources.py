from __future__ import annotations

import functools
import json
import linecache
import sys
from collections.abc import Callable
from typing import Any

import pytest

from etrain_jupyter.bundle.sources import (
    MAX_USER_FRAMES,
    CellSource,
    collect_sources,
    defining_cell,
    format_user_traceback,
    install_sources,
    is_library,
)
from etrain_jupyter.config.references import free_names

Run = Callable[[str], dict[str, Any]]


@pytest.fixture
def cells() -> dict[str, CellSource]:
    return {}


@pytest.fixture
def run(cells: dict[str, CellSource]) -> Run:
    """Run text as the next cell of a notebook whose cells share their names."""
    names: dict[str, Any] = {"__name__": "__main__"}

    def run_cell(text: str) -> dict[str, Any]:
        filename = f"<cell {len(cells) + 1}>"
        cells[filename] = CellSource(label=f"Cell In[{len(cells) + 1}]", text=text)
        exec(compile(text, filename, "exec"), names)
        return names

    return run_cell


def shown(cells: dict[str, CellSource], call: Callable[[], Any]) -> list[str]:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any will do
        call()
    # The frame of this helper is no part of the story.
    exc = caught.value
    assert exc.__traceback__ is not None
    lines = format_user_traceback(exc.with_traceback(exc.__traceback__.tb_next), cells)
    return [line for line in lines.splitlines() if __file__ not in line]


def test_frames_are_cells_with_their_lines(run: Run, cells: dict[str, CellSource]) -> None:
    run("def inner(x):\n    return 1 / x\n")
    names = run("def loss(x):\n    y = x\n    return inner(y)\n")
    assert shown(cells, functools.partial(names["loss"], 0)) == [
        "Traceback (most recent call last):",
        "  Cell In[2], line 3, in loss",
        "    return inner(y)",
        "  Cell In[1], line 2, in inner",
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]


def test_libraries_between_the_users_frames_are_left_out(
    run: Run, cells: dict[str, CellSource]
) -> None:
    names = run(
        "import functools\n"
        "def key(x):\n    raise ValueError('bad sample')\n"
        "@functools.lru_cache\ndef cached(x):\n    return key(x)\n"
        "@functools.wraps(key)\ndef loss(x):\n"
        "    return functools.reduce(lambda a, b: cached(b), [1, 2])\n"
    )
    lines = shown(cells, lambda: names["loss"](1))
    assert not any("functools" in line and line.startswith("  File") for line in lines)
    assert lines[-1] == "ValueError: bad sample"


def test_libraries_below_the_users_last_frame_show_three_frames(
    run: Run, cells: dict[str, CellSource]
) -> None:
    names = run("import json\ndef load():\n    return json.loads('{')\n")
    lines = shown(cells, names["load"])
    files = [line for line in lines if line.startswith("  File")]
    assert len(files) == 3
    assert "decoder.py" in files[-1]
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == "  Cell In[1], line 3, in load"


def test_without_a_users_frame_all_but_ours_is_shown(cells: dict[str, CellSource]) -> None:
    lines = shown(cells, functools.partial(json.loads, "{"))
    assert sum(line.startswith("  File ") for line in lines) == 3
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")


def test_our_own_frames_are_never_shown(cells: dict[str, CellSource]) -> None:
    text = "\n".join(shown(cells, functools.partial(free_names, "x =")))
    assert "SyntaxError" in text
    assert "references.py" not in text
    assert "in free_names" not in text


def test_a_cause_stands_above_what_it_caused(run: Run, cells: dict[str, CellSource]) -> None:
    names = run(
        "def load():\n    try:\n        {}['x']\n    except KeyError as exc:\n"
        "        raise ValueError('no column x') from exc\n"
    )
    lines = shown(cells, names["load"])
    assert lines == [
        "Traceback (most recent call last):",
        "  Cell In[1], line 3, in load",
        "    {}['x']",
        "KeyError: 'x'",
        "",
        "The above exception was the direct cause of the following:",
        "",
        "Traceback (most recent call last):",
        "  Cell In[1], line 5, in load",
        "    raise ValueError('no column x') from exc",
        "ValueError: no column x",
    ]


def test_what_was_being_handled_is_shown_unless_it_is_hidden(
    run: Run, cells: dict[str, CellSource]
) -> None:
    text = (
        "def f():\n    try:\n        1 / 0\n    except ArithmeticError:\n"
        "        raise ValueError('x')"
    )
    assert "While the above exception was handled" in "\n".join(shown(cells, run(text)["f"]))
    assert "ZeroDivision" not in "\n".join(shown(cells, run(text + " from None")["f"]))


def test_causes_in_a_circle_end(cells: dict[str, CellSource]) -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert format_user_traceback(first, cells).splitlines()[-1] == "ValueError: a"


def test_a_recursion_without_end_is_folded(run: Run, cells: dict[str, CellSource]) -> None:
    names = run("def f(n):\n    return f(n + 1)\n")
    lines = shown(cells, lambda: names["f"](0))
    assert len(lines) < 4 * MAX_USER_FRAMES
    assert any(" more frames ..." in line for line in lines)
    assert lines[-1].startswith("RecursionError: ")


def test_notes_and_syntax_errors_keep_their_words(run: Run, cells: dict[str, CellSource]) -> None:
    names = run("def f():\n    e = ValueError('x')\n    e.add_note('look here')\n    raise e\n")
    assert shown(cells, names["f"])[-2:] == ["ValueError: x", "look here"]
    names = run("def g():\n    compile('x =', '<text>', 'exec')\n")
    assert shown(cells, names["g"])[-1] == "SyntaxError: invalid syntax"


def test_an_exception_that_was_never_raised_is_one_line(cells: dict[str, CellSource]) -> None:
    assert format_user_traceback(ValueError("x"), cells) == "ValueError: x"


def test_installed_sources_outlive_a_check_of_the_cache() -> None:
    install_sources({"<cell 99>": CellSource(label="Cell In[99]", text="a = 1\nb = 2\n")})
    try:
        linecache.checkcache()
        assert linecache.getline("<cell 99>", 2) == "b = 2\n"
    finally:
        del linecache.cache["<cell 99>"]


def test_sources_are_those_of_the_user(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("x = 1\n")
    install_sources({"<cell 98>": CellSource(label="", text="y = 2\n")})
    names = ["<cell 98>", str(tmp_path / "nets.py"), json.__file__, pytest.__file__, "<nowhere>"]
    names.append(sys.modules[collect_sources.__module__].__file__ or "")
    found = collect_sources(names, {"<cell 98>": 4})
    assert {cell.label: cell.text for cell in found.values()} == {
        "Cell In[4]": "y = 2\n",
        "nets.py": "x = 1\n",
    }
    del linecache.cache["<cell 98>"]


def test_libraries_are_told_from_the_users_files() -> None:
    assert is_library(json.__file__)
    assert is_library(pytest.__file__)
    assert not is_library(__file__)


def test_the_cell_of_a_name_is_the_last_that_assigned_it() -> None:
    texts = {"<c1>": "a = 1\nb = 2", "<c2>": "a = [x for x in ()]", "<c3>": "import os.path\n(("}
    texts["<c4>"] = "import os.path"
    install_sources({name: CellSource(label="", text=text) for name, text in texts.items()})
    numbers = {"<c1>": 1, "<c2>": 2, "<c3>": 3, "<c4>": 4}
    try:
        assert defining_cell("a", 1, numbers) == "Cell In[2]"
        assert defining_cell("b", 2, numbers) == "Cell In[1]"
        assert defining_cell("os", sys, numbers) == "Cell In[4]"
        assert defining_cell("nothing", 0, numbers) == ""
    finally:
        for name in texts:
            del linecache.cache[name]
