from __future__ import annotations

import hashlib
import importlib
import json
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from etrain_jupyter.bundle.capture import capture_bundle
from etrain_jupyter.bundle.restore import HEADER, open_bundle, read_cells
from etrain_jupyter.errors import BundleError


class Counter:
    """An instance with mutable state, like a model."""

    def __init__(self) -> None:
        self.value = 0


def test_references_share_one_object() -> None:
    counter = Counter()
    opened = open_bundle(capture_bundle({"a": "c", "b": "[c]"}, {"c": counter}).data)
    assert opened.evaluate("a") is opened.evaluate("b")[0]


def test_second_evaluation_returns_the_state_of_the_notebook() -> None:
    opened = open_bundle(capture_bundle({"model": "c"}, {"c": Counter()}).data)
    trained = opened.evaluate("model")
    trained.value = 5
    assert opened.evaluate("model").value == 0
    assert trained.value == 5


def test_expression_is_evaluated_again_each_time() -> None:
    opened = open_bundle(capture_bundle({"model": "make()"}, {"make": Counter}).data)
    assert opened.evaluate("model") is not opened.evaluate("model")


def test_import_path_is_imported_on_the_worker() -> None:
    opened = open_bundle(capture_bundle({"loss": "collections:OrderedDict.fromkeys"}, {}).data)
    assert opened.evaluate("loss")("ab") == {"a": None, "b": None}


def test_evaluation_does_not_change_captured_names() -> None:
    references = {"a": "(x := x + 1)", "b": "x"}
    opened = open_bundle(capture_bundle(references, {"x": 1}).data)
    assert (opened.evaluate("a"), opened.evaluate("b")) == (2, 1)


def test_exception_of_the_notebook_is_not_wrapped() -> None:
    opened = open_bundle(capture_bundle({"a": "1 / x"}, {"x": 0}).data)
    with pytest.raises(ZeroDivisionError) as caught:
        opened.evaluate("a")
    # Without the frame of this test.
    exc = caught.value.with_traceback(caught.tb.tb_next)
    assert opened.format_user_traceback(exc).splitlines() == [
        "Traceback (most recent call last):",
        "  a of the cell, line 1",
        "    1 / x",
        "ZeroDivisionError: division by zero",
    ]


def test_digest_is_the_sha256_of_the_bytes() -> None:
    bundle = capture_bundle({"a": "1"}, {})
    assert bundle.digest == hashlib.sha256(bundle.data).hexdigest()
    assert open_bundle(bundle.data).digest == bundle.digest


def test_received_buffer_can_be_opened() -> None:
    data = capture_bundle({"a": "x"}, {"x": [1]}).data
    assert open_bundle(bytearray(data)).evaluate("a") == [1]


@pytest.mark.parametrize("data", [b"", b"ab", b"\0\0\0\5hello", b"\0\0\1\0{", bytes(100)])
def test_invalid_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(BundleError, match=f"these {len(data)} bytes are not a complete bundle"):
        open_bundle(data)


def rewritten(**changes: object) -> bytes:
    data = capture_bundle({"a": "x"}, {"x": Counter()}).data
    (length,) = HEADER.unpack_from(data)
    header = json.loads(data[HEADER.size : HEADER.size + length]) | changes
    text = json.dumps(header).encode()
    return HEADER.pack(len(text)) + text + data[HEADER.size + length :]


def test_other_format_is_rejected() -> None:
    with pytest.raises(BundleError, match="the bundle has format 99, but this worker reads"):
        open_bundle(rewritten(format=99))


def test_other_minor_python_is_rejected_but_other_patch_is_accepted() -> None:
    major, minor = sys.version_info[:2]
    open_bundle(rewritten(python=[major, minor, 99]))
    with pytest.raises(BundleError, match=rf"runs Python {major}\.{minor + 1}, but this worker"):
        open_bundle(rewritten(python=[major, minor + 1, 0]))


def test_different_packages_are_reported() -> None:
    opened = open_bundle(rewritten(packages={"cloudpickle": "0.1", "no-such-package": "2"}))
    first, second = opened.differences()
    assert first.startswith("cloudpickle 0.1 in the notebook, ")
    assert second == "no-such-package 2 in the notebook, none here"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An installed module: it is not in the notebook's folder."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed_for_test.py").write_text("class Thing: ...\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    yield importlib.import_module("installed_for_test")
    sys.modules.pop("installed_for_test", None)


def test_error_names_a_module_that_is_missing_on_the_worker(
    elsewhere: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = capture_bundle({"a": "x"}, {"x": elsewhere.Thing()}).data
    del sys.modules["installed_for_test"]
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()
    with pytest.raises(BundleError, match="'x' of the notebook needs the module 'installed_for"):
        open_bundle(data).evaluate("a")


def test_error_names_an_object_that_cannot_be_unpickled(elsewhere: ModuleType) -> None:
    data = capture_bundle({"a": "x"}, {"x": elsewhere.Thing()}).data
    del elsewhere.Thing
    with pytest.raises(BundleError, match="'x' of the notebook cannot be unpickled on this worker"):
        open_bundle(data).evaluate("a")


def test_error_names_a_missing_module_of_an_import_path() -> None:
    opened = open_bundle(capture_bundle({"model": "no_such_nets:Net"}, {}).data)
    with pytest.raises(BundleError, match="this worker has no module 'no_such_nets'"):
        opened.evaluate("model")


# --- cells ---


def bundle_of_cell(text: str) -> bytes:
    """Capture the function ``loss`` of a cell, whose text is then only in the bundle."""
    names: dict[str, Any] = {"__name__": "__main__"}
    linecache.cache["<cell-7>"] = (len(text), None, text.splitlines(keepends=True), "<cell-7>")
    exec(compile(text, "<cell-7>", "exec"), names)
    data = capture_bundle({"loss": "loss"}, names, cell_numbers={"<cell-7>": 7}).data
    del linecache.cache["<cell-7>"]
    return data


def test_cells_are_read_without_unpickling() -> None:
    assert read_cells(bundle_of_cell("def loss(x): ..."))["<cell-7>"].label == "Cell In[7]"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "def inner(x):\n    return 1 / x\n\ndef loss(x):\n    return inner(x)\n",
            ["line 5, in loss", "return inner(x)", "line 2, in inner", "return 1 / x"],
        ),
        (  # torch's name for a wrapper, whose frame is omitted
            "def _call_impl(f):\n    return f()\ndef loss(x):\n"
            "    return _call_impl(lambda: 1 / x)\n",
            [
                *("line 4, in loss", "return _call_impl(lambda: 1 / x)"),
                *("line 4, in <lambda>", "return _call_impl(lambda: 1 / x)"),
            ],
        ),
    ],
)
def test_error_on_a_rank_shows_lines_of_cells(text: str, shown: list[str]) -> None:
    opened = open_bundle(bundle_of_cell(text))
    opened.install_sources()
    with pytest.raises(ZeroDivisionError) as caught:
        opened.evaluate("loss")(0)
    lines = opened.format_user_traceback(caught.value).splitlines()[-5:]
    lines = [line.strip().removeprefix("Cell In[7], ") for line in lines]
    assert lines == [*shown, "ZeroDivisionError: division by zero"]


# --- files ---


@pytest.mark.timeout(20)
def test_named_pipe_in_place_of_a_bundle_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bundle")
    for read in (read_cells, open_bundle):
        with pytest.raises(OSError, match="not a regular file"):
            read(tmp_path / "bundle")


def test_bundle_of_an_open_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(capture_bundle({"x": "1"}, {}).data)
    assert open_bundle((tmp_path / "bundle").open("rb")).evaluate("x") == 1
