"""Notebook objects are sent by value, and errors name the objects that cannot be sent."""

from __future__ import annotations

import importlib
import linecache
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.bundle import capture
from etrain_jupyter.bundle.capture import capture_bundle
from etrain_jupyter.bundle.restore import open_bundle, read_cells
from etrain_jupyter.errors import BundleError


def notebook(source: str, *, number: int = 3) -> tuple[dict[str, Any], dict[str, int]]:
    """Run a cell as a kernel does; return its names and the file names of its cells."""
    filename = f"<cell-{number}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, filename, "exec"), names)
    return names, {filename: number}


def test_free_names_of_all_references_are_captured_together_and_stay_shared():
    shared = [1, 2]
    names = {"a": shared, "b": {"same": shared}, "unused": threading.Lock()}
    bundle = open_bundle(capture_bundle({"x": "a", "y": "b['same']"}, names).data)
    bundle_x, bundle_y = bundle.evaluate("x"), bundle.evaluate("y")
    assert bundle_x is bundle_y


def test_digest_identifies_the_content():
    first = capture_bundle({"x": "a + 1"}, {"a": 1})
    second = capture_bundle({"x": "a + 1"}, {"a": 2})
    assert first.digest != second.digest
    assert open_bundle(first.data).digest == first.digest


def test_expression_is_evaluated_again_each_time():
    names, _ = notebook("def make():\n    return object()\n")
    bundle = open_bundle(capture_bundle({"model": "make()"}, names).data)
    assert bundle.evaluate("model") is not bundle.evaluate("model")


def test_import_path_is_imported_on_the_worker():
    bundle = open_bundle(capture_bundle({"loss": "collections:OrderedDict.fromkeys"}, {}).data)
    assert bundle.evaluate("loss")("ab") == {"a": None, "b": None}


def test_module_next_to_the_notebook_is_sent_with_current_edits(tmp_path, monkeypatch):
    """The worker has no such file or a stale one: the module in memory is sent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("localnets.py").write_text("SIZE = 3\ndef build():\n    return 'net' * SIZE\n")
    module = importlib.import_module("localnets")
    try:
        data = capture_bundle({"model": "localnets.build()"}, {"localnets": module}).data
        Path("bundle").write_bytes(data)
        Path("localnets.py").unlink()
    finally:
        del sys.modules["localnets"]
    code = (
        "from etrain_jupyter.bundle.restore import open_bundle\n"
        "print(open_bundle(open('bundle', 'rb').read()).evaluate('model'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "netnetnet"


@pytest.mark.parametrize(
    ("source", "name", "fragments"),
    [
        pytest.param("f = open('/dev/null', 'w')", "f", ["'f'", "an open file"], id="file"),
        pytest.param("import threading\nx = threading.Lock()", "x", ["'x'", "lock"], id="lock"),
        pytest.param("g = (i for i in [1])", "g", ["'g'", "generator"], id="generator"),
        pytest.param(
            "log = open('/dev/null', 'w')\ndef loss(o, t):\n    log.write('x')\n",
            "loss",
            ["'loss' (defined in Cell In[3])", "'log', which it uses,", "an open file"],
            id="global of a function",
        ),
        pytest.param(
            "import threading\ndef make():\n    guard = threading.Lock()\n"
            "    return lambda o, t: guard\nloss = make()",
            "loss",
            ["'guard', which it encloses,", "lock"],
            id="closure",
        ),
    ],
)
def test_error_names_the_unpicklable_object_and_its_cell(source, name, fragments):
    names, cells = notebook(source)
    with pytest.raises(BundleError) as caught:
        capture_bundle({"loss": name}, names, cell_numbers=cells)
    text = str(caught.value)
    for fragment in [*fragments, "Nothing was submitted"]:
        assert fragment in text
    for opened in (names.get("f"), names.get("log")):
        if opened is not None:
            opened.close()


def test_large_object_causes_a_warning(monkeypatch):
    monkeypatch.setattr(capture, "LARGE_BYTES", 1000)
    bundle = capture_bundle({"data.train": "x"}, {"x": b"0" * 5000})
    [warning] = bundle.warnings
    assert "'x' (0 MB) will be copied to every worker" in warning
    assert bundle.sizes["x"] > 5000


def test_error_on_a_rank_shows_lines_of_cells():
    source = "def inner(x):\n    return 1 / x\n\ndef loss(x):\n    return inner(x)\n"
    names, cells = notebook(source, number=7)
    data = capture_bundle({"loss": "loss"}, names, cell_numbers=cells).data
    linecache.cache.pop("<cell-7>")
    bundle = open_bundle(data)
    bundle.install_sources()
    with pytest.raises(ZeroDivisionError) as caught:
        bundle.evaluate("loss")(0)
    text = bundle.format_user_traceback(caught.value)
    assert text.splitlines()[-5:] == [
        "  Cell In[7], line 5, in loss",
        "    return inner(x)",
        "  Cell In[7], line 2, in inner",
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]


def test_library_frames_above_user_code_are_omitted():
    names, cells = notebook("import json\ndef loss(x):\n    return json.loads('{')\n", number=8)
    bundle = open_bundle(capture_bundle({"loss": "loss"}, names, cell_numbers=cells).data)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - json's own subclass
        bundle.evaluate("loss")(0)
    text = bundle.format_user_traceback(caught.value)
    assert "Cell In[8], line 3, in loss" in text
    assert "decoder.py" in text  # what the user called may be shown
    assert "etrain_jupyter" not in text


def test_wrapper_frames_are_omitted():
    source = (
        "def _call_impl(f):\n    return f()\ndef loss(x):\n    return _call_impl(lambda: 1 / x)\n"
    )
    names, cells = notebook(source, number=9)
    bundle = open_bundle(capture_bundle({"loss": "loss"}, names, cell_numbers=cells).data)
    with pytest.raises(ZeroDivisionError) as caught:
        bundle.evaluate("loss")(0)
    assert "_call_impl(lambda" in (text := bundle.format_user_traceback(caught.value))
    assert "in _call_impl" not in text


def test_error_names_a_missing_module_of_an_import_path():
    bundle = open_bundle(capture_bundle({"model": "no_such_nets:Net"}, {}).data)
    with pytest.raises(BundleError, match="this worker has no module 'no_such_nets'"):
        bundle.evaluate("model")


def test_cells_are_read_without_opening_the_bundle():
    names, cells = notebook("def loss(x):\n    return x\n", number=4)
    data = capture_bundle({"loss": "loss"}, names, cell_numbers=cells).data
    assert read_cells(data)["<cell-4>"].label == "Cell In[4]"


@pytest.mark.timeout(20)
def test_named_pipe_in_place_of_a_bundle_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bundle")
    for read in (read_cells, open_bundle):
        with pytest.raises(OSError, match="not a regular file"):
            read(tmp_path / "bundle")


def test_bundle_of_an_open_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(capture_bundle({"x": "1"}, {}).data)
    assert open_bundle((tmp_path / "bundle").open("rb")).evaluate("x") == 1


def test_bundle_of_other_python_is_rejected():
    bundle = capture_bundle({"x": "1"}, {})
    other = bundle.data.replace(b'"python": [3,', b'"python": [2,', 1)
    with pytest.raises(BundleError, match=r"the notebook runs Python 2\."):
        open_bundle(other)
