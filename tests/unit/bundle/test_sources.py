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
    """Run text as the next cell of a notebook."""
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


def test_library_frames_between_user_frames_are_omitted(
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


def test_three_library_frames_below_the_last_user_frame_are_shown(
    run: Run, cells: dict[str, CellSource]
) -> None:
    names = run("import json\ndef load():\n    return json.loads('{')\n")
    lines = shown(cells, names["load"])
    files = [line for line in lines if line.startswith("  File")]
    assert len(files) == 3
    assert "decoder.py" in files[-1]
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == "  Cell In[1], line 3, in load"


def test_without_user_frames_all_frames_but_ours_are_shown(cells: dict[str, CellSource]) -> None:
    lines = shown(cells, functools.partial(json.loads, "{"))
    assert sum(line.startswith("  File ") for line in lines) == 3
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")


def test_frames_of_this_package_are_never_shown(cells: dict[str, CellSource]) -> None:
    text = "\n".join(shown(cells, functools.partial(free_names, "x =")))
    assert "SyntaxError" in text
    assert "references.py" not in text
    assert "in free_names" not in text


def test_cause_is_shown_above_its_effect(run: Run, cells: dict[str, CellSource]) -> None:
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
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        "  Cell In[1], line 5, in load",
        "    raise ValueError('no column x') from exc",
        "ValueError: no column x",
    ]


def test_context_is_shown_unless_it_is_suppressed(run: Run, cells: dict[str, CellSource]) -> None:
    text = (
        "def f():\n    try:\n        1 / 0\n    except ArithmeticError:\n"
        "        raise ValueError('x')"
    )
    assert "During handling of the above exception" in "\n".join(shown(cells, run(text)["f"]))
    assert "ZeroDivision" not in "\n".join(shown(cells, run(text + " from None")["f"]))


def test_cycle_of_causes_terminates(cells: dict[str, CellSource]) -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert format_user_traceback(first, cells).splitlines()[-1] == "ValueError: a"


def test_infinite_recursion_is_abbreviated(run: Run, cells: dict[str, CellSource]) -> None:
    names = run("def f(n):\n    return f(n + 1)\n")
    lines = shown(cells, lambda: names["f"](0))
    assert len(lines) < 4 * MAX_USER_FRAMES
    assert any(" more frames ..." in line for line in lines)
    assert lines[-1].startswith("RecursionError: ")


def test_notes_and_syntax_errors_keep_their_text(run: Run, cells: dict[str, CellSource]) -> None:
    names = run("def f():\n    e = ValueError('x')\n    e.add_note('look here')\n    raise e\n")
    assert shown(cells, names["f"])[-2:] == ["ValueError: x", "look here"]
    names = run("def g():\n    compile('x =', '<text>', 'exec')\n")
    assert shown(cells, names["g"])[-1] == "SyntaxError: invalid syntax"


def test_exception_without_traceback_is_one_line(cells: dict[str, CellSource]) -> None:
    assert format_user_traceback(ValueError("x"), cells) == "ValueError: x"


def test_installed_sources_survive_checkcache() -> None:
    install_sources({"<cell 99>": CellSource(label="Cell In[99]", text="a = 1\nb = 2\n")})
    try:
        linecache.checkcache()
        assert linecache.getline("<cell 99>", 2) == "b = 2\n"
    finally:
        del linecache.cache["<cell 99>"]


def test_only_user_sources_are_collected(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_libraries_are_distinguished_from_user_files() -> None:
    assert is_library(json.__file__)
    assert is_library(pytest.__file__)
    assert not is_library(__file__)


def test_defining_cell_is_the_last_that_assigned_the_name() -> None:
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
